"""A step played on one compute stream and one stream a process group."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from graph_trainer.core.analysis.collective_purpose import Traffic, traffic_of
from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.graph.annotations import role_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective, is_wait, storage_roots
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.op_costs import Cost
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, Runtime

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a stream is busy with."""

    node: fx.Node
    stream: str
    start: float
    """Seconds from the beginning of the step."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ExposedWait:
    """A wait at which the compute stream stands still."""

    wait: fx.Node
    collective: Collective
    traffic: Traffic
    seconds: float
    held_up: fx.Node | None
    """The next node of the model that computes, which could have begun: a bucket's own copies are
    not what waits for it. None where there is none before the step ends."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """How a step passes on one rank."""

    events: list[Event]
    starts: list[float]
    """For every node, in graph order, when the compute stream reaches it, seconds."""
    step_seconds: float
    busy: dict[str, float]
    """Seconds that each stream is busy."""
    exposed: list[ExposedWait]

    def exposed_seconds(self) -> dict[Traffic, float]:
        """Seconds that compute stands still, by what the collectives are for."""
        total: dict[Traffic, float] = defaultdict(float)
        for each in self.exposed:
            total[each.traffic] += each.seconds
        return dict(total)


def stream_names(issued: list[Collective]) -> dict[tuple[int, ...], str]:
    """A short name for every group, and no two alike: its number of ranks and some of them."""
    names: dict[tuple[int, ...], str] = {}
    for each in issued:
        if each.ranks not in names:
            name = describe_ranks(each.ranks)
            taken = sum(describe_ranks(ranks) == name for ranks in names)
            names[each.ranks] = f"{name} ({taken + 1})" if taken else name
    return names


def describe_ranks(ranks: tuple[int, ...]) -> str:
    """'16 ranks 0, 8, ... 120': a group in a few words, whatever its size."""
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks {ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def play(
    joint: JointGraph,
    issued: list[Collective],
    cost: dict[fx.Node, Cost],
    hardware: Hardware,
    runtime: Runtime = GRAPH_TRAINER,
) -> Timeline:
    """Play a graph in its order. Linear in nodes.

    Compute nodes run one after the other. A collective begins when the compute stream has
    reached it and its group's stream is free, and does not hold compute up; a wait holds it up
    until its collective is done. While anything is communicated, compute has a part of the device
    less; streams do not slow each other down otherwise.

    Arguments:
        issued: the collectives of the graph, as `collectives` gives them.
        cost: what each node takes, as `costs` gives it.
        runtime: who runs the step; its copies take time as well.
    """
    by_node = {c.node: c for c in issued}
    traffic = traffic_of(issued)
    names = stream_names(issued)
    roots = storage_roots(joint.graph)
    copies = runtime.copies(issued, hardware)
    free: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    ends: dict[object, tuple[float, Collective]] = {}
    events: list[Event] = []
    starts: list[float] = []
    blocked: list[tuple[fx.Node, Collective, float]] = []
    exposed: list[ExposedWait] = []
    now = 0.0
    for node in joint.graph.nodes:
        starts.append(now)
        if node in by_node:
            collective = by_node[node]
            stream = names[collective.ranks]
            seconds = collective_seconds(collective, hardware) + copies.on_stream.get(node, 0.0)
            start = max(now, free[stream])
            free[stream] = start + seconds
            busy[stream] += seconds
            ends[roots[node]] = (free[stream], collective)
            events.append(Event(node, stream, start, seconds))
        elif is_wait(node):
            issuer = ends.get(roots[node]) or ends.get((roots[node][0], 0))
            end, waited = issuer if issuer is not None else (now, None)
            if end > now and waited is not None:
                blocked.append((node, waited, end - now))
                now = end
            copying = copies.on_compute.pop(waited.node, 0.0) if waited is not None else 0.0
            if copying:
                events.append(Event(node, COMPUTE, now, copying))
                busy[COMPUTE] += copying
                now += copying
        elif not is_collective(node) and cost[node].seconds:
            communicating = max(free.values(), default=0.0) - now
            seconds = stretched(cost[node].seconds, communicating, hardware)
            if role_of(node) is None:
                exposed += _held_up(blocked, traffic, node)
                blocked = []
            events.append(Event(node, COMPUTE, now, seconds))
            busy[COMPUTE] += seconds
            now += seconds
    exposed += _held_up(blocked, traffic, None)
    end_of_all = max([now, *free.values()])
    return Timeline(events, starts, end_of_all, dict(busy), exposed)


def stretched(seconds: float, communicating: float, hardware: Hardware) -> float:
    """What a kernel takes that begins now, where collectives run for some time from now on."""
    left = 1 - hardware.collective_compute_share
    if communicating <= 0:
        return seconds
    done = communicating * left
    return seconds / left if done >= seconds else communicating + seconds - done


def _held_up(
    blocked: list[tuple[fx.Node, Collective, float]],
    traffic: dict[fx.Node, Traffic],
    node: fx.Node | None,
) -> list[ExposedWait]:
    return [
        ExposedWait(wait, collective, traffic[collective.node], seconds, node)
        for wait, collective, seconds in blocked
    ]
