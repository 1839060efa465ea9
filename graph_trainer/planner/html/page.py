"""Write the page: template, style, scripts and data in one file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from itertools import pairwise
from typing import IO, Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from graph_trainer.core.graph.collective_kinds import shown_name
from graph_trainer.core.units import format_bytes
from graph_trainer.planner.html.drawn import PURPOSES, drawn
from graph_trainer.planner.plan import Plan
from graph_trainer.planner.plan_report import CATEGORIES, ledger_columns, plan_report
from graph_trainer.planner.text import what_imbalance_fits

_ASSETS = resources.files("graph_trainer.planner.html")
_SCRIPTS = ("series.js", "plots.js")


def write_page(plan: Plan, file: IO[str]) -> None:
    """Write a plan as one HTML page with plotly.js inside.

    Names from configs and modules are escaped by the template, the data are JSON in which every
    character special in HTML is escaped, and the page's policy lets only its own scripts run.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "size": format_bytes,
        "duration": duration,
        "count": "{:,.0f}".format,
        "category": CATEGORIES.__getitem__,
        "purpose": PURPOSES.__getitem__,
        "kind": shown_name,
        "plain": plain,
        "imbalance": what_imbalance_fits,
    }
    scripts = [_script(get_plotlyjs()), *(_script(_asset(name)) for name in _SCRIPTS)]
    template = environment.from_string(_asset("page.html.jinja"))
    report = plan_report(plan)
    for part in template.generate(
        report=report,
        fit=fit_text(report),
        exposed=sum(report["ledger"][-1]["exposed_seconds"].values()),
        ledger=ledger_cells(report["ledger"]),
        data=_json(drawn(plan) | {"memory_curve": report["memory_curve"]}),
        policy=_policy(scripts),
        scripts=scripts,
        style=Markup(_asset("page.css")),
    ):
        file.write(part)


def fit_text(report: dict[str, Any]) -> str:
    """Format whether the run fits: 'Fits: 64.5 of 93.0 GiB'."""
    needed = format_bytes(report["needed_bytes"])
    allowed = format_bytes(report["needed_bytes"] + report["headroom_bytes"])
    number, unit = needed.split()
    both = f"{number if allowed.endswith(unit) else needed} of {allowed}"
    return f"Fits: {both}" if report["fits"] else f"Does not fit: needs {both}"


def ledger_cells(ledger: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Make the columns of the table of passes: the heading, and of each row value and change."""
    written = {"count": "{:,.0f}".format, "bytes": format_bytes, "seconds": duration}

    def cells(unit: str, values: Sequence[float]) -> list[tuple[str, str]]:
        write = written[unit]
        changes = [0.0, *(after - before for before, after in pairwise(values))]
        signed = (("+" if c > 0 else "−", write(abs(c))) for c in changes)
        shown = (sign + text if text.strip("0., BsµKMGi") else "" for sign, text in signed)
        return list(zip(map(write, values), shown, strict=True))

    return [(name, cells(unit, values)) for name, unit, values in ledger_columns(ledger)]


def duration(seconds: float) -> str:
    """Format seconds in the largest unit that fits: '12.3 ms'."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:,.1f} ms"
    return f"{seconds * 1e6:,.1f} µs"


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


def _json(value: object) -> Markup:
    """Format as JSON without characters that are special in HTML."""
    text = json.dumps(value, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
