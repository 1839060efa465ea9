"""Private names of torch for the runtime of pipeline schedules, with the reason each is needed.

torch 2.13: `torch.distributed.pipelining` has public schedules, whose stages run autograd. Stages
that run graphs need the actions of a schedule, the runtime that takes functions for them, and the
base class of stages, none of which has a public name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    get_schedule_class,
)
from torch.distributed.pipelining.schedules import (
    _Action as Action,
)
from torch.distributed.pipelining.schedules import (
    _ComputationType as ActionKind,
)
from torch.distributed.pipelining.schedules import (
    _PipelineScheduleRuntime as ScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase as StageBase

Actions = dict[int, list[Action | None]]
"""By rank of the pipeline, what it computes in order; None where it waits."""


class StageOfOrder(StageBase):
    """A stage without a module: what a schedule of torch's needs to list its actions."""

    def __init__(self, index: int, count: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(torch.nn.Identity(), index, count, torch.device("cpu"), group)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        raise NotImplementedError


def actions_of(schedule: str, num_stages: int, num_microbatches: int, group: Any) -> Actions:
    """List what every rank of a pipeline computes, in the order of a schedule that torch names.

    Raises:
        ValueError: torch has no such schedule.
    """
    class_ = get_schedule_class(schedule)
    ranks = dist.get_world_size(group)
    if class_ is ScheduleGPipe:
        return {rank: _one_stage(rank, num_microbatches, num_microbatches) for rank in range(ranks)}
    if class_ is Schedule1F1B:
        # the one that torch 2.13 lists leaves out the first microbatch of the last stage
        return {rank: _one_stage(rank, ranks - 1 - rank, num_microbatches) for rank in range(ranks)}
    rank = dist.get_rank(group)
    local = [StageOfOrder(i, num_stages, group) for i in range(num_stages) if i % ranks == rank]
    return class_(local, num_microbatches, loss_fn=_no_loss).pipeline_order


def _one_stage(stage: int, ahead: int, num_microbatches: int) -> list[Action | None]:
    """List the actions of a rank with one stage: forward runs so many microbatches ahead of the
    forward that is followed by the first backward."""
    ahead = min(ahead, num_microbatches)
    actions = [Action(stage, ActionKind.FORWARD, m) for m in range(ahead)]
    for microbatch in range(num_microbatches):
        if ahead + microbatch < num_microbatches:
            actions.append(Action(stage, ActionKind.FORWARD, ahead + microbatch))
        actions.append(Action(stage, ActionKind.FULL_BACKWARD, microbatch))
    return [*actions]


def runtime_of(actions: Actions, stages: list[Any], num_microbatches: int) -> ScheduleRuntime:
    """Make the runtime of a schedule, with its sends and receives."""
    runtime = ScheduleRuntime(
        stages,
        num_microbatches,
        loss_fn=_no_loss,
        scale_grads=False,
        backward_requires_autograd=False,
    )
    runtime._prepare_schedule_with_comms(actions)
    return runtime


def run_schedule(runtime: ScheduleRuntime, args: list[Any], kwargs: list[dict[str, Any]]) -> None:
    """Run the actions of this rank. `step` of torch 2.13 would cut a batch into microbatches."""
    for stage in runtime._stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    runtime._step_microbatches(args, kwargs, return_outputs=False)


def receives_of(runtime: ScheduleRuntime, action: Action, *, forward: bool) -> list[dist.Work]:
    """Take the receives that an action waits for; empty where its input is of this rank."""
    pending = runtime.fwd_recv_ops if forward else runtime.bwd_recv_ops
    return pending.pop((action.stage_index, microbatch_of(action)), [])


def microbatch_of(action: Action) -> int:
    """Return the microbatch of an action that computes."""
    assert action.microbatch_index is not None
    return action.microbatch_index


def _no_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("the last stage's graph computes the loss")
