"""Write the page: template, style, scripts and data in one file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from importlib import resources
from itertools import pairwise
from typing import IO, Any, NamedTuple

import jinja2
from markupsafe import Markup

from graph_trainer.core.graph.collective_kinds import shown_name
from graph_trainer.core.passes.memory_limit import KEY
from graph_trainer.planner.html.drawn import drawn
from graph_trainer.planner.measures import duration, measure, size
from graph_trainer.planner.plan import Plan
from graph_trainer.planner.plan_report import (
    CATEGORIES,
    idle_passes,
    ledger_columns,
    readable_report,
)
from graph_trainer.planner.text import allowed_bytes, bound_of, what_imbalance_fits

_ASSETS = resources.files("graph_trainer.planner.html")
_SCRIPTS = ("plotly-basic.min.js", "plotting.js", "series.js", "plots.js")


def write_page(plan: Plan, file: IO[str]) -> None:
    """Write a plan as one HTML page with plotly.js inside.

    Names from configs and modules are escaped by the template, the data are compressed, and the
    page's policy lets only its own scripts run.
    """
    report = readable_report(plan)
    ledger = report["ledger"]
    points = [
        _Point(
            each["policy"] if each["limit_bytes"] is None else "",
            each["limit_bytes"] is not None,
            each["needed_bytes"],
            each["step_seconds"],
            f"limit {size(each['limit_bytes'])}" if each["limit_bytes"] else each["policy"],
        )
        for each in report["memory_curve"]
    ]
    _write(
        "page.html.jinja",
        file,
        drawn(plan) | {"curve": _curve(points, "seconds", allowed_bytes(report), bound_of(report))},
        report=report,
        fit=fit_text(report),
        exposed=sum(ledger[-1]["exposed_seconds"].values()),
        ledger=ledger_cells(ledger),
        idle=idle_passes(ledger),
    )


def write_comparison(document: dict[str, Any], model: str, allowed: int, file: IO[str]) -> None:
    """Write the JSON document of a comparison as a page with the front: the fastest combinations
    that need so much memory and no more.

    Args:
        model: its name.
        allowed: the bytes that a combination may need.
    """
    rows = [row for row in document["rows"] if not row["error"]]
    best, front = 0.0, []
    for row in sorted(rows, key=lambda r: (r["needed_bytes"], -r["tokens_per_second_per_gpu"])):
        if row["tokens_per_second_per_gpu"] > best:
            best = row["tokens_per_second_per_gpu"]
            front.append(row)
    points = [
        _Point(
            str(number),
            row in front,
            row["needed_bytes"],
            row["tokens_per_second_per_gpu"],
            ", ".join(f"{key} = {value}" for key, value in row["config"].items()),
        )
        for number, row in enumerate(rows, 1)
    ]
    curve = _curve(points, "count", allowed, document["hardware"]["name"])
    _write(
        "comparison.html.jinja", file, {"curve": curve}, report=document, planned=rows, model=model
    )


class _Point(NamedTuple):
    """A plan in a plot over the memory that it needs."""

    label: str
    on_line: bool
    needed_bytes: int
    value: float
    """Seconds of a step, or tokens per second and GPU."""
    name: str


def _curve(points: list[_Point], kind: str, allowed: int, bound: str) -> dict[str, Any]:
    """Make what the plot of plans over memory is drawn from, in the units of its axes."""
    x = measure("bytes", [point.needed_bytes for point in points])
    y = measure(kind, [point.value for point in points])
    unit = y.unit or "tokens/s/GPU"
    ordered = sorted(points, key=lambda point: point.needed_bytes)
    shown = [
        {
            "x": point.needed_bytes / x.each,
            "y": point.value / y.each,
            "label": point.label,
            "line": point.on_line,
            "text": f"{point.name}: needs {x.text(point.needed_bytes)}, "
            f"{y.digits(point.value)} {unit}",
        }
        for point in ordered
    ]
    limit = {"x": allowed / x.each, "text": f"{x.text(allowed)} of {bound}"}
    return {"points": shown, "x_unit": x.unit, "y_unit": unit, "limit": limit}


def _write(template: str, file: IO[str], data: dict[str, Any], **values: Any) -> None:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": size,
        "duration": duration,
        "count": "{:,.0f}".format,
        "category": CATEGORIES.__getitem__,
        "kind": shown_name,
        "plain": plain,
        "imbalance": what_imbalance_fits,
    }
    scripts = [_script(_asset(name)) for name in _SCRIPTS]
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
    for part in environment.get_template(template).generate(
        **values,
        data=base64.b64encode(packed).decode(),
        policy=_policy(scripts),
        scripts=scripts,
        style=Markup(_asset("page.css")),
    ):
        file.write(part)


def fit_text(report: dict[str, Any]) -> str:
    """Format whether the run fits: 'Fits: 64.5 of 93.0 GiB'; a limit that was given is named."""
    needed, allowed = report["needed_bytes"], allowed_bytes(report)
    unit = measure("bytes", [needed, allowed])._replace(places=1)
    both = f"{unit.digits(needed)} of {unit.text(allowed)}"
    if bound_of(report) == KEY:
        both += f", {KEY}"
    return f"Fits: {both}" if report["fits"] else f"Does not fit: needs {both}"


def ledger_cells(ledger: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Make the columns of the table of passes: the heading, and of each row value and change."""
    columns = []
    for name, kind, values in ledger_columns(ledger):
        unit = measure(kind, values)
        cells = [(unit.text(values[0]), "")]
        for before, now in pairwise(values):
            change = unit.digits(abs(now - before))
            sign = "+" if now > before else "−"
            cells.append((unit.text(now), sign + change if change.strip("0.,") else ""))
        columns.append((name, cells))
    return columns


def plain(value: Any) -> str:
    """Format a value of a hardware profile."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(each)}" for key, each in value.items())
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _script(source: str) -> Markup:
    """Mark code, ours or plotly's, as not to be escaped; it cannot end its element."""
    assert "</script" not in source.lower() and "<!--" not in source, "would end the element"
    return Markup(source)


def _policy(scripts: list[Markup]) -> str:
    """Return a Content-Security-Policy that forbids every fetch and allows only these scripts, by
    their hash. Inline styles are allowed: plotly.js sets them."""
    digests = (hashlib.sha256(s.encode()).digest() for s in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
