"""Simulate a step on its streams: one for compute, one for each process group, and one each for
copies to host memory and for copies back; and on the host, which issues what they run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from torch import fx

from graph_trainer.core.analysis.collective_purpose import Traffic, traffic_of
from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.graph.annotations import role_of
from graph_trainer.core.graph.collective_kinds import Effect
from graph_trainer.core.graph.host_copies import is_copy_to_host, waits_for_copy
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import collective_kinds, storage_roots
from graph_trainer.core.simulation.collective_costs import collective_parts
from graph_trainer.core.simulation.hardware import Hardware, Link
from graph_trainer.core.simulation.host import reads_before_kernels, reads_on_host
from graph_trainer.core.simulation.op_costs import Cost, CostKind

COMPUTE = "compute"
HOST = "host"
COPIES_IN = "copies into gathers"
TO_HOST = "copies to host memory"
FROM_HOST = "copies from host memory"


class Event(NamedTuple):
    """A time span in which a stream is busy."""

    node: fx.Node
    stream: str
    start: float
    """Seconds after the beginning of the step."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ExposedWait:
    """A wait at which the compute stream is idle."""

    wait: fx.Node
    collective: Collective
    traffic: Traffic
    seconds: float
    delayed: fx.Node | None = None
    """The next computing node of the model, which could have started; the copies of a bucket do
    not count. None if no such node follows."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step of one rank."""

    events: list[Event]
    starts: list[float]
    """For every node, in graph order: when the compute stream reaches it, in seconds."""
    step_seconds: float
    """Until the last event ends."""
    busy: dict[str, float]
    """Seconds that each stream is busy."""
    exposed: list[ExposedWait]
    """In graph order."""
    copy_wait_seconds: float = 0.0
    """Seconds that the compute stream is idle because a copy to host memory or back is not
    complete."""
    host_wait_seconds: float = 0.0
    """Seconds that the compute stream is idle because the host has not issued its next node."""
    host_lead_seconds: float = 0.0
    """How long before the end of the step the host has issued all of it."""

    def exposed_seconds(self) -> dict[Traffic, float]:
        """Return the seconds that the compute stream is idle, by purpose of the collective."""
        total: dict[Traffic, float] = defaultdict(float)
        for wait in self.exposed:
            total[wait.traffic] += wait.seconds
        return dict(total)


def stream_names(issued: list[Collective]) -> dict[tuple[int, ...], str]:
    """Return a short name for every group, with a number if the name is not unique."""
    names: dict[tuple[int, ...], str] = {}
    used: Counter[str] = Counter()
    for ranks in dict.fromkeys(collective.ranks for collective in issued):
        name = describe_ranks(ranks)
        used[name] += 1
        names[ranks] = f"{name} ({used[name]})" if used[name] > 1 else name
    return names


def describe_ranks(ranks: tuple[int, ...]) -> str:
    """Format a group of any size in a few words: '16 ranks 0, 8, ... 120'."""
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks {ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def play(
    joint: JointGraph,
    issued: list[Collective],
    cost: dict[fx.Node, Cost],
    hardware: Hardware,
    host_seconds: Mapping[fx.Node, float] = {},
    copied_beside: Mapping[fx.Node, fx.Node] = {},
) -> Timeline:
    """Simulate a graph in its order. Linear in nodes.

    The host issues one node after another. What it issues starts when its stream is free, and not
    before it is issued. Where the host reads what a node computes, it waits for the compute stream,
    and issues the next node after that: the stream is idle meanwhile. So it does before a node that
    reads its inputs on the host (see `reads_before_kernels`).

    Compute nodes run one after another. A collective starts when the compute stream reaches it
    and the stream of its group is free. Compute continues meanwhile, and is idle at a wait until
    the collective is complete. While a collective runs, compute has a smaller part of the device. A
    GPU's copies to host memory and back run like collectives, on a stream for each direction, and
    do not slow compute down. Transfers over one link, or over links that the hardware shares, take
    turns: together they take as long as side by side, at a part of the bandwidth each.

    Args:
        issued, cost: the results of `collectives` and `costs`.
        host_seconds: that of the function of this name; empty for a host that takes no time.
        copied_beside: nodes that run on a stream for copies, beside compute, each with the
            collective that waits for it.
    """
    by_node = {c.node: c for c in issued}
    traffic = traffic_of(issued, dict(joint.gradients()))
    names = stream_names(issued)
    roots = storage_roots(joint.graph)
    kinds = collective_kinds(joint.graph)
    # the times at which streams become free, and at which collectives and copies end
    group_free: dict[str, float] = defaultdict(float)
    copies_free = {TO_HOST: 0.0, FROM_HOST: 0.0, COPIES_IN: 0.0}
    copied: dict[fx.Node, float] = defaultdict(float)  # by collective, when its input is complete
    links = _Links(hardware)
    copy_end: dict[fx.Node, float] = {}
    ends: dict[object, tuple[float, Collective]] = {}
    copy_wait_seconds = 0.0
    events: list[Event] = []
    starts: list[float] = []
    exposed: list[ExposedWait] = []
    undelayed = 0  # exposed waits from here on have no delayed node yet
    now = host_now = host_wait_seconds = 0.0
    for node in joint.graph.nodes:
        kind = kinds[node]
        issue = host_seconds.get(node, 0.0)
        if issue and reads_before_kernels(node, hardware):
            host_now = max(host_now, now) + hardware.host.read_seconds
        if issue:
            events.append(Event(node, HOST, host_now, issue))
            host_now += issue
            beside = node in by_node or node in copied_beside
            if cost[node].seconds and not beside:  # the compute stream runs it
                host_wait_seconds += max(0.0, host_now - now)
                now = max(now, host_now)
        starts.append(now)
        if node in by_node:
            collective = by_node[node]
            stream = names[collective.ranks]
            latency, transfer, link = collective_parts(collective, hardware)
            start = max(now, host_now, group_free[stream], copied[node])
            end = links.transfer(start + latency, transfer, link, Direction.OUT, Direction.IN)
            group_free[stream] = end
            ends[roots[node]] = (end, collective)
            events.append(Event(node, stream, start, end - start))
        elif cost[node].kind is CostKind.HOST_COPY:
            stream = TO_HOST if is_copy_to_host(node) else FROM_HOST
            seconds = hardware.host_copy_seconds(cost[node].bytes)
            start = max(now, host_now, copies_free[stream])
            direction = Direction.OUT if stream == TO_HOST else Direction.IN
            end = links.transfer(start, seconds, Link.HOST, direction)
            copies_free[stream] = copy_end[node] = end
            events.append(Event(node, stream, start, end - start))
        elif waits_for_copy(node):
            idle = max(0.0, copy_end.get(node.all_input_nodes[0], 0.0) - now)
            copy_wait_seconds += idle
            now += idle
        elif kind is not None and kind.effect is Effect.WAITS:
            # a coalesced collective has one root for all of its results
            issuer = ends.get(roots[node]) or ends.get((roots[node][0], 0))
            if issuer is None:
                continue
            end, collective = issuer
            if end > now:
                # until the host has issued the wait, compute is idle because of the host
                late = max(0.0, min(host_now, end) - now)
                host_wait_seconds += late
                now = starts[-1] = now + late
            if end > now:
                purpose = traffic[collective.node]
                exposed.append(ExposedWait(node, collective, purpose, end - now))
                now = end
        elif cost[node].seconds and node in copied_beside:
            start = max(now, host_now, copies_free[COPIES_IN])
            end = start + cost[node].seconds
            copies_free[COPIES_IN] = copied[copied_beside[node]] = end
            events.append(Event(node, COPIES_IN, start, cost[node].seconds))
        elif cost[node].seconds:
            communicating = max(group_free.values(), default=0.0) - now
            seconds = stretched(cost[node].seconds, communicating, hardware)
            if role_of(node) is None:
                exposed[undelayed:] = [replace(w, delayed=node) for w in exposed[undelayed:]]
                undelayed = len(exposed)
            events.append(Event(node, COMPUTE, now, seconds))
            now += seconds
        if hardware.device == "cpu":  # the thread that issues an op runs it, and waits itself
            host_now = now = max(now, host_now)
        if node in host_seconds and reads_on_host(node):
            host_now = max(host_now, now) + hardware.host.read_seconds
    busy: dict[str, float] = defaultdict(float)
    for event in events:
        busy[event.stream] += event.seconds
    device_end = max([now, *group_free.values(), *copies_free.values()])
    end = max(device_end, host_now)
    host_wait_seconds += end - device_end
    return Timeline(
        events,
        starts,
        end,
        dict(busy),
        exposed,
        copy_wait_seconds,
        host_wait_seconds,
        end - host_now,
    )


class Direction(Enum):
    """Whether a transfer sends bytes of the device or receives some; links do both at once."""

    OUT = "out"
    IN = "in"


class _Links:
    """The links of a device, and when each is free."""

    def __init__(self, hardware: Hardware) -> None:
        self._shared = hardware.shared_links
        self._free: dict[tuple[Link, Direction], float] = defaultdict(float)

    def transfer(self, ready: float, seconds: float, link: Link, *directions: Direction) -> float:
        """Return the end of a transfer that could start at `ready`, and let its link be busy."""
        if not seconds:  # a message without bytes
            return ready
        physical = self._shared[0] if link in self._shared else link
        places = [(physical, direction) for direction in directions]
        end = max([ready, *(self._free[place] for place in places)]) + seconds
        self._free.update(dict.fromkeys(places, end))
        return end


def stretched(seconds: float, communicating: float, hardware: Hardware) -> float:
    """Return the seconds of a kernel that starts now while collectives run.

    Args:
        seconds: the time of the kernel without collectives.
        communicating: for how many more seconds collectives run.
    """
    if communicating <= 0:
        return seconds
    speed = 1 - hardware.collective_compute_share
    done = communicating * speed
    return seconds / speed if done >= seconds else communicating + seconds - done
