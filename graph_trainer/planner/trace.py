"""A plan in the Trace Event Format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from graph_trainer.core.graph.annotations import (
    module_of,
    phase_of,
)
from graph_trainer.core.simulation.simulate import Simulation
from graph_trainer.planner.plan import Plan
from graph_trainer.planner.report import versions
from graph_trainer.planner.slices import WAITS, Slice, memory_steps, slices, tracks
from graph_trainer.planner.text import headline

MEMORY = "memory"
_RED = "terrible"
"""What chrome://tracing calls its red; Perfetto chooses by name."""


def write_trace(plan: Plan, file: IO[str]) -> None:
    """Write a plan's streams and memory, an event a line.

    One thread holds compute, one every group's stream and one the exposed waits; an arrow leads
    from a collective to the wait that it blocks; a counter has a series, in bytes, for every
    category of memory. Times are microseconds. No more is held in memory than one event.
    """
    about = {"plan": headline(plan)} | versions()
    file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about))
    file.write(',\n"traceEvents": [')
    for count, event in enumerate(trace_events(plan.simulation, plan.rank)):
        file.write(",\n" if count else "\n")
        file.write(json.dumps(event))
    file.write("\n]}\n")


def trace_events(simulation: Simulation, rank: int) -> Iterator[dict[str, Any]]:
    """The events of `write_trace`, those of a thread in the order of time."""
    threads = {track: number for number, track in enumerate(tracks(simulation))}
    yield _metadata("process_name", rank, 0, name=f"rank {rank}")
    for track, tid in threads.items():
        yield _metadata("thread_name", rank, tid, name=track)
        yield _metadata("thread_sort_index", rank, tid, sort_index=tid)
    issued: dict[str, Slice] = {}
    for number, each in enumerate(slices(simulation)):
        event = {
            "ph": "X",
            "pid": rank,
            "tid": threads[each.track],
            "ts": each.start / 1000,
            "dur": (each.end - each.start) / 1000,
            "name": _name(each),
            "cat": _category(each),
            "args": _args(each),
        }
        if each.track != WAITS:
            issued[each.node.name] = each
            yield event
            continue
        yield event | {"cname": _RED}
        assert each.collective is not None
        yield from _arrow(rank, threads, issued[each.collective.node.name], each, number)
    yield from _memory(simulation, rank)


def _metadata(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": args}


def _arrow(
    pid: int, threads: dict[str, int], source: Slice, wait: Slice, number: int
) -> Iterator[dict[str, Any]]:
    """From a collective to its wait, at a time at which both go on: they end together."""
    both = {
        "pid": pid,
        "ts": max(source.start, wait.start) / 1000,
        "name": "blocks",
        "cat": "wait",
        "id": number,
    }
    yield both | {"ph": "s", "tid": threads[source.track]}
    yield both | {"ph": "f", "bp": "e", "tid": threads[wait.track]}


def _memory(simulation: Simulation, rank: int) -> Iterator[dict[str, Any]]:
    before: dict[str, int] = {}
    series = simulation.memory.by_category
    for time, place in memory_steps(simulation):
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


def _name(each: Slice) -> str:
    if each.track == WAITS and each.collective is not None:
        return f"wait for {each.collective.node.name}"
    return each.node.name


def _category(each: Slice) -> str:
    if each.track == WAITS:
        return "wait"
    if each.traffic is not None:
        return each.traffic.value
    return each.cost.kind.value if each.cost is not None else ""


def _args(each: Slice) -> dict[str, Any]:
    args: dict[str, Any] = {"node": each.node.name, "op": str(each.node.target)}
    phase, module = phase_of(each.node), module_of(each.node)
    if each.cost is not None:
        args |= {"bytes": each.cost.bytes, "flops": each.cost.flops}
    if each.collective is not None:
        of = each.collective
        phase, module = phase or of.phase, module or of.module
        args |= {
            "role": each.traffic.value if each.traffic else None,
            "parameter": of.parameter,
            "collective": of.node.name,
            "bytes": max(of.input_bytes, of.output_bytes),
            "dtype": str(of.dtype),
            "ranks": len(of.ranks),
        }
    if each.track == WAITS:
        args["holds_up"] = each.delayed.name if each.delayed else "the end of the step"
    return args | {"phase": phase.value if phase else None, "module": module}
