"""A plan as tables for a terminal, at most 100 columns wide."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx

from graph_trainer.core.analysis.collective_kinds import mergeable_kinds
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.annotations import (
    owner_of,
    parameters_of,
)
from graph_trainer.core.names import without_layer
from graph_trainer.core.passes.report import standing_remarks
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.units import unit_of
from graph_trainer.planner.console import plain_table
from graph_trainer.planner.ledger import LedgerRow
from graph_trainer.planner.plan import Plan

_OWNERS_SHOWN = 8
_WAITS_SHOWN = 5


def report(plan: Plan) -> RenderableType:
    """All tables of a plan."""
    return Group(*_parts(plan))


def _parts(plan: Plan) -> Iterator[RenderableType]:
    yield Text(plan.headline, style="bold")
    if decided := _decided_for(plan):
        yield Text(decided)
    yield ledger_table(plan.rows)
    if said := _remarks(plan.rows):
        yield Text(said)
    if plan.config.compile.memory_limit_gib is not None and plan.world_size > 1:
        yield Text(
            f"compile.memory_limit_gib is held here against what rank {plan.rank} needs. In "
            "training the rank that needs most decides for all, as it does in --save and "
            "--verify-order.\n"
        )
    yield memory_table(plan)
    yield owners_table(plan)
    if plan.simulation.timeline.exposed:
        yield waits_table(plan)
    yield Text(verdict(plan))
    if not plan.fits:
        yield advice_table(plan)


def _decided_for(plan: Plan) -> str:
    """What to know where passes and simulation look at two machines."""
    named = plan.config.compile.hardware
    if named is None or load_hardware(named, "compile.hardware") == plan.hardware:
        return ""
    return (
        f"Passes that decide by simulation do so for {named}, as compile.hardware says; what they "
        f"made is simulated on {plan.hardware.name}.\n"
    )


def ledger_table(rows: list[LedgerRow]) -> Table:
    """A row a pass; under a number what the pass changed in it."""
    unit, size = unit_of(max(row.peak_bytes for row in rows))
    table = plain_table(
        f"What each pass does; all-gathers, reduce-scatters and all-reduces with their {unit}"
    )
    table.add_column("after", no_wrap=True)
    columns: list[tuple[str, Callable[[LedgerRow], float], str]] = [
        ("nodes", lambda row: row.nodes, ",.0f")
    ]
    for kind, shown in mergeable_kinds().items():
        if any(row.of_kind(kind).count for row in rows):
            heading = shown.replace("-", "-\n")
            columns.append((heading, lambda row, k=kind: row.of_kind(k).count, ",.0f"))  # type: ignore[misc]
            columns.append((unit, lambda row, k=kind: row.of_kind(k).bytes / size, ",.1f"))  # type: ignore[misc]
    milliseconds = ",.1f" if max(row.step_seconds for row in rows) < 1 else ",.0f"
    columns += [
        (f"peak\n{unit}", lambda row: row.peak_bytes / size, ",.2f"),
        ("step\nms", lambda row: row.step_seconds * 1e3, milliseconds),
        ("exposed\nms", lambda row: row.exposed * 1e3, milliseconds),
    ]
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    before: LedgerRow | None = None
    idle = []
    for row in rows:
        values = [read(row) for _, read, _ in columns]
        old = None if before is None else [read(before) for _, read, _ in columns]
        before = row
        if values == old and not row.rolled_back:
            idle.append(row.name)
            continue
        cells = [
            _changed(value, None if old is None else old[place], columns[place][2])
            for place, value in enumerate(values)
        ]
        table.add_row(f"{row.name}\nrolled back" if row.rolled_back else row.name, *cells)
    if idle:
        table.caption = f"Without effect on these numbers: {', '.join(idle)}."
        table.caption_justify = "left"
    return table


def _remarks(rows: list[LedgerRow]) -> str:
    """What passes say of their own work, a line each."""
    return "".join(f"{line}\n" for line in standing_remarks(rows))


def _changed(value: float, before: float | None, form: str) -> Text:
    text = Text(format(value, form))
    change = "" if before is None else format(value - before, "+" + form)
    if change.strip("+-0.,"):
        text.append(f"\n{change}", style="dim")
    return text


CATEGORIES = {
    Category.PARAMETERS: "parameters",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.BUFFERS: "buffers and batch",
    Category.GRADIENTS: "gradients",
    Category.UNSHARDED: "unsharded parameters",
    Category.ACTIVATIONS: "activations kept for backward",
    Category.TEMPORARIES: "temporaries",
    Category.COMMUNICATION: "communication buffers",
}


def memory_table(plan: Plan) -> Table:
    """What the peak is made of."""
    memory = plan.simulation.memory
    node = list(plan.simulation.joint.graph.nodes)[memory.peak_position]
    unit, size = unit_of(memory.peak_bytes)
    table = plain_table(f"Memory at the peak, at node {node.name}")
    table.add_column("what", min_width=60)
    table.add_column(unit, justify="right")
    table.add_column("part", justify="right")
    for category, num in memory.peak_by_category().items():
        table.add_row(CATEGORIES[category], f"{num / size:,.2f}", f"{num / memory.peak_bytes:.0%}")
    table.add_row("peak", f"{memory.peak_bytes / size:,.2f}", "100%", style="bold")
    return table


def owners_table(plan: Plan) -> Table:
    """Who holds most of what the graph has made at the peak; layers together."""
    memory = plan.simulation.memory
    total: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for storage in memory.live_at(memory.peak_position):
        key = (without_layer(storage.owner), CATEGORIES[storage.category])
        total[key] += storage.bytes
        count[key] += 1
    unit, size = unit_of(memory.peak_bytes)
    table = plain_table("Largest live tensors at the peak, by module; layers.* is every layer")
    table.add_column("module", overflow="fold")
    table.add_column("what")
    table.add_column("tensors", justify="right")
    table.add_column(unit, justify="right")
    for (owner, title), num in total.most_common(_OWNERS_SHOWN):
        row = (f"{count[(owner, title)]:,}", f"{num / size:,.2f}")
        table.add_row(Text(owner or "(the model itself)"), title, *row)
    return table


def served_by(collective: fx.Node) -> str:
    """Whose collective it is, layers together; of a bucket over several modules how many
    parameters, and from which to which."""
    several = parameters_of(collective)
    owner = owner_of(collective)
    if not owner and several:
        owner = f"{len(several)} parameters, {several[0]} to {several[-1]}"
    return without_layer(owner)


def waits_table(plan: Plan) -> Table:
    """Where compute stands still, by module."""
    timeline = plan.simulation.timeline
    total: dict[tuple[str, str, str], float] = defaultdict(float)
    held: dict[tuple[str, str, str], str] = {}
    for wait in timeline.exposed:
        owner = served_by(wait.collective.node)
        key = (wait.traffic.value, wait.collective.kind, owner)
        total[key] += wait.seconds
        held.setdefault(key, wait.delayed.name if wait.delayed else "the end of the step")
    table = plain_table("Exposed communication: where compute waits")
    table.add_column("for")
    table.add_column("collective of", overflow="fold")
    table.add_column("holds up, first", overflow="fold")
    table.add_column("ms", justify="right")
    table.add_column("of step", justify="right")
    for (role, kind, owner), seconds in sorted(total.items(), key=lambda i: -i[1])[:_WAITS_SHOWN]:
        of_step = f"{seconds / timeline.step_seconds:.1%}"
        name = Text(f"{kind} {owner}")
        first = Text(held[(role, kind, owner)])
        table.add_row(role, name, first, f"{seconds * 1e3:,.2f}", of_step)
    return table


def advice_table(plan: Plan) -> RenderableType:
    """What would help a run that does not fit, the most helpful first."""
    if not plan.advice:
        return Text("No single setting would help: use more ranks, or hardware with more memory.")
    unit, size = unit_of(plan.reserved_bytes)
    table = plain_table("What would help most, one change at a time, estimated from four layers")
    table.add_column("flags", overflow="fold")
    table.add_column(f"needs {unit}", justify="right")
    table.add_column("saves", justify="right")
    table.add_column("tok/s/GPU", justify="right")
    table.add_column("fits", justify="right")
    for each in plan.advice:
        saved = (plan.reserved_bytes - each.reserved_bytes) / size
        table.add_row(
            Text(each.words()),
            f"{each.reserved_bytes / size:,.1f}",
            f"{saved:,.1f}",
            f"{each.tokens_per_second_per_gpu:,.0f}",
            "yes" if each.fits else "no",
        )
    return table


def verdict(plan: Plan) -> str:
    """Does it fit, and how fast is it."""
    unit, size = unit_of(max(plan.reserved_bytes, abs(plan.headroom_bytes)))
    usable = f"{plan.hardware.usable_bytes / size:,.1f} {unit}"
    room = f"{abs(plan.headroom_bytes) / size:,.1f} {unit}"
    needs = f"{plan.reserved_bytes / size:,.1f} {unit}"
    if plan.reserved_bytes > plan.peak_bytes:
        needs += f" (peak {plan.peak_bytes / size:,.1f}, the rest is the allocator's)"
    memory = (
        f"Fits: needs {needs} of {usable}; {room} head-room."
        if plan.fits
        else f"Does not fit: needs {needs}, {room} more than the {usable} of {plan.hardware.name}."
    )
    return (
        f"{memory}\n{plan.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU {plan.mfu:.1%}, "
        f"{plan.step_seconds:,.3f} s a step of {plan.microbatches} microbatch"
        f"{'es' if plan.microbatches > 1 else ''}."
    )
