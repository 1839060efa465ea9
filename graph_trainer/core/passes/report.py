"""What each pass did: nodes, collectives, bytes, predicted peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from graph_trainer.core.analysis.collectives import collective_inputs
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import Phase, annotations_of, is_analysed_alike, phase_of
from graph_trainer.core.graph.collective_kinds import KINDS, Result
from graph_trainer.core.graph.content import Content, is_same, known_content
from graph_trainer.core.graph.data_sizes import nbytes_of
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import collective_name, is_collective
from graph_trainer.core.text import WIDTH, aligned, wrapped
from graph_trainer.core.units import MIB

HEADINGS = ("after", "nodes", "gather fwd", "gather bwd", "reduce", "comm MiB", "peak MiB", "s")
"""Headings of `Report.cells`: all-gathers by phase, reductions, MiB that all collectives read on
this rank, predicted peak above the inputs, seconds."""

EQUAL = "bitwise equal"
"""What `verify_passes` says of a pass that keeps every bit."""


@dataclass(frozen=True, slots=True)
class PassRun:
    """What a pass did and says."""

    name: str
    seconds: float
    changed: bool = field(default=True, kw_only=True)
    """Whether the pass changed anything that an analysis could see, and was not rolled back."""
    rolled_back: str = field(default="", kw_only=True)
    """Why the pass was rolled back; empty where it was not."""
    remarks: tuple[str, ...] = field(default=(), kw_only=True)
    """What the pass says about its work, the summary first."""
    verified: str = field(default="", kw_only=True)
    """How the numbers compare with those before the pass, or why they were not compared; empty
    without `verify_passes`."""


@dataclass(frozen=True, slots=True)
class PassReport(PassRun):
    """A pass and the graph after it."""

    nodes: int
    collectives: dict[tuple[str, str], int]
    """Number of collectives by (kind, phase)."""
    collective_bytes: int
    """Bytes that the collectives read on this rank."""
    peak_bytes: int
    """Predicted peak of what the graph allocates, above parameters and batch."""

    def count(self, kind: str, phase: Phase | None = None) -> int:
        """Count the collectives of one kind, in one phase or in all."""
        return sum(
            number
            for (of_kind, where), number in self.collectives.items()
            if of_kind == kind and (phase is None or where == phase.value)
        )


def measure(joint: JointGraph, run: PassRun) -> PassReport:
    """Make the report row of a pass from the graph as it is now. Linear in nodes."""
    nodes = list(compute_nodes(joint.graph))
    issued = [node for node in nodes if is_collective(node)]
    return PassReport(
        **asdict(run),
        nodes=len(nodes),
        collectives=dict(Counter((collective_name(n), str(phase_of(n) or "")) for n in issued)),
        collective_bytes=sum(nbytes_of(t) for n in issued for t in collective_inputs(n)),
        peak_bytes=lifetimes(joint).peak_bytes,
    )


GraphState = tuple[Content, list[Mapping[str, str]]]


def graph_state(joint: JointGraph) -> GraphState:
    """Return what changes whenever an analysis of the graph could. Linear in nodes."""
    return known_content(joint.graph), list(map(annotations_of, joint.graph.nodes))


def is_same_state(before: GraphState, now: GraphState) -> bool:
    """Tell whether an analysis sees the same in two states."""
    return is_same(before[0], now[0]) and all(map(is_analysed_alike, before[1], now[1]))


def standing_remarks(remarks: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return a line for every pass that has remarked on its work, given names and remarks."""
    return [f"{name}: {summary}" for name, (summary, *_) in remarks]


@dataclass(slots=True)
class Report:
    """A row a pass, the first being the graph as captured."""

    rows: list[PassReport] = field(default_factory=list)

    def add(self, joint: JointGraph, run: PassRun) -> None:
        """Add the row of a pass; one that changed nothing leaves the numbers of the row before."""
        row = measure(joint, run) if run.changed else replace(self.last, **asdict(run))
        self.rows.append(row)

    @property
    def last(self) -> PassReport:
        """The graph as it is compiled."""
        return self.rows[-1]

    def cells(self) -> list[list[str]]:
        """Return the rows as text under HEADINGS; a number that a pass changed has the change."""
        gathers = [name for name, kind in KINDS.items() if kind.result is Result.GATHERED]
        reductions = [name for name, kind in KINDS.items() if kind.reduces]
        table: list[list[str]] = []
        before: list[float] | None = None
        for row in self.rows:
            forward = sum(row.count(n, p) for n in gathers for p in (Phase.FORWARD, Phase.LOSS))
            numbers = [
                row.nodes,
                forward,
                sum(row.count(name, Phase.BACKWARD) for name in gathers),
                sum(row.count(name) for name in reductions),
                row.collective_bytes / MIB,
                row.peak_bytes / MIB,
            ]
            cells = [f"{row.name}, rolled back" if row.rolled_back else row.name]
            for value, earlier in zip(numbers, before or numbers, strict=True):
                digits = 1 if isinstance(value, float) else 0
                change = round(value - earlier, digits)
                cells.append(f"{value:,.{digits}f}" + (f" {change:+,.{digits}f}" if change else ""))
            table.append([*cells, f"{row.seconds:.2f}"])
            before = numbers
        return table

    def notes(self) -> list[str]:
        """Return a line for every pass that was rolled back or has a remark, and with
        `verify_passes` one about passes whose numbers it does not find bitwise equal."""
        verified: dict[str, list[str]] = {}
        for row in self.rows:
            if row.verified not in ("", EQUAL):
                verified.setdefault(row.verified, []).append(row.name)
        return [
            *standing_remarks((row.name, row.remarks) for row in self.rows if row.remarks),
            *(f"{row.name} was {row.rolled_back}" for row in self.rows if row.rolled_back),
            *(f"{', '.join(names)}: {text}" for text, names in verified.items()),
        ]

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH) -> str:
        """Write the table and the notes in lines of at most `width` columns, if the table fits."""
        table = [list(HEADINGS), *self.cells()]
        lines = aligned(table, right=range(1, len(HEADINGS)))
        if max(map(len, lines)) > width:
            table = [line for row in table for line in _on_two_lines(row)]
            lines = aligned(table, right=range(1, len(HEADINGS)))
        for column in ("s", "nodes"):  # what a reader misses least, where changes are long
            if max(map(len, lines)) > width:
                place = table[0].index(column)
                table = [row[:place] + row[place + 1 :] for row in table]
                lines = aligned(table, right=range(1, len(table[0])))
        return "\n".join([*lines, *(wrapped(note, width) for note in self.notes())])


def _on_two_lines(row: Sequence[str]) -> list[list[str]]:
    """Return a row of a report with what follows a number, its change, on a line below; so the
    second words of headings."""
    name, *cells = row
    parts = [cell.partition(" ") for cell in cells]
    first = [name, *(part[0] for part in parts)]
    second = ["", *(part[2] for part in parts)]
    return [first, second] if any(second) else [first]
