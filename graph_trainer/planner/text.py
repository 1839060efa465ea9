"""A report of a plan as tables for a terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from graph_trainer.core.graph.collective_kinds import shown_name
from graph_trainer.core.passes.memory_limit import KEY
from graph_trainer.core.units import MIB
from graph_trainer.planner.console import plain_table
from graph_trainer.planner.measures import Measure, duration, measure
from graph_trainer.planner.plan import Outcome
from graph_trainer.planner.plan_report import CATEGORIES, idle_passes, ledger_columns

_MODULES_SHOWN = 8
_WAITS_SHOWN = 5
_LAYERS_SHOWN = 5


def report_text(report: dict[str, Any]) -> RenderableType:
    """Make all tables of a report."""
    return Group(*_parts(report))


def _parts(report: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"{report['headline']}\n{report['settings']}", style="bold")
    for note in report["notes"]:
        yield Text(f"{note}\n")
    yield _ledger_table(report["ledger"])
    if report["remarks"]:
        yield Text("".join(f"{line}\n" for line in report["remarks"]))
    yield _memory_table(report["peak"])
    yield _modules_table(report["peak"])
    if report["exposed_by_module"]:
        yield _waits_table(report)
    if report["memory_table"]:
        yield _kept_table(report["memory_table"])
    if report["memory_curve"]:
        yield _curve_table(report)
    if report["expert_loads"]:
        yield from _expert_loads(report["expert_loads"])
    yield Text(fit_and_speed(report))
    if not report["fits"]:
        yield _advice_table(report)


def _add(table: Table, heading: str, kind: str, values: Sequence[float]) -> list[str]:
    """Add a column of numbers, its unit in the heading; return the cells."""
    unit = measure(kind, values)
    table.add_column(f"{heading} {unit.unit}", justify="right")
    return list(map(unit.digits, values))


def _ledger_table(ledger: list[dict[str, Any]]) -> Table:
    """Make a row for each pass, with its change under every number."""
    table = plain_table("What each pass does")
    table.add_column("after", no_wrap=True)
    columns: list[tuple[Sequence[float], Measure]] = []
    moved: list[Column] = []
    counts: list[Column] = []
    for name, kind, values in ledger_columns(ledger):
        unit = measure(kind, values)
        heading = name.replace("-", "-\n") if kind == "count" else f"{name}\n{unit.unit}"
        table.add_column(heading, justify="right")
        columns.append((values, unit))
        if kind == "count":
            counts.append(table.columns[-1])
        elif name == "moved":
            moved.append(table.columns[-1])
    table.optional = (tuple(moved), tuple(counts[:1]), tuple(counts[1:]))
    idle = idle_passes(ledger)
    for place, row in enumerate(ledger):
        if place in idle:
            continue
        cells = []
        for values, unit in columns:
            cell = Text(unit.digits(values[place]))
            change = unit.digits(values[place] - values[place - 1]) if place else ""
            if change.strip("-0.,"):
                cell.append(f"\n{change if change[0] == '-' else '+' + change}", style="dim")
            cells.append(cell)
        table.add_row(f"{row['pass']}\nrolled back" if row["rolled_back"] else row["pass"], *cells)
    if idle:
        names = ", ".join(ledger[place]["pass"] for place in sorted(idle))
        table.caption = f"Without effect on these numbers: {names}."
    return table


def _memory_table(peak: dict[str, Any]) -> Table:
    """Make the table of the categories of memory at the peak."""
    table = plain_table(f"Memory at the peak, at node {peak['node']}")
    table.add_column("what", min_width=55)
    categories = peak["by_category"]
    cells = _add(table, "", "bytes", [*categories.values(), peak["bytes"]])
    table.add_column("part", justify="right")
    for category, cell in zip(categories, cells, strict=False):
        part = f"{categories[category] / peak['bytes']:.0%}"
        table.add_row(CATEGORIES[category], cell, part)
    table.add_row("peak", cells[-1], "100%", style="bold")
    return table


def _modules_table(peak: dict[str, Any]) -> Table:
    """Make the table of the modules that have most alive at the peak."""
    table = plain_table("Largest live tensors at the peak, by module; layers.* is every layer")
    table.add_column("module", overflow="fold")
    table.add_column("what")
    table.add_column("tensors", justify="right")
    table.optional = ((table.columns[-1],),)
    modules = peak["modules"][:_MODULES_SHOWN]
    for each, cell in zip(
        modules, _add(table, "", "bytes", [each["bytes"] for each in modules]), strict=True
    ):
        table.add_row(
            Text(each["module"] or "(the model itself)"),
            CATEGORIES[each["category"]],
            f"{each['tensors']:,}",
            cell,
        )
    return table


def _waits_table(report: dict[str, Any]) -> Table:
    """Make the table of the collectives that compute waits for longest."""
    table = plain_table("Exposed communication: where compute waits")
    table.add_column("for")
    table.add_column("collective of", overflow="fold")
    table.add_column("first holds up", overflow="fold")
    waits = report["exposed_by_module"][:_WAITS_SHOWN]
    cells = _add(table, "", "seconds", [each["seconds"] for each in waits])
    table.add_column("of step", justify="right")
    table.optional = ((table.columns[-1],), (table.columns[2],))
    for each, cell in zip(waits, cells, strict=True):
        table.add_row(
            each["purpose"],
            Text(f"{shown_name(each['kind'])}\n{each['owner']}"),
            Text(each["holds_up"].replace(" in ", "\nin ")),
            cell,
            f"{each['seconds'] / report['graph_seconds']:.1%}",
        )
    return table


def _kept_table(rows: list[dict[str, Any]]) -> Table:
    """Make the table of what backward has of each block; what nothing keeps is left out."""
    table = plain_table("Kept for backward, by op of a block; all else is computed again")
    for heading in ("module", "op", "kept in"):
        table.add_column(heading, overflow="fold")
    kept = sorted((row for row in rows if row["keep_in"]), key=lambda row: -row["mib"])
    sizes = _add(table, "a block", "bytes", [row["mib"] * MIB for row in kept])
    times = _add(table, "again", "seconds", [row["milliseconds"] / 1e3 for row in kept])
    for row, size, time in zip(kept, sizes, times, strict=True):
        table.add_row(
            Text(row["module"] or "(the block itself)"),
            Text(row["op"] + (f" ({row['nth'] + 1})" if row["nth"] else "")),
            Text(", ".join(row["keep_in"])),
            size,
            time,
        )
    return table


def _curve_table(report: dict[str, Any]) -> Table:
    """Make the table of step times over memory, the fewest bytes first."""
    table = plain_table("Step time over memory: fixed policies, and the best plan within a limit")
    table.add_column("policy")
    curve = sorted(report["memory_curve"], key=lambda each: each["peak_bytes"])
    columns = [
        _add(table, heading, "bytes", [each[f"{key}_bytes"] or 0 for each in curve])
        for heading, key in (("limit", "limit"), ("peak", "peak"), ("needs", "needed"))
    ]
    columns.append(_add(table, "step", "seconds", [each["step_seconds"] for each in curve]))
    for each, limit, *cells in zip(curve, *columns, strict=True):
        table.add_row(each["policy"], limit if each["limit_bytes"] else "", *cells)
    return table


def _expert_loads(loads: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the table of loads, which imbalance fits, and the layers that are spread worst."""
    rows = loads["rows"]
    table = plain_table("Experts: what the fullest rank receives, in times of an even share")
    table.add_column("tokens", overflow="fold")
    table.add_column("imbalance", justify="right")
    columns = [
        _add(table, "peak", "bytes", [each["peak_bytes"] for each in rows]),
        _add(table, "needs", "bytes", [each["needed_bytes"] for each in rows]),
        _add(table, "step", "seconds", [each["step_seconds"] for each in rows]),
    ]
    table.add_column("fits")
    for each, *cells in zip(rows, *columns, strict=True):
        fits = "yes" if each["fits"] else "NO"
        table.add_row(Text(each["what"]), f"{each['imbalance']:,.2f}", *cells, fits)
    yield table
    yield Text(f"{what_imbalance_fits(loads)}\n")


def what_imbalance_fits(loads: dict[str, Any]) -> str:
    """Format the greatest imbalance that fits, and where a routing was most uneven."""
    greatest, degree = loads["greatest_that_fits"], loads["degree"]
    if greatest is None:
        text = "Even shares of the tokens do not fit."
    elif greatest == degree:
        text = "Any routing fits, all tokens to one rank too."
    else:
        text = f"Fits up to an imbalance of {greatest:.2f} in every layer."
    if loads["layers"]:
        worst = nlargest(_LAYERS_SHOWN, loads["layers"].items(), key=lambda item: item[1])
        listed = ", ".join(f"{name} {imbalance:.2f}" for name, imbalance in worst)
        text += f" As routed, most uneven: {listed}."
    return text


def _advice_table(report: dict[str, Any]) -> RenderableType:
    """Make the table of changes for a run that does not fit."""
    advice, now = report["advice"], report["needed_bytes"]
    if not advice:
        return Text("No single setting would help: use more ranks, or hardware with more memory.")
    table = plain_table("What would help most, one change at a time, estimated from five layers")
    table.add_column("flags", overflow="fold")
    needed = [each["needed_bytes"] for each in advice]
    columns = [
        _add(table, "needs", "bytes", needed),
        _add(table, "saves", "bytes", [now - num for num in needed]),
        _add(table, "tok/s/GPU", "count", [each["tokens_per_second_per_gpu"] for each in advice]),
    ]
    table.add_column("fits")
    for each, *cells in zip(advice, *columns, strict=True):
        table.add_row(Text(" ".join(each["flags"])), *cells, "yes" if each["fits"] else "no")
    return table


def fit_and_speed(report: dict[str, Any]) -> str:
    """Format whether the run fits and how fast it is."""
    needed, allowed = report["needed_bytes"], allowed_bytes(report)
    unit = measure("bytes", [needed, allowed])._replace(places=1)
    needs = unit.text(needed)
    peak, allocated = report["peak"]["bytes"], report["allocated_bytes"]
    if needed > peak:
        needs += (
            f" (peak {unit.digits(peak)}, gaps of the allocator {unit.digits(allocated - peak)}, "
            f"reserved for driver and communication {unit.digits(needed - allocated)})"
        )
    bound = f"{unit.text(allowed)} of {bound_of(report)}"
    left = unit.text(abs(report["headroom_bytes"]))
    memory = (
        f"Fits: needs {needs} of the {bound}; {left} head-room."
        if report["fits"]
        else f"Does not fit: needs {needs}, {left} more than the {bound}."
    )
    microbatches = report["microbatches"]
    return (
        f"{memory}\n{report['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, MFU "
        f"{report['mfu']:.1%}, {duration(report['step_seconds'])} a step of {microbatches} "
        f"microbatch{'es' if microbatches > 1 else ''}."
    )


def allowed_bytes(report: dict[str, Any]) -> int:
    """Return what the run may need: of its device, or of the limit that was given."""
    return report["needed_bytes"] + report["headroom_bytes"]


def bound_of(report: dict[str, Any]) -> str:
    """Return the name of what bounds the memory: the key of the limit, or the hardware."""
    return KEY if allowed_bytes(report) == report["limit_bytes"] else report["hardware"]["name"]


def comparison_table(rows: Sequence[Outcome], allowed: int) -> Table:
    """Make a table with a row for each combination; `allowed` bytes is what all of them may need
    that compare no limits."""
    most = measure("bytes", [allowed], significant=3).text(allowed)
    limits = f", and at most the row's {KEY}" if KEY in rows[0].config else ""
    table = plain_table(f"All combinations; one fits that needs at most {most}{limits}")
    table.add_column("fits", no_wrap=True)
    for key in rows[0].config:
        table.add_column(_heading(key), overflow="fold")
    planned = [row for row in rows if not row.error]
    columns = [
        _add(table, "needs", "bytes", [row.needed_bytes for row in planned]),
        _add(table, "step", "seconds", [row.step_seconds for row in planned]),
        _add(table, "tok/s/GPU", "count", [row.tokens_per_second_per_gpu for row in planned]),
        _add(table, "exposed", "seconds", [row.exposed_seconds for row in planned]),
    ]
    table.add_column("MFU", justify="right")
    table.optional = tuple((column,) for column in table.columns[:-3:-1])
    cells_of = zip(*columns, strict=True)
    for row in rows:
        values = map(Text, row.config.values())
        if row.error:
            table.add_row("-", *values)
            continue
        cells = (*next(cells_of), f"{row.mfu:.1%}")
        fits = "yes" if row.fits else "NO"
        table.add_row(fits, *values, *cells, style="" if row.fits else "dim")
    return table


def _heading(key: str) -> str:
    """Break a key of the config behind dots, and where it is long behind underscores."""
    lines: list[str] = []
    for part in key.replace(".", ". ").split():
        lines += textwrap.wrap(part.replace("_", "_ "), 18)
    return "\n".join(line.replace("_ ", "_") for line in lines)
