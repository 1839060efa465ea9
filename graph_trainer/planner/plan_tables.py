"""A report of a plan as tables for a terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import pairwise
from typing import Any

from rich.console import RenderableType, group
from rich.text import Text

from graph_trainer.core.graph.collective_kinds import mergeable_kinds, shown_name
from graph_trainer.core.units import MIB, gib
from graph_trainer.planner.bands import NO_BAND
from graph_trainer.planner.measures import duration, measure
from graph_trainer.planner.plan_report import CATEGORIES
from graph_trainer.planner.terminal import Name, PlainTable, plain_table
from graph_trainer.titan.config.core_settings import LIMIT_KEY

_LAYERS_SHOWN = 5
_SAME_MFU = 0.1
"""Two counts that differ by a smaller part are shown as one."""


@group()
def report_text(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Make all tables of a report."""
    yield Text(f"{report['headline']}\n{report['settings']}", style="bold")
    for note in report["notes"]:
        yield Text(f"{note}\n")
    yield ledger_table(report["ledger"])
    if report["remarks"]:
        yield Text("".join(f"{line}\n" for line in report["remarks"]))
    yield memory_table(report["peak"])
    yield modules_table(report["peak"])
    if report["exposed_by_module"]:
        yield waits_table(report)
    if any(row["keep_in"] for row in report["memory_table"]):
        yield _kept_table(report["memory_table"])
    if report["memory_curve"]:
        yield _curve_table(report)
    if report["expert_loads"]:
        yield experts_table(report["expert_loads"]["rows"])
        yield Text(f"{what_imbalance_fits(report)}\n")
    yield Text(fit_and_speed(report))
    if report["fits"]:
        yield Text(report["certainty"])
    if report["limited_by"]:
        yield Text(report["limited_by"])
    if report["spare"]:
        yield Text(report["spare"])
    if report["advice"]:
        yield advice_table(report)
    if not report["fits"] and not any(change["fits"] for change in report["advice"]):
        tried = "None of these makes it fit, nor do they together" if report["advice"] else ""
        yield Text(f"{tried or 'No setting would help'}: use hardware with more memory.")


Column = tuple[str, str, Sequence[Any]]
"""Heading, kind and values; the kind is that of `measure`, or "part" of a whole, "text", "name"."""


def make_table(title: str, *columns: Column) -> PlainTable:
    """Make a table. Numbers stand right, with their unit in the heading; a name may be folded."""
    table = plain_table(title)
    cells: list[list[RenderableType]] = []
    for heading, kind, values in columns:
        if kind in ("text", "name"):
            table.add_column(heading, overflow="fold" if kind == "name" else "ellipsis")
            cells.append([(Name if kind == "name" else Text)(str(value)) for value in values])
        elif kind == "part":
            table.add_column(heading, justify="right")
            cells.append(["" if value is None else f"{value:.1%}" for value in values])
        else:
            unit = measure(kind, [value for value in values if value is not None])
            table.add_column(f"{heading} {unit.unit}".strip(), justify="right")
            cells.append(["" if value is None else unit.digits(value) for value in values])
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    return table


def _of(rows: Iterable[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


def _where_it_fits(rows: Iterable[dict[str, Any]], key: str) -> list[Any]:
    """Return times or speeds, None for the rows of runs that cannot run."""
    return [row[key] if row["fits"] else None for row in rows]


def ledger_table(ledger: list[dict[str, Any]]) -> PlainTable:
    """Make a row for each pass that changes a number, with its change under every number."""
    shown: list[list[Text]] = []
    table = plain_table("What each pass does")
    table.add_column("after", no_wrap=True)
    counts = []
    for name, kind, values in _ledger_columns(ledger):
        unit = measure(kind, values)
        heading = name.replace("-", "-\n") if kind == "count" else f"{name}\n{unit.unit}"
        table.add_column(heading, justify="right")
        if kind == "count":
            counts.append(table.columns[-1])
        cells = [Text(unit.digits(values[0]))]
        for before, now in pairwise(values):
            change = unit.digits(now - before)
            cells.append(Text(unit.digits(now)))
            if change.strip("-0.,"):
                cells[-1].append(f"\n{'' if now < before else '+'}{change}", style="dim")
        shown.append(cells)
    moved = tuple(column for column in table.columns if str(column.header).startswith("moved"))
    nodes, *kinds = counts
    table.optional = (moved, (nodes,), tuple(kinds))
    idle = []
    for row, *cells in zip(ledger, *shown, strict=True):
        back = row["rolled_back"]
        if table.row_count and not back and not any("\n" in cell.plain for cell in cells):
            idle.append(row["pass"])
        else:
            table.add_row(f"{row['pass']}\nrolled back" if back else row["pass"], *cells)
    if idle:
        table.caption = f"Without effect on these numbers: {', '.join(idle)}."
    return table


def _ledger_columns(ledger: list[dict[str, Any]]) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Yield the columns of the table of passes: name, unit and the value of each row.

    The unit is "count", "bytes" or "seconds". Kinds of collectives that no row has are left out.
    """

    def volumes(row: dict[str, Any], kind: str, key: str) -> int:
        phases = row["collectives"].get(kind, {}).values()
        return sum(volume[key] for roles in phases for volume in roles.values())

    yield "nodes", "count", [row["nodes"] for row in ledger]
    for kind, shown in mergeable_kinds().items():
        if any(counts := [volumes(row, kind, "count") for row in ledger]):
            yield shown, "count", counts
            yield "moved", "bytes", [volumes(row, kind, "bytes") for row in ledger]
    yield "peak", "bytes", [row["peak_bytes"] for row in ledger]
    yield "step", "seconds", [row["step_seconds"] for row in ledger]
    yield "exposed", "seconds", [sum(row["exposed_seconds"].values()) for row in ledger]
    if any(waits := [row["host_wait_seconds"] for row in ledger]):
        yield "for host", "seconds", waits


def memory_table(peak: dict[str, Any]) -> PlainTable:
    """Make the table of the categories of memory at the peak."""
    sizes = [*peak["by_category"].values(), peak["bytes"]]
    table = make_table(
        f"Memory at the peak, at node {peak['node']}",
        ("what", "text", [*map(CATEGORIES.__getitem__, peak["by_category"]), "peak"]),
        ("", "bytes", sizes),
        ("part", "part", [num / peak["bytes"] for num in sizes]),
    )
    table.columns[0].min_width = 55
    return table


def modules_table(peak: dict[str, Any], most: int = 8) -> PlainTable:
    """Make the table of the modules that have most alive at the peak."""
    rows = peak["modules"][:most]
    table = make_table(
        "Largest live tensors at the peak, by module; layers.* is every layer",
        ("module", "name", [row["module"] or "(the model itself)" for row in rows]),
        ("what", "text", [CATEGORIES[row["category"]] for row in rows]),
        ("tensors", "count", _of(rows, "tensors")),
        ("", "bytes", _of(rows, "bytes")),
    )
    table.optional = ((table.columns[2],),)
    return table


def waits_table(report: dict[str, Any], most: int = 5) -> PlainTable:
    """Make the table of the collectives that compute waits for longest."""
    rows = report["exposed_by_module"][:most]
    table = make_table(
        "Exposed communication: where compute waits",
        ("what for", "text", _of(rows, "purpose")),
        ("collective", "name", [f"{shown_name(row['kind'])}\n{row['owner']}" for row in rows]),
        ("first holds up", "name", [row["holds_up"].replace(" in ", "\nin ") for row in rows]),
        ("", "seconds", _of(rows, "seconds")),
        ("of step", "part", [row["seconds"] / report["graph_seconds"] for row in rows]),
    )
    table.optional = ((table.columns[4],), (table.columns[2],))
    return table


def _kept_table(rows: list[dict[str, Any]]) -> PlainTable:
    """Make the table of what backward has of each block; what nothing keeps is left out."""
    rows = sorted((row for row in rows if row["keep_in"]), key=lambda row: -row["mib"])
    ops = [row["op"] + (f" ({row['nth'] + 1})" if row["nth"] else "") for row in rows]
    return make_table(
        "Kept for backward, by op of a block; all else is computed again",
        ("module", "name", [row["module"] or "(the block itself)" for row in rows]),
        ("op", "name", ops),
        ("kept in", "name", [", ".join(row["keep_in"]) for row in rows]),
        ("a block", "bytes", [row["mib"] * MIB for row in rows]),
        ("again", "seconds", [row["milliseconds"] / 1e3 for row in rows]),
    )


def _curve_table(report: dict[str, Any]) -> PlainTable:
    """Make the table of step times over memory, the fewest bytes first."""
    rows = sorted(report["memory_curve"], key=lambda point: point["peak_bytes"])
    return make_table(
        "Step time over memory: fixed policies, and the best plan within a limit",
        ("policy", "text", _of(rows, "policy")),
        ("limit", "bytes", _of(rows, "limit_bytes")),
        ("peak", "bytes", _of(rows, "peak_bytes")),
        ("needs", "bytes", _of(rows, "needed_bytes")),
        ("step", "seconds", _of(rows, "step_seconds")),
    )


def experts_table(rows: Sequence[dict[str, Any]]) -> PlainTable:
    """Make the table of spreads of tokens over experts."""
    return make_table(
        "Experts: what the fullest rank receives, in times of an even share",
        ("tokens", "name", _of(rows, "what")),
        ("imbalance", "text", [f"{row['imbalance']:,.2f}" for row in rows]),
        ("peak", "bytes", _of(rows, "peak_bytes")),
        ("needs", "bytes", _of(rows, "needed_bytes")),
        ("step", "seconds", _where_it_fits(rows, "step_seconds")),
        ("fits", "text", list(map(_what_fits, rows))),
    )


def _what_fits(row: dict[str, Any]) -> str:
    return "yes" if row["fits"] else "device only" if row["fits_device"] else "NO"


def what_imbalance_fits(report: dict[str, Any]) -> str:
    """Format the greatest imbalance that fits, of the limit and of the device where the limit is
    less, and where a routing was most uneven."""
    loads, device = report["expert_loads"], report["hardware"]
    text = _up_to(loads["greatest_that_fits"], loads["degree"], bound_of(report))
    if bound_of(report) == LIMIT_KEY:
        text += " " + _up_to(loads["greatest_on_device"], loads["degree"], device["name"])
    if loads["layers"]:
        worst = nlargest(_LAYERS_SHOWN, loads["layers"].items(), key=lambda item: item[1])
        listed = ", ".join(f"{name} {imbalance:.2f}" for name, imbalance in worst)
        text += f" As routed, most uneven: {listed}."
    return text


def _up_to(greatest: float | None, degree: int, bound: str) -> str:
    if greatest is None:
        return f"Even shares of the tokens do not fit {bound}."
    if greatest == degree:
        return f"Any routing fits {bound}, all tokens to one rank too."
    return f"Fits {bound} up to an imbalance of {greatest:.2f} in every layer."


def advice_table(report: dict[str, Any]) -> PlainTable:
    """Make the table of changes for a run that does not fit."""
    rows = report["advice"]
    return make_table(
        "What would help most",
        ("flags", "name", [" ".join(row["flags"]).replace(" --", "\n--") for row in rows]),
        ("needs", "bytes", _of(rows, "needed_bytes")),
        ("saves", "bytes", [report["needed_bytes"] - num for num in _of(rows, "needed_bytes")]),
        ("tok/s/GPU", "count", _where_it_fits(rows, "tokens_per_second_per_gpu")),
        ("fits", "text", ["yes" if row["fits"] else "no" for row in rows]),
    )


def fit_and_speed(report: dict[str, Any]) -> str:
    """Format whether the run fits and, where it does, how fast it is."""
    needed, allowed = report["needed_bytes"], allowed_bytes(report)
    needs, imbalance = f"{gib(needed)} GiB", report["expert_imbalance"]
    if imbalance != 1:
        needs += f" with an imbalance of {imbalance:g}"
    peak, allocated = report["peak"]["bytes"], report["allocated_bytes"]
    if needed > peak:
        needs += (
            f" (peak {gib(peak)}, gaps of the allocator {gib(allocated - peak)}, "
            f"reserved for driver and communication {gib(needed - allocated)})"
        )
    bound = f"{gib(allowed)} GiB of {bound_of(report)}"
    left = f"{gib(abs(report['headroom_bytes']))} GiB"
    if not report["fits"]:
        return f"Does not fit: needs {needs}, {left} more than the {bound}."
    microbatches = report["microbatches"]
    mfus = mfu_names([report])
    seconds, ends = report["step_seconds"], report["step_seconds_range"]
    tokens = _in_brackets(tokens_range(report["tokens_per_second_per_gpu_range"]))
    utilization = ", ".join(
        f"{name} {report[key]:.1%}{_in_brackets(mfu_range(report[f'{key}_range']))}"
        for key, name in mfus.items()
    )
    return (
        f"Fits: needs {needs} of the {bound}; {left} head-room.\n"
        f"{report['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU{tokens}, {utilization}, "
        f"{duration(seconds)}{_in_brackets(seconds_range(ends, seconds))} a step of {microbatches} "
        f"microbatch{'es' if microbatches > 1 else ''}."
    )


Range = tuple[float, float] | None


def tokens_range(ends: Range) -> str:
    """Format a range of tokens per second, to three digits; empty without one."""
    return "{:,} to {:,}".format(*map(_three_digits, ends)) if ends else ""


def mfu_range(ends: Range) -> str:
    """Format a range of MFU; empty without one."""
    return f"{100 * ends[0]:.1f} to {ends[1]:.1%}" if ends else ""


def seconds_range(ends: Range, seconds: float) -> str:
    """Format the range of a time in its unit; empty without one."""
    if not ends:
        return ""
    unit = measure("seconds", [seconds], significant=3)
    return f"{unit.digits(ends[0])} to {unit.text(ends[1])}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _three_digits(number: float) -> int:
    return round(float(f"{number:.3g}"))


def mfu_names(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the keys of the MFUs to show of reports or outcomes, with their names.

    torchtitan counts attention without its mask. The count with it is shown too if it is less by
    more than a tenth in any of the rows.
    """
    if any(row["mfu_causal"] < (1 - _SAME_MFU) * row["mfu"] for row in rows):
        return {"mfu": "MFU (torchtitan's count)", "mfu_causal": "MFU (causal)"}
    return {"mfu": "MFU"}


def allowed_bytes(report: dict[str, Any]) -> int:
    """Return what the run may need: of its device, or of the limit that was given."""
    return report["needed_bytes"] + report["headroom_bytes"]


def bound_of(report: dict[str, Any]) -> str:
    """Return the name of what bounds the memory: the key of the limit, or the hardware."""
    return (
        LIMIT_KEY if allowed_bytes(report) == report["limit_bytes"] else report["hardware"]["name"]
    )


def comparison_table(rows: Sequence[dict[str, Any]], allowed: int) -> PlainTable:
    """Make a table with a row for each combination; `allowed` bytes is what all of them may need
    that compare no limits."""
    most = measure("bytes", [allowed], significant=3).text(allowed)
    limits = f", and at most the row's {LIMIT_KEY}" if LIMIT_KEY in rows[0]["config"] else ""

    mfus = mfu_names(rows)
    fits = ["-" if row["error"] else "yes" if row["fits"] else "NO" for row in rows]
    table = make_table(
        f"All combinations; those fit that need at most {most}{limits}",
        ("fits", "text", fits),
        *(
            (_heading(key), "name", [row["config"][key] for row in rows])
            for key in rows[0]["config"]
        ),
        ("needs", "bytes", [None if row["error"] else row["needed_bytes"] for row in rows]),
        ("step", "seconds", _where_it_fits(rows, "step_seconds")),
        ("tok/s/GPU", "count", _where_it_fits(rows, "tokens_per_second_per_gpu")),
        ("range", "text", [_range_where_it_fits(row) for row in rows]),
        ("exposed", "seconds", _where_it_fits(rows, "exposed_seconds")),
        *((name, "part", _where_it_fits(rows, key)) for key, name in mfus.items()),
    )
    ranges, *others = table.columns[-len(mfus) - 2 :]
    table.optional = ((ranges,), *((column,) for column in others[::-1]))
    table.caption = "\n".join(dict.fromkeys(factors_of(row["band"]) for row in rows if row["fits"]))
    return table


def _range_where_it_fits(row: dict[str, Any]) -> str:
    return tokens_range(row["tokens_per_second_per_gpu_range"]) if row["fits"] else ""


def factors_of(band: dict[str, Any] | None) -> str:
    """Say in what range throughput and MFU are expected, as factors of what is shown."""
    if band is None:
        return f"No ranges: {NO_BAND}."
    return (
        f"{band['source']}: {band['low']:.2f} to {band['high']:.2f} times the tokens/s and MFU "
        "shown."
    )


def _heading(key: str) -> str:
    """Break a key of the config behind dots, and where it is long behind underscores."""
    lines: list[str] = []
    for part in key.replace(".", ". ").split():
        lines += textwrap.wrap(part.replace("_", "_ "), 18)
    return "\n".join(line.replace("_ ", "_") for line in lines)
