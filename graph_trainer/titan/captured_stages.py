"""Pipeline parallelism in the trainer: the stages of this rank, captured and run by a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from graph_trainer.core.capture.forward_alone import capture_stage, output_tensors
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.core.passes.pipeline import run_passes
from graph_trainer.core.passes.report import Report
from graph_trainer.core.pipeline.reduce_once import reduces_once, unreduced_bytes
from graph_trainer.core.pipeline.schedule import PipelineStep
from graph_trainer.core.pipeline.stage import GraphStage
from graph_trainer.core.runtime.step import Gradients
from graph_trainer.core.simulation.simulate import OtherMemory
from graph_trainer.core.torch_private_pipelining import (
    StageBase,
    actions_of,
    most_in_flight,
    splits_backward,
)
from graph_trainer.errors import CaptureError, VerificationError
from graph_trainer.titan.step_inputs import loss_of_batch

Microbatch = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""Inputs and labels, int64 [microbatch, sequence], and what else the model takes."""


class PassedOn(NamedTuple):
    """The tensor that a stage passes on to the next one, as a message between ranks."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    mesh_dims: tuple[str, ...]
    """The dimensions of the mesh that it is distributed over; empty for a plain tensor."""
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PassedOn:
        """Describe a tensor."""
        common = tuple(tensor.shape), tensor.stride(), tensor.dtype
        if not isinstance(tensor, DTensor):
            return cls(*common, common[0], (), ())
        local_shape = tuple(tensor.to_local().shape)
        dims = tuple(tensor.device_mesh.mesh_dim_names or ())
        return cls(*common, local_shape, dims, tensor.placements)

    def zeros(self, dims: ParallelDims, device: torch.device) -> torch.Tensor:
        """Make such a tensor on this rank."""
        local = torch.zeros(self.local_shape, dtype=self.dtype, device=device)
        if not self.mesh_dims:
            return local
        mesh = dims.get_mesh(list(self.mesh_dims))
        return DTensor.from_local(
            *(local, mesh, self.placements),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )


@dataclass(kw_only=True)
class Pipeline:
    """Forward and backward of a step's microbatches, on the stages that this rank has.

    The stages are captured once, on all ranks together, for microbatches of one shape. A stage may
    pass on one tensor, and all stages pass on tensors of one shape, dtype and placement.
    """

    stages: Sequence[StageBase]
    """Where torchtitan's split has put the modules of this rank."""
    dims: ParallelDims
    stage_group: dist.ProcessGroup
    """The ranks that have the same stages: see `make_stage_group`."""
    loss_fn: Callable[..., Any]
    """torchtitan's: see `loss_of_batch`."""
    schedule: str
    num_microbatches: int
    passes: PassConfig
    backend: str
    full_capture: bool | None
    backward: bool = True
    """Whether gradients are computed; False for validation."""
    on_gradients: Callable[[nn.Module, Gradients], None] | None = None
    """As of `PipelineStep`."""
    on_event: Callable[[str], None]
    """Called with a line before each part of the work that may take seconds."""
    on_report: Callable[[JointGraph, Report], None]
    """Called with the graph of a stage and the report of its passes."""
    check: Callable[[JointGraph], None] = lambda joint: None
    """Called with the graph of a stage after its passes, before any of its collectives runs."""
    _step: PipelineStep | None = field(default=None, init=False)

    def __call__(
        self, microbatches: Sequence[Microbatch], global_valid_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run forward and backward; return the sum of the losses, 0 on ranks without the last
        stage.

        Args:
            global_valid_tokens: what the loss is divided by; None for the sum over tokens.

        Raises:
            CaptureError: a stage cannot be captured, or was captured for other microbatches.
            VerificationError: ranks with the same stage have other graphs, or another rank failed.
        """
        if self._step is None:
            self.prepare(microbatches[0], global_valid_tokens)
        assert self._step is not None
        losses = self._step(
            [(inputs,) for inputs, _, _ in microbatches],
            [extra | of_loss(labels, global_valid_tokens) for _, labels, extra in microbatches],
        )
        return sum_in_order(losses, microbatches[0][1].device)

    def prepare(self, microbatch: Microbatch, global_valid_tokens: torch.Tensor | None) -> None:
        """Capture the stages for microbatches like this one, and compile them; errors as of a
        call."""
        if self._step is not None:
            return
        of_all_ranks = Agreement()
        with of_all_ranks.errors_sent("capture its stages"):
            received = self._passed_on(of_all_ranks, microbatch)
            pp = self.dims.get_mesh("pp")
            num_stages = self.stages[0].num_stages
            actions = actions_of(self.schedule, num_stages, pp.size(), self.num_microbatches)
            if not of_all_ranks.same(actions):
                raise VerificationError(
                    f"ranks have different schedules: give all of them the same {self.schedule}"
                )
            splits = self.backward and splits_backward(actions)
            captured = []
            for stage in self.stages:
                in_flight = 1
                if self.backward:
                    in_flight = most_in_flight(actions[pp.get_local_rank()], stage.stage_index)
                passes = with_in_flight(self.passes, in_flight)
                captured.append(
                    self._captured(stage, passes, splits, received, microbatch, global_valid_tokens)
                )
            self._step = PipelineStep(
                captured, self.schedule, self.num_microbatches, self.on_gradients
            )
        of_all_ranks.gather(None, "capture its stages")

    def _passed_on(self, of_all_ranks: Agreement, microbatch: Microbatch) -> PassedOn:
        """Return what stages pass on, which the ranks with the first stage find out."""
        passed_on: PassedOn | None = None
        first = self.stages[0]
        if first.is_first:
            inputs, _, extra = microbatch
            # quickly, as the ranks of other stages wait for it: without backward
            forward = capture_stage(first.submod, (inputs,), extra, backward=False)
            passed_on = passed_on_by(forward)
        messages = of_all_ranks.gather((passed_on,))
        # by the ranks of the world, of which all are members
        first_rank = dist.get_process_group_ranks(self.dims.get_mesh("pp").get_group())[0]
        (passed_on,) = messages[first_rank]
        assert passed_on is not None, "the first rank of a pipeline has the first stage"
        return passed_on

    def _captured(
        self,
        stage: StageBase,
        passes: PassConfig,
        splits: bool,
        received: PassedOn,
        microbatch: Microbatch,
        global_valid_tokens: torch.Tensor | None,
    ) -> GraphStage:
        inputs, labels, extra = microbatch
        name = f"stage {stage.stage_index} of {stage.num_stages}"
        self.on_event(f"Capturing {name}")
        taken = inputs if stage.is_first else received.zeros(self.dims, inputs.device)
        kwargs: Mapping[str, Any] = extra
        if stage.is_last:
            kwargs = extra | of_loss(labels, global_valid_tokens)
        agreement = Agreement(self.stage_group)
        start = time.perf_counter()
        with agreement.errors_sent(f"capture {name}"):
            joint = capture_stage(
                *(stage.submod, (taken,), kwargs),
                loss_fn=loss_of_stage(self.loss_fn) if stage.is_last else None,
                backward=self.backward,
                full_capture=self.full_capture,
            )
            captured = time.perf_counter()
            if not stage.is_last:
                check_passed_on(stage.stage_index, joint, received)
            self.on_event(f"Running the passes of {name}")
            report = run_passes(joint, passes, agreement=agreement)
            report.rows[0] = replace(report.rows[0], seconds=captured - start)
            self.check(joint)
        passed = time.perf_counter()
        runnable = GraphStage(
            *(joint, stage.submod, self.backend),
            index=stage.stage_index,
            num_stages=stage.num_stages,
            group=stage.group,
            data_group=self.stage_group,
            splits_backward=splits,
            reduces_once=reduces_once(passes),
        )
        self.on_event(
            f"{name}: {report.last.nodes:,} nodes: captured in {captured - start:.1f} s, passes "
            f"{passed - captured:.1f} s, order check and backend '{self.backend}' "
            f"{time.perf_counter() - passed:.1f} s"
        )
        self.on_report(joint, report)
        return runnable


def passed_on_by(joint: JointGraph) -> PassedOn:
    """Return what a stage passes on.

    Raises:
        CaptureError: it passes on several tensors, or none.
    """
    outputs = output_tensors(joint)
    if len(outputs) != 1:
        raise CaptureError(
            f"a stage passes on {len(outputs)} tensors to the next, and a pipeline passes on one: "
            "set parallelism.pipeline_parallel_degree = 1"
        )
    return PassedOn.of(outputs[0])


def check_passed_on(index: int, joint: JointGraph, first: PassedOn) -> None:
    """Check that a stage passes on what the first one does.

    Raises:
        CaptureError: it passes on something else.
    """
    passed_on = passed_on_by(joint)
    if passed_on != first:
        raise CaptureError(
            f"stage {index} passes on {passed_on}, and the first one {first}: all stages must pass "
            "on the same. Split the model where its tensors are alike "
            "(parallelism.module_fqns_per_model_part)"
        )


def with_in_flight(passes: PassConfig, microbatches: int) -> PassConfig:
    """Return the passes of a stage that has so many microbatches in flight at most, and the sums of
    their gradients where it reduces these once."""

    def other_memory(joint: JointGraph) -> OtherMemory:
        other = passes.other_memory(joint)
        sums = unreduced_bytes(joint) if reduces_once(passes) and joint.signature.backward else 0
        return other._replace(
            earlier_microbatches=microbatches - 1,
            accumulated_bytes=other.accumulated_bytes + sums,
        )

    return replace(passes, other_memory=other_memory)


def make_stage_group(dims: ParallelDims) -> dist.ProcessGroup:
    """Make the group of the ranks that have the same stages as this one; all ranks call it."""
    pp = dims.get_mesh("pp")
    shape = (pp.size(), dist.get_world_size() // pp.size())
    mesh = init_device_mesh(pp.device_type, shape, mesh_dim_names=("pp", "stage"))
    # torchtitan's outermost dimension
    assert mesh["pp"].mesh.tolist() == pp.mesh.tolist()
    return mesh["stage"].get_group()


def loss_of_stage(loss_fn: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Make the function of the last stage that is captured from torchtitan's loss.

    Args:
        loss_fn: as of `loss_of_batch`.

    Returns:
        `f(module, received, labels=..., global_valid_tokens=..., **extra)` -> scalar loss; the
        number of tokens may be left out.
    """
    of_batch = loss_of_batch(loss_fn)

    def loss(
        module: nn.Module,
        received: torch.Tensor,
        *,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **extra: Any,
    ) -> torch.Tensor:
        tokens = [] if global_valid_tokens is None else [global_valid_tokens]
        return of_batch(module, received, labels, *tokens, **extra)

    return loss


def of_loss(
    labels: torch.Tensor, global_valid_tokens: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return what the loss of a microbatch takes beside the prediction."""
    tokens = {} if global_valid_tokens is None else {"global_valid_tokens": global_valid_tokens}
    return {"labels": labels} | tokens


class ValidationSchedule:
    """What torchtitan's validator calls in place of a schedule of torch's.

    Args:
        run: runs forward of microbatches; returns the sum of their losses, 0 on ranks without the
            last stage.
        group: the ranks of the pipeline.
    """

    def __init__(
        self, run: Callable[[list[Microbatch]], torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        self._run = run
        self._group = group

    def eval(
        self,
        *,
        arg_mbs: Sequence[tuple[torch.Tensor]],
        kwarg_mbs: Sequence[dict[str, Any]],
        target_mbs: Sequence[torch.Tensor],
        losses: list[torch.Tensor],
    ) -> None:
        """Run a batch, and append the sum of its losses on every rank of the pipeline.

        Args:
            arg_mbs, kwarg_mbs, target_mbs: inputs, other arguments of the model, and labels of
                each microbatch, on every rank.
        """
        microbatches = [
            (inputs, labels, extra)
            for (inputs,), extra, labels in zip(arg_mbs, kwarg_mbs, target_mbs, strict=True)
        ]
        total = self._run(microbatches)
        dist.all_reduce(total, group=self._group)
        losses.append(total)


def sum_in_order(losses: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Add the losses of microbatches one after the other, as without a pipeline; 0 if there are
    none."""
    total = torch.zeros((), device=device)
    for loss in losses:
        total = total + loss
    return total
