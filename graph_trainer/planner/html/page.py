"""Write the page: template, style, scripts and data in one file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from importlib import resources
from typing import IO, Any

import jinja2
from markupsafe import Markup
from rich.table import Column, Table

from graph_trainer.core.units import gib
from graph_trainer.planner import plan_tables as text
from graph_trainer.planner.html.drawn import drawn
from graph_trainer.planner.measures import duration, measure, size
from graph_trainer.planner.plan import Plan
from graph_trainer.planner.plan_report import CATEGORIES, readable_report
from graph_trainer.planner.plan_tables import allowed_bytes, bound_of
from graph_trainer.titan.config.core_settings import LIMIT_KEY

_ASSETS = resources.files("graph_trainer.planner.html")
_SCRIPTS = ("plotly-basic.min.js", "plotting.js", "series.js", "plots.js")


_Point = tuple[str, bool, int, float, str]
"""Of a plot of plans over memory: label, whether it is on the line, the bytes that the plan needs,
its seconds or tokens per second and GPU, its name."""


def write_page(plan: Plan, file: IO[str]) -> None:
    """Write a plan as one HTML page with plotly.js inside.

    Names from configs and modules are escaped by the template, the data are compressed, and the
    page's policy lets only its own scripts run.
    """
    report = readable_report(plan)
    points: list[_Point] = []
    for point in report["memory_curve"]:
        limit, policy = point["limit_bytes"], point["policy"]
        label, name = ("", f"limit {size(limit)}") if limit else (policy, policy)
        points.append((label, bool(limit), point["needed_bytes"], point["step_seconds"], name))
    write_template(
        "page.html.jinja",
        file,
        drawn(plan) | {"curve": _curve(points, "seconds", allowed_bytes(report), bound_of(report))},
        report=report,
        fit=fit_text(report),
        mfus=text.mfu_names([report]),
        exposed=sum(report["ledger"][-1]["exposed_seconds"].values()),
        tables={
            "ledger": text.ledger_table(report["ledger"]),
            "modules": text.modules_table(report["peak"]),
            "waits": text.waits_table(report, most=12),
            "advice": text.advice_table(report),
            "experts": text.experts_table((report["expert_loads"] or {"rows": []})["rows"]),
        },
    )


def write_comparison(document: dict[str, Any], model: str, allowed: int, file: IO[str]) -> None:
    """Write the JSON document of a comparison as a page with the front: the fastest combinations
    that need so much memory and no more.

    Args:
        model: its name.
        allowed: the bytes that a combination may need.
    """
    best, points = 0.0, []
    numbered = [(str(n), row) for n, row in enumerate(document["rows"], 1) if not row["error"]]
    for number, row in sorted(
        numbered, key=lambda row: (row[1]["needed_bytes"], -row[1]["tokens_per_second_per_gpu"])
    ):
        speed = row["tokens_per_second_per_gpu"]
        name = ", ".join(f"{key} = {value}" for key, value in row["config"].items())
        points.append((number, speed > best, row["needed_bytes"], speed, name))
        best = max(best, speed)
    write_template(
        "comparison.html.jinja",
        file,
        {"curve": _curve(points, "count", allowed, document["hardware"]["name"])},
        report=document,
        model=model,
        table=text.comparison_table(document["rows"], allowed),
    )


def _curve(points: list[_Point], kind: str, allowed: int, bound: str) -> dict[str, Any]:
    """Make what the plot of plans over memory is drawn from, in the units of its axes."""
    x = measure("bytes", [needed for _, _, needed, _, _ in points])
    y = measure(kind, [value for _, _, _, value, _ in points])
    unit = y.unit or "tokens/s/GPU"
    shown = [
        {
            "x": needed / x.scale,
            "y": value / y.scale,
            "label": label,
            "line": on_line,
            "text": f"{name}: needs {x.text(needed)}, {y.digits(value)} {unit}",
        }
        for label, on_line, needed, value, name in sorted(points, key=lambda point: point[2])
    ]
    limit = {"x": allowed / x.scale, "text": f"{x.text(allowed)} of {bound}"}
    return {"points": shown, "x_unit": x.unit, "y_unit": unit, "limit": limit}


def _look(column: Column) -> str:
    """Return the class of a column's cells."""
    return "n" if column.justify == "right" else "name" if column.overflow == "fold" else ""


def _rows(table: Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def write_template(
    template: str,
    file: IO[str],
    data: dict[str, Any],
    script_names: Sequence[str] = _SCRIPTS,
    **values: Any,
) -> None:
    """Write a page from one of the templates, with its data, scripts and style inside."""
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
        "plain": plain,
        "imbalance": text.what_imbalance_fits,
        "tokens_range": text.tokens_range,
        "mfu_range": text.mfu_range,
        "seconds_range": text.seconds_range,
        "look": _look,
        "rows": _rows,
    }
    scripts = [_script(_asset(name)) for name in script_names]
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
    """Format whether the run fits: 'Fits: 64.51 of 93.00 GiB'; a limit that was given is named."""
    needed, allowed = report["needed_bytes"], allowed_bytes(report)
    both = f"{gib(needed)} of {gib(allowed)} GiB"
    if bound_of(report) == LIMIT_KEY:
        both += f", {LIMIT_KEY}"
    return f"Fits: {both}" if report["fits"] else f"Does not fit: needs {both}"


def plain(value: Any) -> str:
    """Format a value of a hardware profile."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(entry)}" for key, entry in value.items())
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
    allowed = " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
