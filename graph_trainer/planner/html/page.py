"""The page: template, style, scripts and data in one file, that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import IO

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from graph_trainer.planner.html.content import content
from graph_trainer.planner.html.drawn import drawn
from graph_trainer.planner.plan import Plan

_ASSETS = resources.files("graph_trainer.planner.html")
_SCRIPTS = ("series.js", "plots.js")


def write_page(plan: Plan, file: IO[str]) -> None:
    """Write a plan as one HTML page with plotly.js inside.

    Names from configs and modules are text: the template escapes them, the data are JSON without
    a character that HTML knows, and the page's policy lets no script run but the ones it was
    written with.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    scripts = [_script(get_plotlyjs()), *(_script(_asset(name)) for name in _SCRIPTS)]
    template = environment.from_string(_asset("page.html.jinja"))
    for part in template.generate(
        **content(plan),
        data=_json(drawn(plan)),
        policy=_policy(scripts),
        scripts=scripts,
        style=Markup(_asset("page.css")),
    ):
        file.write(part)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _script(source: str) -> Markup:
    """Code of our own or of plotly's: what must not be escaped, and cannot end its element."""
    assert "</script" not in source.lower() and "<!--" not in source, "would end the element"
    return Markup(source)


def _policy(scripts: list[Markup]) -> str:
    """Nothing is fetched, and no script runs but these. plotly.js writes styles of its own."""
    digests = (hashlib.sha256(s.encode()).digest() for s in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _json(value: object) -> Markup:
    """JSON that HTML reads as it stands."""
    text = json.dumps(value, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
