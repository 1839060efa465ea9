"""A train step of a pipeline: the stages of this rank, run by one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graph_trainer.core.pipeline.stage import GraphStage
from graph_trainer.core.runtime.step import Gradients
from graph_trainer.core.torch_private_pipelining import (
    Action,
    ActionKind,
    forward_runtime_of,
    is_csv,
    microbatch_of,
    receives_of,
    run_schedule,
    runtime_of,
    splits_backward,
)
from graph_trainer.errors import ConfigError

SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""The schedules of torch that graphs run."""
ONE_STAGE = ("1F1B", "GPipe")
"""Those with one stage on each rank; others have several."""
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
"""Those that place stages from the first rank to the last and back again, two on each rank."""


class PipelineStep:
    """Runs forward and backward of all microbatches on the stages of this rank.

    Stages that were captured without backward run forward alone. Parameters that a stage keeps from
    forward to backward are gathered once for all microbatches, others in each. Gradients are
    reduced once a run by stages with `reduces_once`, by others in each microbatch.

    A schedule that overlaps the forward of one microbatch with the backward of another (DualPipeV)
    runs the one after the other.

    Args:
        stages: those of this rank; the other ranks of the group have the others. Schedules that run
            a backward in two actions need stages with `splits_backward`.
        schedule: the name of a schedule of torch.distributed.pipelining, one of SCHEDULES, or the
            path of a CSV file with the actions of one. "1F1B" and "GPipe" have one stage a rank.
        num_microbatches: of a step.
        on_gradients: called with a module and gradients by FQN, those of a microbatch or those that
            are reduced once, which are to be added up; not used without backward.

    Raises:
        ConfigError: no schedule that graphs run, or stages whose backward is not split.
        ValueError: the schedule cannot run so many stages or microbatches (torch's own error).
    """

    def __init__(
        self,
        stages: Sequence[GraphStage],
        schedule: str,
        num_microbatches: int,
        on_gradients: Callable[[nn.Module, Gradients], None] | None = None,
    ) -> None:
        if schedule not in SCHEDULES and not is_csv(schedule):
            raise ConfigError(
                f"schedule {schedule!r}: stages that are graphs run {', '.join(SCHEDULES)}, or a "
                "file whose name ends in .csv"
            )
        self._stages = {stage.stage_index: stage for stage in stages}
        self._on_gradients = on_gradients
        make = runtime_of if stages[0].joint.signature.backward else forward_runtime_of
        self._runtime = make(schedule, list(stages), num_microbatches)
        if splits_backward(self._runtime.pipeline_order_with_comms):
            for index, stage in self._stages.items():
                if not stage.splits_backward:
                    raise ConfigError(
                        f"schedule {schedule!r} runs a backward in two actions, and stage {index} "
                        "runs it as one: make it with splits_backward=True"
                    )
        self._losses: list[torch.Tensor] = []
        run = self._runtime.register_custom_function
        run(ActionKind.UNSHARD, lambda action, ctx: self._stages[action.stage_index].unshard())
        run(ActionKind.RESHARD, lambda action, ctx: self._stages[action.stage_index].reshard())
        run(ActionKind.FORWARD, self._forward)
        run(ActionKind.FULL_BACKWARD, self._backward)
        run(ActionKind.BACKWARD_INPUT, self._backward_input)
        run(ActionKind.BACKWARD_WEIGHT, self._backward_weight)
        run(ActionKind.OVERLAP_F_B, self._forward_then_backward)
        run(ActionKind.REDUCE_GRAD, self._reduce_grad)

    def __call__(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]]
    ) -> list[torch.Tensor]:
        """Run a step.

        Args:
            args: for each microbatch the batch of the first stage; other ranks may pass it too.
            kwargs: for each microbatch what all stages take.

        Returns:
            The losses of the microbatches, on the rank of the last stage; an empty list on others.
        """
        self._losses = []
        run_schedule(self._runtime, list(args), [dict(k) for k in kwargs])
        return self._losses

    def _forward(self, action: Action, ctx: Any) -> None:
        stage, microbatch = self._stages[action.stage_index], microbatch_of(action)
        for receive in receives_of(self._runtime, action, forward=True):
            receive.wait()
        args, kwargs = ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch]
        loss = stage.forward(microbatch, args, kwargs)
        if loss is not None:
            self._losses.append(loss)
        elif following := self._stages.get(stage.stage_index + 1):
            stage.pass_forward(microbatch, following)

    def _backward(self, action: Action, ctx: Any) -> None:
        stage, microbatch = self._begin_backward(action)
        self._end_backward(stage, stage.backward(microbatch))
        self._pass_backward(stage, microbatch)

    def _backward_input(self, action: Action, ctx: Any) -> None:
        stage, microbatch = self._begin_backward(action)
        stage.backward_input(microbatch)
        self._pass_backward(stage, microbatch)

    def _backward_weight(self, action: Action, ctx: Any) -> None:
        stage = self._stages[action.stage_index]
        self._end_backward(stage, stage.backward_weight(microbatch_of(action)))

    def _reduce_grad(self, action: Action, ctx: Any) -> None:
        stage = self._stages[action.stage_index]
        self._end_backward(stage, stage.reduce_grad())

    def _forward_then_backward(self, action: Action, ctx: Any) -> None:
        assert action.sub_actions is not None
        forward, backward = action.sub_actions
        self._forward(forward, ctx)
        self._backward(backward, ctx)

    def _begin_backward(self, action: Action) -> tuple[GraphStage, int]:
        """Wait for the gradients with which a backward begins."""
        for receive in receives_of(self._runtime, action, forward=False):
            receive.wait()
        return self._stages[action.stage_index], microbatch_of(action)

    def _end_backward(self, stage: GraphStage, gradients: Gradients) -> None:
        if self._on_gradients is not None and gradients:
            self._on_gradients(stage.submod, gradients)

    def _pass_backward(self, stage: GraphStage, microbatch: int) -> None:
        if preceding := self._stages.get(stage.stage_index - 1):
            stage.pass_backward(microbatch, preceding)
