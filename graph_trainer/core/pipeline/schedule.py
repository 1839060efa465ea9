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
    microbatch_of,
    receives_of,
    run_schedule,
    runtime_of,
)
from graph_trainer.errors import ConfigError

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
"""The schedules whose backward of a microbatch is one action."""


class PipelineStep:
    """Runs forward and backward of all microbatches on the stages of this rank.

    Stages that were captured without backward run forward alone. Gradients are reduced
    once a microbatch, as each stage's graph does. Parameters that a stage keeps from forward to
    backward are gathered once for all microbatches, others in each.

    Args:
        stages: those of this rank; the other ranks of the group have the others.
        schedule: the name of a schedule of torch.distributed.pipelining, one of SCHEDULES. "1F1B"
            and "GPipe" have one stage a rank.
        num_microbatches: of a step.
        on_gradients: called with a module and the gradients of a microbatch, by FQN; not used
            without backward.

    Raises:
        ConfigError: a schedule that graphs cannot run.
        ValueError: the schedule cannot run so many stages or microbatches (torch's own error).
    """

    def __init__(
        self,
        stages: Sequence[GraphStage],
        schedule: str,
        num_microbatches: int,
        on_gradients: Callable[[nn.Module, Gradients], None] | None = None,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ConfigError(
                f"schedule {schedule!r}: stages that are graphs run {', '.join(SCHEDULES)}; others "
                "split backward in two, which a graph does not"
            )
        self._stages = {stage.stage_index: stage for stage in stages}
        self._on_gradients = on_gradients
        if stages[0].joint.signature.backward:
            self._runtime = runtime_of(schedule, list(stages), num_microbatches)
        else:
            self._runtime = forward_runtime_of(list(stages), num_microbatches)
        self._losses: list[torch.Tensor] = []
        run = self._runtime.register_custom_function
        run(ActionKind.UNSHARD, lambda action, ctx: self._stages[action.stage_index].unshard())
        run(ActionKind.RESHARD, lambda action, ctx: self._stages[action.stage_index].reshard())
        run(ActionKind.FORWARD, self._forward)
        run(ActionKind.FULL_BACKWARD, self._backward)

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
        stage, microbatch = self._stages[action.stage_index], microbatch_of(action)
        for receive in receives_of(self._runtime, action, forward=False):
            receive.wait()
        gradients = stage.backward(microbatch)
        if self._on_gradients is not None:
            self._on_gradients(stage.submod, gradients)
        if preceding := self._stages.get(stage.stage_index - 1):
            stage.pass_backward(microbatch, preceding)
