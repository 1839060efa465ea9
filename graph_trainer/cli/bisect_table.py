"""A verdict for people, in at most 100 columns."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graph_trainer.core.bisect.node_diff import NodeDifference
from graph_trainer.core.bisect.search import CAPTURE, Row, Verdict

_RANKS_SHOWN = 8


def verdict_table(verdict: Verdict) -> RenderableType:
    """A row a prefix, then who is at fault, by how much, and the first node."""
    table = Table(
        title="Loss, gradients and buffers after each pass, compared with the eager model",
        title_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("after", no_wrap=True)
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("differ", justify="right", no_wrap=True)
    table.add_column("first that differs", overflow="fold")
    for heading in ("max abs", "max rel"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ranks", overflow="fold")
    for row in verdict.rows:
        table.add_row(*map(Text, _cells(row, verdict.compared)))
    return Group(table, Text(_conclusion(verdict), overflow="fold"))


def _cells(row: Row, compared: int) -> list[str]:
    if not row.ranks:
        return [row.name, f"{row.nodes:,}", "0", f"none of {compared}", "", "", ""]
    first = row.found[row.ranks[0]][0]
    what = f"{first.name} ({first.note})" if first.note else first.name
    number = max(len(differences) for differences in row.found)
    amounts = [f"{first.max_abs:.3g}", f"{first.max_rel:.3g}"]
    return [row.name, f"{row.nodes:,}", f"{number}", what, *amounts, _ranks(row.ranks)]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return shown if len(ranks) <= _RANKS_SHOWN else f"{shown}, ... ({len(ranks)})"


def _conclusion(verdict: Verdict) -> str:
    culprit, node = verdict.culprit, verdict.first_node
    if culprit is None:
        return "Every prefix is bitwise equal to the eager model on every rank."
    if culprit == CAPTURE:
        return (
            "The graph differs as captured, before any pass: capture is at fault, or the step does "
            "something that no graph holds. Please report it with the config."
        )
    if node is None:
        return (
            f"'{culprit}' is the first pass that changes the numbers. Every node that leads there "
            "and can be compared has the value that it had before; compare the graphs themselves."
        )
    ranks = [rank for rank, found in enumerate(verdict.nodes) if found is not None]
    return "\n".join(
        [
            f"'{culprit}' is the first pass that changes the numbers. The first node that differs:",
            *_lines(node),
            f"  on ranks {_ranks(ranks)}",
        ]
    )


def _lines(node: NodeDifference) -> list[str]:
    where = ", ".join(
        [f"phase {node.phase}"] * bool(node.phase) + [f"module {node.module}"] * bool(node.module)
    )
    origin = "kept by the pass" if node.kept else "inserted by the pass"
    lines = [f"  {node.name}  ({node.op})  {where}", f"  {origin}"]
    if node.before:
        lines.append(f"  before  {node.before}")
    lines.append(f"  after   {node.after}")
    amount = f"max abs {node.difference.max_abs:.3g}, max rel {node.difference.max_rel:.3g}"
    if node.difference.note:
        amount += f"; {node.difference.note}"
    at = "" if node.seen_at == node.name else f" at {node.seen_at}, which reads it"
    return [*lines, f"  {amount}{at}"]
