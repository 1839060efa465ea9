"""A simulated step as slices of time on named tracks: what the trace and the page draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from torch import fx

from graph_trainer.core.analysis.collective_purpose import Traffic, traffic_of
from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.simulation.op_costs import Cost
from graph_trainer.core.simulation.simulate import Simulation
from graph_trainer.core.simulation.timeline import COMPUTE

WAITS = "exposed waits"


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that takes time on a track.

    Times are whole nanoseconds, begin and end rounded alike, so that neighbours do not overlap.
    """

    track: str
    node: fx.Node
    start: int
    end: int
    cost: Cost | None = None
    """Of a compute node."""
    collective: Collective | None = None
    """The one that runs, or that a wait waits for."""
    traffic: Traffic | None = None
    delayed: fx.Node | None = None
    """What an exposed wait keeps from beginning; None where the step ends."""


def slices(simulation: Simulation) -> Iterator[Slice]:
    """What every stream is busy with, then the exposed waits. Linear in nodes."""
    issued = {c.node: c for c in simulation.collectives}
    traffic = traffic_of(simulation.collectives)
    timeline = simulation.timeline
    for event in timeline.events:
        node, start, end = event.node, event.start, event.start + event.seconds
        if event.stream == COMPUTE:
            yield Slice(COMPUTE, node, nanoseconds(start), nanoseconds(end), simulation.costs[node])
        else:
            yield Slice(
                event.stream,
                node,
                nanoseconds(start),
                nanoseconds(end),
                collective=issued[node],
                traffic=traffic[node],
            )
    reached = dict(zip(simulation.joint.graph.nodes, timeline.starts, strict=True))
    for wait in timeline.exposed:
        start = reached[wait.wait]
        yield Slice(
            WAITS,
            wait.wait,
            nanoseconds(start),
            nanoseconds(start + wait.seconds),
            collective=wait.collective,
            traffic=wait.traffic,
            delayed=wait.delayed,
        )


def tracks(simulation: Simulation) -> list[str]:
    """Compute, then every group's stream in the order of first use, then the exposed waits."""
    streams = dict.fromkeys(e.stream for e in simulation.timeline.events if e.stream != COMPUTE)
    return [COMPUTE, *streams, WAITS]


def nanoseconds(seconds: float) -> int:
    """Seconds to the nearest nanosecond."""
    return round(seconds * 1e9)


def memory_steps(simulation: Simulation) -> Iterator[tuple[int, int]]:
    """Nanoseconds and the position of the node to read memory at, where time goes on.

    Of the nodes that take no time the one with the most bytes alive stands for all, so that the
    peak is among them. Linear in nodes.
    """
    total = simulation.memory.total
    at = ((nanoseconds(start), place) for place, start in enumerate(simulation.timeline.starts))
    for time, places in groupby(at, key=itemgetter(0)):
        yield time, max((place for _, place in places), key=total.__getitem__)
