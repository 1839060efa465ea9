"""What a search found, as a document and as tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType, group
from rich.text import Text

from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.planner.changes import POLICY, RESHARD, flags_of
from graph_trainer.planner.figures import model_name
from graph_trainer.planner.measures import measure
from graph_trainer.planner.plan import versions
from graph_trainer.planner.plan_tables import Column, factors_of, make_table
from graph_trainer.planner.search.parts import limited_by
from graph_trainer.planner.search.search import RULES, Found
from graph_trainer.planner.search.space import (
    CONTEXT,
    EXPERT,
    OFFLOAD,
    PIPELINE,
    REPLICATE,
    ROWS,
    SCHEDULE,
    SHARD,
    TENSOR,
    Space,
)
from graph_trainer.planner.training_cost import significant
from graph_trainer.titan.config.toml_file import parse_toml
from graph_trainer.titan.config.write_toml import config_to_toml

SCHEMA = "graph_trainer.search/1"
"""Of the JSON document of a search: bytes and seconds."""

_SHOWN = 12
"""Rows of the table."""
_EQUAL = 0.0005
"""A smaller gain is none."""
_SPEED = "tokens_per_second_per_gpu"


def search_report(found: Found, space: Space, hardware: Hardware, allowed: int) -> dict[str, Any]:
    """Make the document of a search.

    Args:
        allowed: the bytes that a step may need.
    """
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "config": config_to_toml(space.config),
        "model": model_name(space.config),
        "hardware": asdict(hardware),
        "world_size": space.world_size,
        "global_batch_size": space.global_rows,
        "fixed": {key: list(values) for key, values in space.fixed.items()},
        "allowed_bytes": allowed,
        "runs": found.total,
        "left_out": {rule: found.left_out[rule] for rule in RULES},
        "estimated": found.estimated,
        "estimate_errors": found.errors,
        "bound_tokens_per_second_per_gpu": found.bound_tokens,
        "seconds": found.seconds,
        "complete": found.is_complete,
        "error": found.error or None,
        "note": found.note or None,
        "nearest": _nearest(found),
        "rows": [asdict(row.outcome) | {"parts": row.parts} for row in found.rows],
        "front": _front(found),
    }


def _nearest(found: Found) -> dict[str, Any] | None:
    """Return the run that needs least, and the bytes, as far as it is known; of runs that were
    simulated where there are some."""
    simulated = [(row.run, float(row.outcome.needed_bytes)) for row in found.rows]
    nearest = min(simulated, key=lambda pair: pair[1]) if simulated else found.nearest
    if nearest is None:
        return None
    run, needed_bytes = nearest
    return {"config": run.change(0.0), "needed_bytes": int(needed_bytes)}


def _front(found: Found) -> list[int]:
    """Return the numbers of the rows than which none that fits is both faster and smaller."""
    outcomes = [row.outcome for row in found.rows]
    speeds = [outcome.tokens_per_second_per_gpu for outcome in outcomes]
    front, best = [], 0.0
    for number in sorted(
        (n for n, outcome in enumerate(outcomes) if outcome.fits),
        key=lambda n: (outcomes[n].needed_bytes, -speeds[n]),
    ):
        if speeds[number] > best:
            best = speeds[number]
            front.append(number)
    return front


def run_text(change: Mapping[str, str]) -> str:
    """Format the mesh of a run."""
    degrees = {
        "replicate": change[REPLICATE],
        "fsdp": change[SHARD],
        "pp": change[PIPELINE],
        "cp": change[CONTEXT],
        "tp": change[TENSOR],
        "ep": change[EXPERT],
    }
    mesh = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree != "1")
    schedule = f", {change[SCHEDULE]}" if SCHEDULE in change else ""
    return (mesh or "one rank") + schedule


def policy_text(change: Mapping[str, str]) -> str:
    """Format what a run keeps: activations and parameters."""
    offload = " + offload" if change.get(OFFLOAD) == "true" else ""
    reshard = "" if change[RESHARD] == "default" else f", {change[RESHARD]}"
    return f"{change[POLICY]}{offload}{reshard}"


@group()
def search_text(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Make the table, and what follows from it.

    Args:
        report: with `commands` and `training` of each row.
    """
    rows = report["rows"]
    shown = rows[:_SHOWN]
    most = measure("bytes", [report["allowed_bytes"]], significant=3).text(report["allowed_bytes"])
    fit = [row for row in rows if row["fits"]]
    yield Text(
        f"{report['model']} on {report['world_size']:,} ranks of {report['hardware']['name']}: "
        f"{len(rows)} of {report['runs']:,} runs simulated, {len(fit)} of these fit",
        style="bold",
    )
    if shown:
        table = make_table(
            f"The fastest first; those fit that need at most {most}",
            ("fits", "text", ["yes" if row["fits"] else "NO" for row in shown]),
            ("mesh", "name", [run_text(row["config"]) for row in shown]),
            ("rows", "text", [row["config"][ROWS] for row in shown]),
            ("keeps", "name", [policy_text(row["config"]) for row in shown]),
            ("needs", "bytes", [row["needed_bytes"] for row in shown]),
            ("step", "seconds", [row["step_seconds"] for row in shown]),
            ("tok/s/GPU", "count", [row[_SPEED] for row in shown]),
            *_training(shown),
        )
        bands = [row["band"] for row in fit if row["band"]]
        pipelines = any(row["config"][PIPELINE] != "1" for row in fit)
        captions = []
        if bands or not pipelines:
            captions.append(factors_of(bands[0] if bands else None))
        if pipelines:
            captions.append("Pipelines have no range: none was compared with a measured run.")
        table.caption = "\n".join(captions)
        yield table
    yield Text(_how_sure(report, fit))
    for rule, count in report["left_out"].items():
        if count:
            why = f"{RULES[rule]}: {report['error']}" if rule == "error" else RULES[rule]
            yield Text(f"- {count:,} not simulated: {why}")
    if report["note"]:
        yield Text(f"The search ended early: {report['note']}.")
    if len(fit) > 1:
        yield Text("\n" + _why(*fit[:2]))


def _training(rows: list[dict[str, Any]]) -> Iterator[Column]:
    """Make columns of the days of a training and of its cost, where these were asked for."""
    for key in ("days", "cost"):
        numbers = [(row["training"] or {}).get(key) for row in rows]
        if any(number is not None for number in numbers):
            yield key, "text", ["" if n is None else significant(n) for n in numbers]


def commands(
    change: Mapping[str, str], report: dict[str, Any], flags: Sequence[str], hardware: str
) -> list[str]:
    """Return the commands that plan and train a run, with what the config has otherwise.

    Args:
        flags: the words of the command line that name the config.
        hardware: as the command line names it.
    """
    config = parse_toml(report["config"], "config")
    changed = {key: value for key, value in change.items() if _value(config, key) != value}
    words = [*flags, *flags_of(changed)]
    on = ["--world-size", str(report["world_size"]), "--hardware", hardware]
    return [
        shlex.join(["graph-trainer", "plan", *words, *on]),
        shlex.join(["graph-trainer", "train", *words]),
    ]


def _value(config: dict[str, Any], key: str) -> str:
    """Return a value of a config as on the command line; of a section that is not there "none"."""
    section, _, name = key.partition(".")
    value = config.get(section, {}).get(name, "none")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _why(best: dict[str, Any], other: dict[str, Any]) -> str:
    """Say in a sentence why a run is faster than another one, by what their steps consist of."""
    speeds = [row[_SPEED] for row in (best, other)]
    gain = speeds[0] / speeds[1] - 1
    # seconds a token, of which a step has as many as its speed and its seconds say
    tokens = [s * row["step_seconds"] for s, row in zip(speeds, (best, other), strict=True)]
    saved = {
        name: other["parts"].get(name, 0.0) / tokens[1] - best["parts"].get(name, 0.0) / tokens[0]
        for name in best["parts"] | other["parts"]
    }
    names = [
        f"{run_text(row['config'])} (rows {row['config'][ROWS]}, {policy_text(row['config'])})"
        for row in (best, other)
    ]
    if gain < _EQUAL:
        return f"{names[0]} is as fast as {names[1]}."
    most = max(saved, key=saved.__getitem__)
    part = saved[most] * speeds[1]
    text = (
        f"{names[0]} is {gain:.1%} faster than {names[1]}: {most} takes {part:.1%} of the step "
        "less."
    )
    band = best["band"]
    if band is None:
        return f"{text} How far plans of such runs are off is not known: time both."
    if gain < band["high"] / band["low"] - 1:
        return f"{text} Measured runs differ by more than that from their plans: time both."
    return f"{text} That is more than measured runs differ from their plans."


def _how_sure(report: dict[str, Any], fit: list[dict[str, Any]]) -> str:
    """Say how far the best is from what no run exceeds, and how far estimates were off; or, where
    nothing fits, what lacks."""
    if not fit:
        return "Nothing fits." + _what_lacks(report)
    best, bound = fit[0][_SPEED], report["bound_tokens_per_second_per_gpu"]
    text = (
        f"The best has {best:,.0f} tokens/s/GPU: {limited_by(fit[0]['parts'])}. By products or "
        f"links alone, no run exceeds {bound:,.0f} in the simulator, {bound / best:.2f} times as "
        "many."
    )
    if errors := report["estimate_errors"]:
        text += f" Simulated speeds were {min(errors):.2f} to {max(errors):.2f} of their estimates."
    return text


def _what_lacks(report: dict[str, Any]) -> str:
    """Say what came nearest to fitting, and what it lacks."""
    nearest = report["nearest"]
    if nearest is None or nearest["needed_bytes"] <= report["allowed_bytes"]:
        return ""
    change, missing = nearest["config"], nearest["needed_bytes"] - report["allowed_bytes"]
    lacks = measure("bytes", [missing], significant=3).text(missing)
    return (
        f" Nearest is {run_text(change)}, rows {change[ROWS]}, {policy_text(change)}, which lacks "
        f"about {lacks}: search with more ranks, smaller batches or shorter sequences."
    )


def page_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return a document of a comparison, of which a page is made, with a few words a run."""
    rows = []
    for row in report["rows"]:
        change = row["config"]
        words = {
            "mesh": run_text(change),
            "batch": f"{change[ROWS]} rows, {policy_text(change)}",
            "limited by": limited_by(row["parts"]),
        }
        rows.append(row | {"config": words})
    return report | {"runtime": "graph_trainer", "rows": rows}
