"""The schedule of a pipeline as a trace file, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from graph_trainer.core.torch_private_pipelining import ActionKind
from graph_trainer.planner.perfetto_trace import metadata, nanoseconds, write_events
from graph_trainer.planner.pipeline_plan import PipelinePlan

NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.FULL_BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
    ActionKind.UNSHARD: "unshard",
    ActionKind.REDUCE_GRAD: "reduce gradients",
}
"""The names of the programs of a stage."""


def write_schedule_trace(plan: PipelinePlan, file: IO[str]) -> None:
    """Write the schedule in Chrome's trace format, one event per line.

    There is a process for each rank of the pipeline, with one thread for the programs of its stages
    and one for what it sends to each other rank. Times are in microseconds.
    """
    write_events(plan.headline, schedule_events(plan), file)


def schedule_events(plan: PipelinePlan) -> Iterator[dict[str, Any]]:
    """Yield the events of `write_schedule_trace`."""
    receivers: dict[int, list[int]] = {
        rank: sorted({t.receiver for t in plan.timeline.transfers if t.sender == rank})
        for rank in plan.actions
    }
    for rank in plan.actions:
        yield metadata("process_name", rank, 0, name=f"pipeline rank {rank}")
        yield metadata("process_sort_index", rank, 0, sort_index=rank)
        yield metadata("thread_name", rank, 0, name="stages")
        for tid, receiver in enumerate(receivers[rank], 1):
            yield metadata("thread_name", rank, tid, name=f"sends to rank {receiver}")
    for rank in plan.actions:
        for span in plan.timeline.spans[rank]:
            name = NAMES[span.kind]
            number = "" if span.microbatch is None else f" {span.microbatch}"
            args: dict[str, Any] = {"stage": span.stage, "microbatch": span.microbatch}
            args["waits_for_send_us"] = span.exposed_seconds * 1e6
            yield _slice(
                *(rank, 0, span.start, span.seconds),
                name=f"{name}{number}, stage {span.stage}",
                cat=name,
                args=args,
            )
    for transfer in plan.timeline.transfers:
        what = "output" if transfer.forward else "gradient"
        yield _slice(
            *(transfer.sender, 1 + receivers[transfer.sender].index(transfer.receiver)),
            *(transfer.start, transfer.seconds),
            name=f"{what} of {transfer.microbatch} from stage {transfer.stage}",
            cat="send",
            args={"stage": transfer.stage, "microbatch": transfer.microbatch},
        )


def _slice(pid: int, tid: int, start: float, seconds: float, **more: Any) -> dict[str, Any]:
    begin, end = nanoseconds(start), nanoseconds(start + seconds)
    place = {"ph": "X", "pid": pid, "tid": tid}
    return place | {"ts": begin / 1000, "dur": (end - begin) / 1000} | more
