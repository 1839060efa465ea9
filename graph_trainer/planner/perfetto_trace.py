"""A simulated step as slices of time on named tracks, and as a trace file.

The file is in the Trace Event Format, which Perfetto and chrome://tracing open. The page of a plan
draws the same slices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import IO, Any

from torch import fx

from graph_trainer.core.analysis.collective_purpose import Traffic, traffic_of
from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.graph.annotations import module_of, phase_of
from graph_trainer.core.simulation.op_costs import Cost
from graph_trainer.core.simulation.simulate import Simulation
from graph_trainer.core.simulation.timeline import COMPUTE, HOST
from graph_trainer.planner.plan import Plan, versions

WAITS = "exposed waits"
WAIT = "wait"
"""The kind of a slice of the track WAITS."""
MEMORY = "memory"
_RED = "terrible"
"""The name of red in chrome://tracing; Perfetto chooses colours by name."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A span of time on a track.

    Times are whole nanoseconds. Start and end are rounded alike, so that neighbours do not overlap.
    """

    track: str
    """COMPUTE, HOST, the name of a process group's or a host link's stream, or WAITS."""
    node: fx.Node
    start: int
    end: int
    cost: Cost | None = None
    """Of a compute node or a copy to host memory or back."""
    collective: Collective | None = None
    """The collective that runs, or that an exposed wait waits for."""
    traffic: Traffic | None = None
    """The purpose of the collective."""
    delayed: fx.Node | None = None
    """The node that an exposed wait delays; None where the step ends."""

    @property
    def kind(self) -> str:
        """A kind of compute, the purpose of a collective that runs, HOST or WAIT."""
        if self.track == WAITS:
            return WAIT
        if self.track == HOST:
            return HOST
        if self.traffic is not None:
            return self.traffic.value
        return self.cost.kind.value if self.cost is not None else ""

    @property
    def bytes(self) -> int:
        """The bytes that a compute node or a collective moves."""
        if self.collective is not None:
            return max(self.collective.input_bytes, self.collective.output_bytes)
        return self.cost.bytes if self.cost is not None else 0


def slices(simulation: Simulation) -> Iterator[Slice]:
    """Yield the slices of every stream, then the exposed waits. Linear in nodes."""
    issued = {c.node: c for c in simulation.collectives}
    traffic = traffic_of(simulation.collectives, dict(simulation.joint.gradients()))
    timeline = simulation.timeline
    for event in timeline.events:
        node = event.node
        span = (nanoseconds(event.start), nanoseconds(event.start + event.seconds))
        if event.stream == HOST:
            yield Slice(HOST, node, *span)
        elif node in issued and event.stream != COMPUTE:
            yield Slice(event.stream, node, *span, collective=issued[node], traffic=traffic[node])
        else:
            yield Slice(event.stream, node, *span, simulation.costs[node])
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
    """List compute, the host if it takes time, every other stream in the order of first use, and
    the exposed waits."""
    streams = dict.fromkeys(e.stream for e in simulation.timeline.events)
    first = [COMPUTE, HOST] if HOST in streams else [COMPUTE]
    return [*first, *(stream for stream in streams if stream not in first), WAITS]


def nanoseconds(seconds: float) -> int:
    """Round seconds to the nearest nanosecond."""
    return round(seconds * 1e9)


def write_trace(plan: Plan, file: IO[str]) -> None:
    """Write a plan's streams and memory in Chrome's trace format, one event per line.

    There is one thread for compute, one for the host, one for the stream of each process group and
    of each direction of the link to host memory, and one for exposed waits. An arrow leads from a
    collective to the wait that it blocks. A counter shows the bytes of each category of memory.
    Times are in microseconds.
    """
    write_events(plan.headline, trace_events(plan.simulation, plan.rank), file)


def write_events(headline: str, events: Iterable[dict[str, Any]], file: IO[str]) -> None:
    """Write events in Chrome's trace format, one event per line.

    Args:
        headline: what was planned.
    """
    about = {"plan": headline} | versions()
    file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about))
    file.write(',\n"traceEvents": [')
    for count, event in enumerate(events):
        file.write(",\n" if count else "\n")
        file.write(json.dumps(event))
    file.write("\n]}\n")


def trace_events(simulation: Simulation, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the events of `write_trace`, those of a thread in the order of time."""
    threads = {track: number for number, track in enumerate(tracks(simulation))}
    yield metadata("process_name", rank, 0, name=f"rank {rank}")
    for track, tid in threads.items():
        yield metadata("thread_name", rank, tid, name=track)
        yield metadata("thread_sort_index", rank, tid, sort_index=tid)
    issued: dict[str, Slice] = {}
    for number, slice_ in enumerate(slices(simulation)):
        waited = slice_.collective.node.name if slice_.collective and slice_.kind == WAIT else None
        event = {
            "ph": "X",
            "pid": rank,
            "tid": threads[slice_.track],
            "ts": slice_.start / 1000,
            "dur": (slice_.end - slice_.start) / 1000,
            "name": slice_.node.name if waited is None else f"wait for {waited}",
            "cat": slice_.kind,
            "args": _args(slice_),
        }
        if waited is None:
            issued[slice_.node.name] = slice_
            yield event
        else:
            yield event | {"cname": _RED}
            yield from _arrow(rank, threads, issued[waited], slice_, number)
    yield from _memory(simulation, rank)


def metadata(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    """Make the event that names or sorts a process or a thread."""
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": args}


def _arrow(
    pid: int, threads: dict[str, int], source: Slice, wait: Slice, number: int
) -> Iterator[dict[str, Any]]:
    """Yield the ends of an arrow from a collective to its wait, at a time when both go on."""
    both = {
        "pid": pid,
        "ts": max(source.start, wait.start) / 1000,
        "name": "blocks",
        "cat": WAIT,
        "id": number,
    }
    yield both | {"ph": "s", "tid": threads[source.track]}
    yield both | {"ph": "f", "bp": "e", "tid": threads[wait.track]}


def _memory(simulation: Simulation, rank: int) -> Iterator[dict[str, Any]]:
    """Yield a counter event wherever the bytes alive change, at most one for each nanosecond.

    Of the nodes that start in the same nanosecond, the one with the most bytes alive counts, so
    that the peak is among them. Linear in nodes.
    """
    before: dict[str, int] = {}
    total, series = simulation.memory.total, simulation.memory.by_category
    at = ((nanoseconds(start), place) for place, start in enumerate(simulation.timeline.starts))
    for time, places in groupby(at, key=itemgetter(0)):
        place = max((place for _, place in places), key=total.__getitem__)
        alive = {category.value: live[place] for category, live in series.items()}
        if alive != before:
            yield {
                "ph": "C",
                "pid": rank,
                "tid": 0,
                "ts": time / 1000,
                "name": MEMORY,
                "args": alive,
            }
        before = alive


def _args(slice_: Slice) -> dict[str, Any]:
    args: dict[str, Any] = {"node": slice_.node.name, "op": str(slice_.node.target)}
    phase, module = phase_of(slice_.node), module_of(slice_.node)
    if slice_.cost is not None:
        args |= {"bytes": slice_.bytes, "flops": slice_.cost.flops}
    if slice_.collective is not None:
        collective = slice_.collective
        phase, module = phase or collective.phase, module or collective.module
        args |= {
            "role": slice_.traffic.value if slice_.traffic else None,
            "parameter": collective.parameter,
            "collective": collective.node.name,
            "bytes": slice_.bytes,
            "dtype": str(collective.dtype),
            "ranks": len(collective.ranks),
        }
    if slice_.kind == WAIT:
        args["holds_up"] = slice_.delayed.name if slice_.delayed else "the end of the step"
    return args | {"phase": phase.value if phase else None, "module": module}
