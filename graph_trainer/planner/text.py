"""A report of a plan as tables for a terminal, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graph_trainer.core.passes.memory_limit import KEY
from graph_trainer.core.units import unit_of
from graph_trainer.planner.console import plain_table
from graph_trainer.planner.plan import Outcome
from graph_trainer.planner.plan_report import CATEGORIES, ledger_columns

_MODULES_SHOWN = 8
_WAITS_SHOWN = 5
_LAYERS_SHOWN = 5


def report_text(report: dict[str, Any]) -> RenderableType:
    """Make all tables of a report."""
    return Group(*_parts(report))


def _parts(report: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text(report["headline"], style="bold")
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


def _ledger_table(ledger: list[dict[str, Any]]) -> Table:
    """Make a row for each pass, with its change under every number."""
    unit, size = unit_of(max(row["peak_bytes"] for row in ledger))
    table = plain_table(
        f"What each pass does; all-gathers, reduce-scatters and all-reduces with their {unit}"
    )
    table.add_column("after", no_wrap=True)
    columns: list[tuple[list[float], str]] = []
    milliseconds = ",.1f" if max(row["step_seconds"] for row in ledger) < 1 else ",.0f"
    for name, kind, values in ledger_columns(ledger):
        if kind == "count":
            heading, scale, form = name.replace("-", "-\n"), 1.0, ",.0f"
        elif kind == "bytes":
            heading = unit if name == "moved" else f"{name}\n{unit}"
            scale, form = 1 / size, ",.1f" if name == "moved" else ",.2f"
        else:
            heading, scale, form = f"{name}\nms", 1e3, milliseconds
        table.add_column(heading, justify="right")
        columns.append(([value * scale for value in values], form))
    idle = []
    for place, row in enumerate(ledger):
        same = place and all(values[place] == values[place - 1] for values, _ in columns)
        if same and not row["rolled_back"]:
            idle.append(row["pass"])
            continue
        cells = [
            _changed(values[place], values[place - 1] if place else None, form)
            for values, form in columns
        ]
        table.add_row(f"{row['pass']}\nrolled back" if row["rolled_back"] else row["pass"], *cells)
    if idle:
        table.caption = f"Without effect on these numbers: {', '.join(idle)}."
        table.caption_justify = "left"
    return table


def _changed(value: float, before: float | None, form: str) -> Text:
    text = Text(format(value, form))
    change = "" if before is None else format(value - before, "+" + form)
    if change.strip("+-0.,"):
        text.append(f"\n{change}", style="dim")
    return text


def _memory_table(peak: dict[str, Any]) -> Table:
    """Make the table of the categories of memory at the peak."""
    unit, size = unit_of(peak["bytes"])
    table = plain_table(f"Memory at the peak, at node {peak['node']}")
    table.add_column("what", min_width=60)
    table.add_column(unit, justify="right")
    table.add_column("part", justify="right")
    for category, num in peak["by_category"].items():
        table.add_row(CATEGORIES[category], f"{num / size:,.2f}", f"{num / peak['bytes']:.0%}")
    table.add_row("peak", f"{peak['bytes'] / size:,.2f}", "100%", style="bold")
    return table


def _modules_table(peak: dict[str, Any]) -> Table:
    """Make the table of the modules that have most alive at the peak."""
    unit, size = unit_of(peak["bytes"])
    table = plain_table("Largest live tensors at the peak, by module; layers.* is every layer")
    table.add_column("module", overflow="fold")
    table.add_column("what")
    table.add_column("tensors", justify="right")
    table.add_column(unit, justify="right")
    for each in peak["modules"][:_MODULES_SHOWN]:
        table.add_row(
            Text(each["module"] or "(the model itself)"),
            CATEGORIES[each["category"]],
            f"{each['tensors']:,}",
            f"{each['bytes'] / size:,.2f}",
        )
    return table


def _waits_table(report: dict[str, Any]) -> Table:
    """Make the table of the collectives that compute waits for longest."""
    table = plain_table("Exposed communication: where compute waits")
    table.add_column("for")
    table.add_column("collective of", overflow="fold")
    table.add_column("holds up, first", overflow="fold")
    table.add_column("ms", justify="right")
    table.add_column("of step", justify="right")
    for each in report["exposed_by_module"][:_WAITS_SHOWN]:
        table.add_row(
            each["role"],
            Text(f"{each['kind']} {each['owner']}"),
            Text(each["holds_up"] or "the end of the step"),
            f"{each['seconds'] * 1e3:,.2f}",
            f"{each['seconds'] / report['graph_seconds']:.1%}",
        )
    return table


def _kept_table(rows: list[dict[str, Any]]) -> Table:
    """Make the table of what backward has of each block; what nothing keeps is left out."""
    table = plain_table("Kept for backward, by op of a block; all else is computed again")
    table.add_column("module")
    table.add_column("op", overflow="fold")
    table.add_column("kept in", overflow="fold")
    for heading in ("MiB a block", "ms again"):
        table.add_column(heading, justify="right")
    kept = [row for row in rows if row["keep_in"]]
    for row in sorted(kept, key=lambda row: -row["mib"]):
        table.add_row(
            Text(row["module"] or "(the block itself)"),
            Text(row["op"] + (f" ({row['nth'] + 1})" if row["nth"] else "")),
            Text(", ".join(row["keep_in"])),
            f"{row['mib']:,.1f}",
            f"{row['milliseconds']:,.3f}",
        )
    return table


def _curve_table(report: dict[str, Any]) -> Table:
    """Make the table of step times over memory, the fewest bytes first."""
    unit, size = unit_of(max(each["needed_bytes"] for each in report["memory_curve"]))
    table = plain_table("Step time over memory: fixed policies, and the best plan within a limit")
    table.add_column("policy")
    for heading in (f"limit {unit}", f"peak {unit}", f"needs {unit}", "step ms"):
        table.add_column(heading, justify="right")
    for each in sorted(report["memory_curve"], key=lambda each: each["peak_bytes"]):
        table.add_row(
            each["policy"],
            f"{each['limit_bytes'] / size:,.2f}" if each["limit_bytes"] else "",
            f"{each['peak_bytes'] / size:,.2f}",
            f"{each['needed_bytes'] / size:,.2f}",
            f"{each['step_seconds'] * 1e3:,.1f}",
        )
    return table


def _expert_loads(loads: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the table of loads, which imbalance fits, and the layers that are spread worst."""
    rows = loads["rows"]
    unit, size = unit_of(max(each["needed_bytes"] for each in rows))
    table = plain_table("Experts: what the fullest rank receives, in times of an even share")
    table.add_column("tokens", overflow="fold")
    for heading in ("imbalance", f"peak {unit}", f"needs {unit}", "step ms", "fits"):
        table.add_column(heading, justify="right")
    for each in rows:
        table.add_row(
            Text(each["what"]),
            f"{each['imbalance']:,.2f}",
            f"{each['peak_bytes'] / size:,.2f}",
            f"{each['needed_bytes'] / size:,.2f}",
            f"{each['step_seconds'] * 1e3:,.1f}",
            "yes" if each["fits"] else "NO",
        )
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
    if not report["advice"]:
        return Text("No single setting would help: use more ranks, or hardware with more memory.")
    unit, size = unit_of(report["needed_bytes"])
    table = plain_table("What would help most, one change at a time, estimated from five layers")
    table.add_column("flags", overflow="fold")
    for heading in (f"needs {unit}", "saves", "tok/s/GPU", "fits"):
        table.add_column(heading, justify="right")
    for each in report["advice"]:
        saved = (report["needed_bytes"] - each["needed_bytes"]) / size
        table.add_row(
            Text(" ".join(each["flags"])),
            f"{each['needed_bytes'] / size:,.1f}",
            f"{saved:,.1f}",
            f"{each['tokens_per_second_per_gpu']:,.0f}",
            "yes" if each["fits"] else "no",
        )
    return table


def fit_and_speed(report: dict[str, Any]) -> str:
    """Format whether the run fits and how fast it is."""
    needed, headroom = report["needed_bytes"], abs(report["headroom_bytes"])
    unit, size = unit_of(max(needed, headroom))

    def text(num: int) -> str:
        return f"{num / size:,.1f} {unit}"

    needs, allowed = text(needed), needed + report["headroom_bytes"]
    peak, allocated = report["peak"]["bytes"], report["allocated_bytes"]
    if needed > peak:
        needs += (
            f" (peak {peak / size:,.1f}, gaps of the allocator {(allocated - peak) / size:,.1f}, "
            f"reserved for driver and communication {(needed - allocated) / size:,.1f})"
        )
    limited = allowed == report["limit_bytes"]
    bound = f"{text(allowed)} of {KEY if limited else report['hardware']['name']}"
    memory = (
        f"Fits: needs {needs} of the {bound}; {text(headroom)} head-room."
        if report["fits"]
        else f"Does not fit: needs {needs}, {text(headroom)} more than the {bound}."
    )
    microbatches = report["microbatches"]
    return (
        f"{memory}\n{report['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, MFU "
        f"{report['mfu']:.1%}, {report['step_seconds']:,.3f} s a step of {microbatches} microbatch"
        f"{'es' if microbatches > 1 else ''}."
    )


def comparison_table(rows: Sequence[Outcome], memory_bytes: int) -> Table:
    """Make a table with a row for each combination."""
    unit, size = unit_of(max(row.needed_bytes for row in rows))
    table = plain_table(
        f"All combinations; fits: needs at most {memory_bytes / size:,.1f} {unit}, or a lower "
        "compile.memory_limit_gib"
    )
    table.add_column("fits", no_wrap=True)
    for key in rows[0].config:
        table.add_column(key.replace(".", ".\n"), overflow="fold")
    for heading in (f"needs {unit}", "step ms", "exposed ms", "tok/s/GPU", "MFU"):
        table.add_column(heading, justify="right")
    for row in rows:
        values = map(Text, row.config.values())
        if row.error:
            table.add_row("-", *values, *[""] * 5)
            continue
        table.add_row(
            "yes" if row.fits else "NO",
            *values,
            f"{row.needed_bytes / size:,.2f}",
            f"{row.step_seconds * 1e3:,.1f}",
            f"{row.exposed_seconds * 1e3:,.1f}",
            f"{row.tokens_per_second_per_gpu:,.0f}",
            f"{row.mfu:.1%}",
            style="" if row.fits else "dim",
        )
    return table
