"""What the page's plots are drawn from: every node, slice and storage, column by column."""

from __future__ import annotations

import itertools
from collections import defaultdict
from itertools import pairwise
from typing import Any

from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.annotations import module_of, phase_of
from graph_trainer.core.simulation.op_costs import CostKind
from graph_trainer.core.simulation.timeline import COMPUTE, COPIES_IN, FROM_HOST, HOST, TO_HOST
from graph_trainer.planner.perfetto_trace import WAIT, WAITS, nanoseconds, slices, tracks
from graph_trainer.planner.plan import Plan
from graph_trainer.planner.plan_report import CATEGORIES, PURPOSES

KINDS = {
    CostKind.MATMUL.value: "matmuls",
    CostKind.ATTENTION.value: "attention",
    CostKind.MEMORY.value: "memory-bound",
    CostKind.HOST_COPY.value: "copies to and from the host",
    HOST: "issued by the host",
    **PURPOSES,
    WAIT: "compute waits",
}
"""The names of the kinds of slices on the page."""

_NO_GROUP = (COMPUTE, COPIES_IN, HOST, TO_HOST, FROM_HOST, WAITS)


def drawn(plan: Plan) -> dict[str, Any]:
    """Make plain columns of the simulation. Times are nanoseconds, sizes bytes. Linear in nodes.

    A node is its position in the graph, a text its position in `texts`.
    """
    simulation = plan.simulation
    nodes = list(simulation.joint.graph.nodes)
    # A text that is looked up for the first time gets the next position.
    texts: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    columns_of_nodes = {
        "name": [n.name for n in nodes],
        "module": [texts[module_of(n) or ""] for n in nodes],
        "phase": [texts[phase_of(n) or ""] for n in nodes],
        "start": [nanoseconds(s) for s in simulation.timeline.starts],
    }
    # By how much each node changes a category: mostly zeros, which are short.
    changes: dict[str, list[int]] = {}
    for category, series in simulation.memory.by_category.items():
        changes[category.value] = [after - before for before, after in pairwise([0, *series])]
    number = {category: place for place, category in enumerate(Category)}
    largest_first = sorted(simulation.memory.storages, key=lambda s: (-s.bytes, s.born))
    storages = [s for s in largest_first if s.bytes]
    return {
        "usable_bytes": plan.headroom_bytes + plan.need.alive,
        "step_ns": nanoseconds(simulation.timeline.step_seconds),
        "peak_position": simulation.memory.peak_position,
        "categories": [{"key": c.value, "title": CATEGORIES[c]} for c in Category],
        "kinds": [{"key": key, "title": title} for key, title in KINDS.items()],
        "nodes": columns_of_nodes,
        "memory": changes,
        "storages": {
            "born": [s.born for s in storages],
            "last": [s.last for s in storages],
            "bytes": [s.bytes for s in storages],
            "category": [number[s.category] for s in storages],
            "owner": [texts[s.owner] for s in storages],
        },
        "lanes": _lanes(plan, texts),
        "texts": list(texts),  # Last, because the columns before add to it.
    }


def _lanes(plan: Plan, texts: dict[str, int]) -> list[dict[str, Any]]:
    """List the lanes, each with columns of its slices in the order of time."""
    simulation = plan.simulation
    position = {node: place for place, node in enumerate(simulation.joint.graph.nodes)}
    kinds = {key: place for place, key in enumerate(KINDS)}
    columns = ("node", "start", "ns", "kind", "bytes", "flops", "parameter", "of", "holds")
    lanes: dict[str, dict[str, Any]] = {}
    for track in sorted(tracks(simulation), key=lambda track: track == WAITS):
        lanes[track] = {"title": track, "waits": track == WAITS, "group": track not in _NO_GROUP}
        lanes[track] |= {name: [] for name in columns}
    for slice_ in slices(simulation):
        collective = slice_.collective
        values = (
            position[slice_.node],
            slice_.start,
            slice_.end - slice_.start,
            kinds[slice_.kind],
            slice_.bytes,
            slice_.cost.flops if slice_.cost else 0,
            texts[(collective.parameter if collective else "") or ""],
            position[collective.node] if collective else -1,
            position[slice_.delayed] if slice_.delayed else -1,
        )
        for name, value in zip(columns, values, strict=True):
            lanes[slice_.track][name].append(value)
    return list(lanes.values())
