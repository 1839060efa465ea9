"""A plan as a JSON document with a version. docs/reading_a_plan.md describes every key."""

from __future__ import annotations

import dataclasses
from typing import Any

from graph_trainer.core.analysis.collective_purpose import Traffic
from graph_trainer.planner.ledger import LedgerRow
from graph_trainer.planner.plan import Plan, versions
from graph_trainer.titan.config.serialize import config_to_toml

SCHEMA = "graph_trainer.plan/1"
"""Changes when a key changes its meaning or goes; new keys do not change it."""

LARGEST_SHOWN = 20


def document(plan: Plan) -> dict[str, Any]:
    """Everything the plan says, in plain values: bytes, seconds and names."""
    memory = plan.simulation.memory
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "config": config_to_toml(plan.config),
        "hardware": dataclasses.asdict(plan.hardware),
        "runtime": plan.simulation.runtime.name,
        "world_size": plan.world_size,
        "rank": plan.rank,
        "parameters": plan.num_parameters,
        "nodes": plan.rows[-1].nodes,
        "ledger": [_row(row) for row in plan.rows],
        "peak": {
            "bytes": memory.peak_bytes,
            "by_category": {c.value: num for c, num in memory.peak_by_category().items()},
            "node": _peak_node(plan),
            "largest": largest(plan, LARGEST_SHOWN),
        },
        "reserved_bytes": plan.reserved_bytes,
        "headroom_bytes": plan.headroom_bytes,
        "fits": plan.fits,
        "advice": [dataclasses.asdict(each) for each in plan.advice],
        "microbatches": plan.microbatches,
        "graph_seconds": plan.simulation.timeline.step_seconds,
        "outside_seconds": plan.outside_seconds,
        "step_seconds": plan.step_seconds,
        "busy_seconds": plan.simulation.timeline.busy,
        "exposed_waits": exposed_waits(plan, LARGEST_SHOWN),
        "tokens_per_second_per_gpu": plan.tokens_per_second_per_gpu,
        "mfu": plan.mfu,
    }


def largest(plan: Plan, count: int) -> list[dict[str, Any]]:
    """The largest storages alive at the peak."""
    memory = plan.simulation.memory
    return [
        {
            "node": s.node.name,
            "owner": s.owner,
            "category": s.category.value,
            "bytes": s.bytes,
        }
        for s in memory.live_at(memory.peak_position)[:count]
    ]


def exposed_waits(plan: Plan, count: int) -> list[dict[str, Any]]:
    """The waits at which compute stands still longest, and what each holds up."""
    waits = sorted(plan.simulation.timeline.exposed, key=lambda w: -w.seconds)
    return [
        {
            "seconds": w.seconds,
            "role": w.traffic.value,
            "collective": w.collective.node.name,
            "kind": w.collective.kind,
            "module": w.collective.module,
            "parameter": w.collective.parameter,
            "holds_up": None if w.delayed is None else w.delayed.name,
        }
        for w in waits[:count]
    ]


def _peak_node(plan: Plan) -> str:
    memory = plan.simulation.memory
    return list(plan.simulation.joint.graph.nodes)[memory.peak_position].name


def _row(row: LedgerRow) -> dict[str, Any]:
    collectives: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for (kind, phase, traffic), volume in row.collectives.items():
        by_phase = collectives.setdefault(kind, {}).setdefault(phase, {})
        by_phase[traffic.value] = {"count": volume.count, "bytes": volume.bytes}
    return {
        "pass": row.name,
        "nodes": row.nodes,
        "collectives": collectives,
        "peak_bytes": row.peak_bytes,
        "step_seconds": row.step_seconds,
        "exposed_seconds": {t.value: row.exposed_seconds.get(t, 0.0) for t in Traffic},
        "pass_seconds": row.seconds,
        "rolled_back": row.rolled_back or None,
        "remarks": list(row.remarks),
    }
