"""What the page says in words and tables. The template escapes all of it."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import Any

from graph_trainer.core.analysis.collective_kinds import mergeable_kinds, shown_name
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.annotations import phase_of
from graph_trainer.core.names import without_layer
from graph_trainer.core.units import format_bytes
from graph_trainer.planner.html.words import TRAFFIC, duration
from graph_trainer.planner.ledger import LedgerRow
from graph_trainer.planner.plan import Plan, versions
from graph_trainer.planner.text import CATEGORIES, served_by
from graph_trainer.titan.config.serialize import config_to_toml

_SHOWN = 12


def content(plan: Plan) -> dict[str, Any]:
    """All that the template asks for, apart from the plots' data."""
    timeline = plan.simulation.timeline
    exposed = sum(timeline.exposed_seconds().values())
    return {
        "headline": plan.headline,
        "verdict": verdict(plan),
        "fits": plan.fits,
        "figures": figures(plan, exposed),
        "advice": advice(plan),
        "ledger_title": ledger_title(plan.rows),
        "ledger": ledger(plan.rows),
        "peak_title": peak_title(plan),
        "peak": peak(plan),
        "memory_title": memory_title(plan),
        "waits_title": waits_title(exposed, timeline.step_seconds),
        "waits": waits(plan),
        "owners_title": owners_title(plan),
        "owners": owners(plan),
        "largest": largest(plan),
        "microbatches": plan.microbatches,
        "config": config_to_toml(plan.config),
        "hardware": [(key, _plain(value)) for key, value in _hardware(plan).items()],
        "versions": versions(),
    }


def verdict(plan: Plan) -> str:
    """'Fits: 64.5 of 93.0 GiB'."""
    needed, usable = format_bytes(plan.reserved_bytes), format_bytes(plan.hardware.usable_bytes)
    number, unit = needed.split()
    both = f"{number if usable.endswith(unit) else needed} of {usable}"
    return f"Fits: {both}" if plan.fits else f"Does not fit: needs {both}"


def figures(plan: Plan, exposed: float) -> list[tuple[str, str]]:
    """The numbers that most come for."""
    room = plan.headroom_bytes
    return [
        ("head-room" if plan.fits else "too much", format_bytes(abs(room))),
        ("alive at the peak", format_bytes(plan.peak_bytes)),
        ("tokens/s/GPU", f"{plan.tokens_per_second_per_gpu:,.0f}"),
        ("MFU", f"{plan.mfu:.1%}"),
        (_step(plan.microbatches), duration(plan.step_seconds)),
        ("compute waits", f"{exposed / plan.simulation.timeline.step_seconds:.1%}"),
    ]


def advice(plan: Plan) -> list[dict[str, str]]:
    """What would help, as one would type it."""
    return [
        {
            "flags": each.words(),
            "needs": format_bytes(each.reserved_bytes),
            "saves": format_bytes(plan.reserved_bytes - each.reserved_bytes),
            "speed": f"{each.tokens_per_second_per_gpu:,.0f}",
            "fits": "yes" if each.fits else "no",
        }
        for each in plan.advice
    ]


def _step(microbatches: int) -> str:
    return "a step" if microbatches == 1 else f"a step of {microbatches:,} microbatches"


def ledger_title(rows: list[LedgerRow]) -> str:
    """What the passes do together."""
    first, last = rows[0], rows[-1]

    def change(before: str, after: str) -> str:
        return f"at {after}" if before == after else f"from {before} to {after}"

    peak = change(format_bytes(first.peak_bytes), format_bytes(last.peak_bytes))
    step = change(duration(first.step_seconds), duration(last.step_seconds))
    return f"Passes: the peak goes {peak}, forward and backward {step}".replace("goes at", "is at")


def ledger(rows: list[LedgerRow]) -> dict[str, Any]:
    """A row a pass; every cell its value and what the pass changed in it."""
    every = mergeable_kinds().items()
    kinds = {kind: title for kind, title in every if any(r.of_kind(kind).count for r in rows)}
    heads = [
        "nodes",
        *(head for title in kinds.values() for head in (title, "moved")),
        "peak",
        "step",
        "exposed",
    ]

    def values(row: LedgerRow) -> list[tuple[float, Any]]:
        volumes = [row.of_kind(kind) for kind in kinds]
        moved = [pair for v in volumes for pair in ((v.count, _count), (v.bytes, format_bytes))]
        return [
            (row.nodes, _count),
            *moved,
            (row.peak_bytes, format_bytes),
            (row.step_seconds, duration),
            (row.exposed, duration),
        ]

    table = []
    before: list[tuple[float, Any]] | None = None
    for row in rows:
        now = values(row)
        cells = [
            (write(value), _change(value - before[i][0], write) if before else "")
            for i, (value, write) in enumerate(now)
        ]
        table.append((row.name, cells))
        before = now
    return {"heads": heads, "rows": table}


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _change(value: float, write: Any) -> str:
    text = str(write(abs(value)))
    if not text.strip("0., BsµKMGi"):
        return ""
    return f"{'+' if value > 0 else '−'}{text}"


def peak_title(plan: Plan) -> str:
    """What holds most at the peak."""
    by_category = plan.simulation.memory.peak_by_category()
    most = max(by_category, key=lambda c: by_category[c])
    return (
        f"At the peak, {CATEGORIES[most]} hold {by_category[most] / plan.peak_bytes:.0%} of "
        f"{format_bytes(plan.peak_bytes)}"
    )


def peak(plan: Plan) -> list[dict[str, Any]]:
    """Every category's part of the peak, the largest first."""
    parts = plan.simulation.memory.peak_by_category()
    return [
        {
            "key": category.value,
            "title": CATEGORIES[category],
            "size": format_bytes(num),
            "part": f"{num / plan.peak_bytes:.1%}",
            "percent": round(100 * num / plan.peak_bytes, 2),
        }
        for category, num in sorted(parts.items(), key=lambda item: -item[1])
        if num
    ]


def memory_title(plan: Plan) -> str:
    """When and where the peak is."""
    simulation = plan.simulation
    place = simulation.memory.peak_position
    node = list(simulation.joint.graph.nodes)[place]
    phase = phase_of(node)
    where = f" in {phase.value}" if phase else ""
    return (
        f"Memory peaks at {format_bytes(plan.peak_bytes)} after "
        f"{duration(simulation.timeline.starts[place])}{where}"
    )


def waits_title(exposed: float, step_seconds: float) -> str:
    """How much of the step compute stands still."""
    if not exposed:
        return "Compute never waits for communication"
    return (
        f"Compute waits {duration(exposed)} for communication, {exposed / step_seconds:.1%} of "
        "forward and backward"
    )


def waits(plan: Plan) -> list[tuple[str, str, str, str, str, str]]:
    """Where compute stands still longest, by module; layers together."""
    timeline = plan.simulation.timeline
    total: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    count: Counter[tuple[str, str, str]] = Counter()
    held: dict[tuple[str, str, str], str] = {}
    for wait in timeline.exposed:
        owner = served_by(wait.collective.node)
        key = (TRAFFIC[wait.traffic], wait.collective.kind, owner)
        total[key] += wait.seconds
        count[key] += 1
        held.setdefault(key, wait.delayed.name if wait.delayed else "the end of the step")
    return [
        (
            owner or "(the model itself)",
            f"{why}: {shown_name(kind)}",
            held[(why, kind, owner)],
            f"{count[(why, kind, owner)]:,}",
            duration(seconds),
            f"{seconds / timeline.step_seconds:.1%}",
        )
        for (why, kind, owner), seconds in sorted(total.items(), key=lambda item: -item[1])[:_SHOWN]
    ]


def owners_title(plan: Plan) -> str:
    """How many tensors are alive at the peak."""
    memory = plan.simulation.memory
    live = memory.live_at(memory.peak_position)
    made = format_bytes(sum(s.bytes for s in live))
    return f"{len(live):,} tensors of the step are alive at the peak: {made}"


def owners(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Who holds most of what the graph has made at the peak; layers together."""
    memory = plan.simulation.memory
    total: Counter[tuple[str, Category]] = Counter()
    count: Counter[tuple[str, Category]] = Counter()
    for storage in memory.live_at(memory.peak_position):
        key = (without_layer(storage.owner), storage.category)
        total[key] += storage.bytes
        count[key] += 1
    return [
        (owner or "(the model itself)", CATEGORIES[c], f"{count[(owner, c)]:,}", format_bytes(num))
        for (owner, c), num in total.most_common(_SHOWN)
    ]


def largest(plan: Plan) -> list[tuple[str, str, str, str]]:
    """The largest single tensors alive at the peak."""
    memory = plan.simulation.memory
    return [
        (
            s.owner or "(the model itself)",
            s.node.name,
            CATEGORIES[s.category],
            format_bytes(s.bytes),
        )
        for s in memory.live_at(memory.peak_position)[:_SHOWN]
    ]


def _hardware(plan: Plan) -> dict[str, Any]:
    return dataclasses.asdict(plan.hardware)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
