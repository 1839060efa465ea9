"""Say what a schedule moved, and how much communication overlaps with compute now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from graph_trainer.core.analysis.collective_purpose import traffic_of
from graph_trainer.core.passes.overlap.schedule_graph import ScheduleGraph
from graph_trainer.core.simulation.timeline import Timeline

_LEAST = 5e-6
"""Seconds by which exposed time must change for a line of its own."""


def remarks_on(
    graph: ScheduleGraph, order: Sequence[int], before: Timeline, after: Timeline
) -> list[str]:
    """Say in one line what moved, and in one more for every collective how long compute waits for
    it now, where that has changed. `order` has the places of the old order, in the new one.
    Linear in nodes.
    """
    traffic = traffic_of(graph.issued)
    old, new = _computed_before(graph, range(len(order))), _computed_before(graph, order)
    earlier = {graph.nodes[place]: old[place] - new[place] for place in graph.group}
    was, now = _exposed(before), _exposed(after)
    sums = []
    for kind in dict.fromkeys(traffic.values()):
        nodes = [node for node in earlier if traffic[node] is kind]
        moved = sum(earlier[node] > 0 for node in nodes)
        seconds = [sum(waits[node] for node in nodes) for waits in (was, now)]
        sums.append(
            f"{kind.value.replace('_', ' ')}: {moved} of {len(nodes)} start earlier, exposed "
            f"{seconds[0] * 1e3:.1f} ms before and {seconds[1] * 1e3:.1f} ms now"
        )
    lines = [
        f"{c.kind} {c.where} starts {earlier[c.node]} computing nodes earlier, exposed "
        f"{was[c.node] * 1e3:.3f} ms before and {now[c.node] * 1e3:.3f} ms now"
        for c in graph.issued
        if c.node in earlier and abs(was[c.node] - now[c.node]) > _LEAST
    ]
    return ["; ".join(sums), *lines]


def _computed_before(graph: ScheduleGraph, order: Sequence[int]) -> dict[int, int]:
    """Count, by place, the nodes that compute before it in this order."""
    computed, passed = {}, 0
    for place in order:
        computed[place] = passed
        passed += graph.seconds[place] > 0 and place not in graph.group
    return computed


def _exposed(timeline: Timeline) -> dict[fx.Node, float]:
    total: dict[fx.Node, float] = defaultdict(float)
    for each in timeline.exposed:
        total[each.collective.node] += each.seconds
    return total
