"""Private names of torch for the runtime of pipeline schedules, with the reason each is needed.

torch 2.13: `torch.distributed.pipelining` has public schedules, whose stages run autograd. Stages
that run graphs need the actions of a schedule, the runtime that takes functions for them, and the
base class of stages, none of which has a public name.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleGPipe,
    _validate_schedule,
    get_schedule_class,
)
from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _add_send_recv as add_send_recv
from torch.distributed.pipelining.schedules import _ComputationType as ActionKind
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as ScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase as StageBase


def runtime_of(schedule: str, stages: list[Any], num_microbatches: int) -> ScheduleRuntime:
    """Make the runtime of a schedule, with its sends and receives.

    Args:
        schedule: a name of torch's, or the path of a CSV file: see `is_csv`.
        stages: those of this rank.

    Raises:
        ValueError: torch has no such schedule, or it cannot run so many stages or microbatches.
        OSError: the file cannot be read.
    """
    if is_csv(schedule):
        runtime = _new_runtime(ScheduleRuntime, stages, num_microbatches)
        runtime._load_csv(schedule)
        return runtime
    class_ = get_schedule_class(schedule)
    runtime_class = class_ if issubclass(class_, ScheduleRuntime) else ScheduleRuntime
    runtime = _new_runtime(runtime_class, stages, num_microbatches)
    if runtime_class is not class_:  # schedules of one stage a rank have another runtime in torch
        ranks = runtime.pp_group_size
        ahead = [num_microbatches] * ranks if class_ is ScheduleGPipe else range(ranks)[::-1]
        # that of torch 2.13 leaves out the first microbatch of the last stage of 1F1B
        runtime._prepare_schedule_with_comms(
            {rank: _one_stage(rank, ahead[rank], num_microbatches) for rank in range(ranks)}
        )
    return runtime


def is_csv(schedule: str) -> bool:
    """Return whether a schedule is a CSV file: a line a rank, an action such as 0F1 a field."""
    return schedule.endswith(".csv")


def check_csv(path: str, degree: int, stages: int, microbatches: int, *, in_a_v: bool) -> None:
    """Check that a file has a schedule, as `runtime_of` reads it: forward of every microbatch on
    every stage once, and its backward once, whole or in two parts, in an order that can run.

    Args:
        degree: how many ranks a pipeline has.
        in_a_v: whether stages are placed from the first rank to the last and back again, as for
            "ZBVZeroBubble" and "DualPipeV"; otherwise each time from the first to the last.

    Raises:
        ValueError: it has no such schedule.
        OSError: it cannot be read.
    """
    actions: dict[int, list[Any]] = {}  # lists of Action | None take no list of Action
    with open(path, newline="") as file:
        for rank, row in enumerate(csv.reader(file)):
            found = (_action_of(field.strip()) for field in row)
            actions[rank] = [action for action in found if action is not None]
    computed: dict[tuple[int, ActionKind], list[int]] = defaultdict(list)
    for order in actions.values():
        for action in order:
            if not 0 <= action.stage_index < stages:
                raise ValueError(f"{action} is of none of the {stages} stages")
            computed[action.stage_index, action.computation_type].append(microbatch_of(action))
    every = list(range(microbatches))
    for stage in range(stages):
        forward, whole, of_input, of_weight = (computed[stage, kind] for kind in _IN_A_FILE)
        backward = sorted(whole + of_input)
        if sorted(forward) != every or backward != every or sorted(of_input) != sorted(of_weight):
            raise ValueError(
                f"stage {stage} does not run F once for each microbatch from 0 to "
                f"{microbatches - 1}, and for each either B or I and W"
            )
    try:
        rank_of_stage = _validate_schedule(actions, degree, stages, microbatches)
        # also that every action can run at some time
        add_send_recv(actions, stage_to_rank=rank_of_stage.__getitem__, num_stages=stages)
    except AssertionError as error:
        raise ValueError(" ".join(str(error).split("\n\n")[0].split())) from None
    placed = generate_stage_to_rank_mapping(degree, stages, style="v" if in_a_v else "loop")
    for stage, rank in rank_of_stage.items():
        if placed[stage] != rank:
            raise ValueError(f"stage {stage} is on line {rank + 1} and not {placed[stage] + 1}")


_IN_A_FILE = (
    ActionKind.FORWARD,
    ActionKind.FULL_BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


def _action_of(field: str) -> Action | None:
    """Return the action of a field; None for an empty one, in which a rank is idle."""
    try:
        action = Action.from_str(field)
    except RuntimeError:
        action = None
    if field and (action is None or str(action) != field):  # from_str ignores what follows
        raise ValueError(f"{field!r} is no action")
    if action is not None and action.computation_type not in _IN_A_FILE:
        raise ValueError(f"{field!r} is none of F, B, I and W")
    return action


def forward_runtime_of(schedule: str, stages: list[Any], num_microbatches: int) -> ScheduleRuntime:
    """Make the runtime of forward alone, with its sends and receives: a stage runs all microbatches
    before the next stage of its rank does.

    Args:
        schedule: as of `runtime_of`; it places the stages on ranks.
        stages: those of this rank.
    """
    runtime = runtime_of(schedule, stages, num_microbatches)
    rank_of_stage = runtime.stage_index_to_group_rank
    orders: dict[int, list[Action]] = {rank: [] for rank in range(runtime.pp_group_size)}
    for stage, rank in sorted(rank_of_stage.items()):
        orders[rank] += [Action(stage, ActionKind.FORWARD, m) for m in range(num_microbatches)]
    runtime.pipeline_order_with_comms = add_send_recv(
        orders, stage_to_rank=rank_of_stage.__getitem__, num_stages=runtime._num_stages
    )
    return runtime


def actions_of(
    schedule: str, num_stages: int, ranks: int, num_microbatches: int
) -> dict[int, list[Action]]:
    """List the actions of every rank of a schedule, without stages and process groups.

    Args:
        ranks: of the pipeline.

    Raises:
        ValueError: as `runtime_of`.
    """
    # what a schedule reads of the stages of a rank
    of_all = {"num_stages": num_stages, "group_size": ranks, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(stage_index=i, **of_all) for i in range(0, num_stages, ranks)]
    runtime = runtime_of(schedule, stages, num_microbatches)
    return {rank: list(order) for rank, order in runtime.pipeline_order_with_comms.items()}


def leaves_of(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield actions, and in place of one that overlaps others these in order."""
    for action in actions:
        yield from action.sub_actions or (action,)


def computations_of(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield the actions that compute a microbatch, those that are overlapped too."""
    return (action for action in leaves_of(actions) if action.is_compute_op)


def ranks_of_stages(actions: Mapping[int, Iterable[Action]]) -> dict[int, int]:
    """Return the rank of each stage.

    Args:
        actions: by rank.
    """
    return {a.stage_index: rank for rank, order in actions.items() for a in computations_of(order)}


def splits_backward(actions: Mapping[int, Iterable[Action]]) -> bool:
    """Return whether any rank runs a backward in two actions.

    Args:
        actions: by rank.
    """
    computed = (action for order in actions.values() for action in computations_of(order))
    return any(action.computation_type is ActionKind.BACKWARD_WEIGHT for action in computed)


def most_in_flight(actions: Iterable[Action], stage_index: int) -> int:
    """Return the most microbatches whose forward a stage has run, and whose backward it has not
    finished, at any time of a step.

    Args:
        actions: of the rank that has the stage.
    """
    ends = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT)
    most = in_flight = 0
    for action in computations_of(actions):
        if action.stage_index == stage_index:
            in_flight += action.computation_type is ActionKind.FORWARD
            in_flight -= action.computation_type in ends
            most = max(most, in_flight)
    return most


def _new_runtime(
    class_: type[ScheduleRuntime], stages: list[Any], num_microbatches: int
) -> ScheduleRuntime:
    return class_(
        stages,
        num_microbatches,
        loss_fn=_no_loss,
        scale_grads=False,
        backward_requires_autograd=False,
    )


def _one_stage(stage: int, ahead: int, num_microbatches: int) -> list[Action | None]:
    """List the actions of a rank with one stage: forward runs so many microbatches ahead of the
    forward that is followed by the first backward."""
    ahead = min(ahead, num_microbatches)
    actions: list[Action | None] = [Action(stage, ActionKind.FORWARD, m) for m in range(ahead)]
    for microbatch in range(num_microbatches):
        if ahead + microbatch < num_microbatches:
            actions.append(Action(stage, ActionKind.FORWARD, ahead + microbatch))
        actions.append(Action(stage, ActionKind.FULL_BACKWARD, microbatch))
    return actions


def run_schedule(runtime: ScheduleRuntime, args: list[Any], kwargs: list[dict[str, Any]]) -> None:
    """Run the actions of this rank. `step` of torch 2.13 would cut a batch into microbatches."""
    for stage in runtime._stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    runtime._step_microbatches(args, kwargs, return_outputs=False)


def stages_of(schedule: Any) -> list[StageBase]:
    """List the stages of this rank that a schedule of torch's runs."""
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages


def run_modules(
    schedule: Any,
    args: list[Any],
    kwargs: list[dict[str, Any]],
    targets: list[torch.Tensor],
    loss_kwargs: dict[str, Any],
    *,
    backward: bool = True,
) -> list[torch.Tensor]:
    """Run forward and backward of modules by a schedule of torch's, without graphs.

    Args:
        args, kwargs, targets: by microbatch.
        backward: False for forward alone.

    Returns:
        The losses of the microbatches, on the rank of the last stage; an empty list on others.
    """
    stages = stages_of(schedule)
    for stage in stages:
        stage.has_backward = backward
        stage.clear_runtime_states()
    of_last = any(stage.is_last for stage in stages)
    losses: list[torch.Tensor] = []
    trains, schedule._has_backward = schedule._has_backward, backward
    try:
        schedule._step_microbatches(
            args,
            kwargs,
            targets if of_last else None,
            losses if of_last else None,
            return_outputs=False,
            loss_kwargs=loss_kwargs,
        )
    finally:
        schedule._has_backward = trains
    return losses


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
