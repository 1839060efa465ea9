"""A train step that captures one graph for each shape of batch, up to a bounded number."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graph_trainer.core.capture.capture import capture
from graph_trainer.core.capture.tracing.trace import LossFn
from graph_trainer.core.graph.captured_call import flatten
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.ordering.agreement import (
    Agreement,
    OneRank,
    publish_failure,
    published_failure,
    withdraw_failure,
)
from graph_trainer.core.ordering.exchange import check_order_across_ranks, check_same_collectives
from graph_trainer.core.partition.partitioned_step import PartitionedStep, partition
from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.core.passes.pipeline import run_passes
from graph_trainer.core.passes.report import Report
from graph_trainer.core.runtime.guard import Guard, OtherCall
from graph_trainer.core.runtime.step import Gradients, Step, compile
from graph_trainer.errors import CollectiveError, VerificationError


class _Partitioned:
    """A partitioned step and its backward.

    Args:
        step: the partitioned step, which runs on the tensors of a call.
        compiled: what torch.compile made of it, which takes the call itself and compares it again
            inside its graph; None without.
    """

    def __init__(
        self,
        joint: JointGraph,
        step: PartitionedStep,
        compiled: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.joint = joint
        self._step = step
        self._compiled = compiled

    def run(
        self, tensors: list[torch.Tensor], args: Any, kwargs: Any
    ) -> tuple[torch.Tensor, Gradients]:
        if self._compiled is None:
            loss = self._step.run(tensors)
        else:
            loss = self._compiled(*args, **kwargs)
        loss.backward()
        return loss.detach(), {}


@dataclass(slots=True, eq=False)
class _Program:
    """A model as its first graph was captured with it: what is not in the batch."""

    model: weakref.ref[nn.Module]
    first: JointGraph
    guard: Guard

    def tensors(self, model: nn.Module) -> list[torch.Tensor]:
        # another model of the same class may have other hyperparameters
        if self.model() is not model:
            raise OtherCall("it is another model")
        return self.guard.model.tensors(model)


@dataclass(slots=True, eq=False)
class _Kept:
    """A compiled step, and the program that it is of."""

    program: _Program
    step: Step | _Partitioned
    guard: Guard


@dataclass(slots=True)
class TrainStep:
    """`loss, gradients = step(model, *args, **kwargs)`, captured at the first call.

    The step captures again for another shape, dtype or constant in the batch, and for another
    model, or what `runtime.guard` compares of it (together: the program). Beyond `max_graphs`, the
    least recently used graph is dropped.

    A change of program must happen on every rank in the same step: its first graph is checked
    against those of the other ranks. Batches may differ from rank to rank, so a rank with a new
    batch captures without the other ranks: its graph must issue the collectives of the program's
    first graph. If that rank has no graph, it publishes its error before it fails; the
    collectives of the other ranks then fail, and they raise the published error.
    """

    loss_fn: LossFn
    """`loss_fn(model, *args, **kwargs)` -> scalar loss."""
    _: KW_ONLY
    backward: bool = True
    """Whether the step computes gradients; see `capture`."""
    partitioned: bool = False
    """Whether forward and backward run as two graphs: see `partition`. Gradients are then added to
    `.grad` by autograd, and none are returned."""
    partition: str = "tags"
    """How forward and backward are parted: see `ExportedStep.compile`."""
    passes: PassConfig = PassConfig()
    """Which passes run, and how."""
    backend: str = "eager"
    """The name of one of `backends.registry`."""
    full_capture: bool | None = None
    """Whether all layers are traced, and not only some of those that are alike: see `capture`."""
    max_graphs: int = 8
    """How many captured graphs are kept, at least 1."""
    on_event: Callable[[str], None] = lambda line: None
    """Called with a line before each part of the work on a new graph that may take seconds, and
    with a summary after it."""
    on_report: Callable[[JointGraph, Report], None] = lambda joint, report: None
    """Called with every new graph and its report; the first row has the seconds of the capture."""
    check: Callable[[JointGraph], None] = lambda joint: None
    """Called with the first graph after its passes, before any of its collectives runs; an error
    that it raises on one rank is raised on all."""
    _steps: list[_Kept] = field(default_factory=list, init=False)
    """The one used last is the last one."""
    _programs: list[_Program] = field(default_factory=list, init=False)
    """As `_steps`."""

    def __call__(
        self, model: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Gradients]:
        """Run the step on a batch, capturing it first if no graph fits.

        Raises:
            CaptureError: the step cannot be captured.
            VerificationError: the ranks' graphs differ, or another rank has no graph.
            CollectiveError: a collective timed out or lost its connection (gloo; see
                `collective_failure`).
        """
        kept, tensors = self._step_for(model, args, kwargs)
        try:
            if isinstance(kept.step, _Partitioned):
                return kept.step.run(tensors, args, kwargs)
            return kept.step.run(kept.guard.values(tensors))
        except CollectiveError as error:
            failure = published_failure()
            if failure:
                raise VerificationError(failure) from error
            raise

    def prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Capture the step for a batch like this one without running it; errors as of a call."""
        self._step_for(model, args, kwargs)

    def _step_for(
        self, model: nn.Module, args: Any, kwargs: Any
    ) -> tuple[_Kept, list[torch.Tensor]]:
        """Return the step that fits a call, captured now if there is none, and its tensors."""
        leaves, tree = flatten(args, kwargs)
        program, of_model, difference = self._program_of(model)
        for kept in reversed(self._steps):
            if kept.program is program:
                try:
                    tensors = [*of_model, *kept.guard.batch.tensors(leaves, tree)]
                except OtherCall:
                    continue
                self._use(kept)
                return kept, tensors
        step = self._prepared(program, difference, model, args, kwargs)
        guard = Guard(step.joint)
        tensors = guard.tensors(model, args, kwargs)
        kept = _Kept(program or _Program(weakref.ref(model), step.joint, guard), step, guard)
        self._use(kept)
        return kept, tensors

    def _program_of(self, model: nn.Module) -> tuple[_Program | None, list[torch.Tensor], str]:
        """Return the program that a model is of, with the model's tensors; or None, with how the
        model differs from the one used last."""
        difference = ""
        for program in reversed(self._programs):
            try:
                return program, program.tensors(model), ""
            except OtherCall as error:
                difference = difference or error.difference
        return None, [], difference

    def _use(self, kept: _Kept) -> None:
        """Keep a step as the one used last, and drop those used longest ago."""
        # every rank runs the same programs in the same order, so all ranks drop the same first one
        self._steps = [*(step for step in self._steps if step is not kept), kept]
        others = (program for program in self._programs if program is not kept.program)
        self._programs = [*others, kept.program]
        del self._steps[: -self.max_graphs], self._programs[: -self.max_graphs]

    def joint_graphs(self) -> list[JointGraph]:
        """List the kept graphs, least recently used first."""
        return [kept.step.joint for kept in self._steps]

    def _prepared(
        self, program: _Program | None, difference: str, model: nn.Module, args: Any, kwargs: Any
    ) -> Step | _Partitioned:
        """Capture, run the passes, check the order and compile; on all ranks for a new program,
        with its `difference` from the one used last."""
        first, together = not self._programs, program is None
        what = "train step" if self.backward else "step without backward"
        because = f", because {difference}" if together and not first else ""
        if because:
            self.on_event(f"Capturing the {what} again on all ranks{because}")
            # ranks that see no difference raise this when their collectives time out
            publish_failure(f"waits for the others to capture the {what} again{because}")
        else:
            self.on_event(f"Capturing the {what}")
        agreement = Agreement() if together else OneRank(is_apart=True)
        start = time.perf_counter()
        with agreement.errors_sent():
            joint = capture(
                *(model, self.loss_fn, args, kwargs),
                backward=self.backward,
                full_capture=self.full_capture,
            )
            captured = time.perf_counter()
            self.on_event("Running the passes")
            earlier = None if program is None else program.first
            report = run_passes(joint, self.passes, first=earlier, agreement=agreement)
            passed = time.perf_counter()
            report.rows[0] = replace(report.rows[0], seconds=captured - start)
            if first:
                self.check(joint)
            if earlier is not None:
                check_same_collectives(earlier, joint)
        if together:
            check_order_across_ranks(joint, agreement)
        self.on_event(f"Compiling for the backend '{self.backend}'")
        checked = time.perf_counter()
        with agreement.errors_sent("compile the step"):
            step: Step | _Partitioned
            if self.partitioned and self.backward:
                step = self._partitioned(joint, model, args, kwargs, together)
            else:
                step = compile(joint, self.backend, compare_ranks=False)
        compiled = time.perf_counter()
        agreement.gather(None, "compile the step")
        if because:
            withdraw_failure()
        leaves, _ = flatten(args, kwargs)
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        summary = "" if first else f"Captured again for batch {shapes}{because}: "
        self.on_event(
            f"{summary}{report.last.nodes:,} nodes: captured in {captured - start:.1f} s, passes "
            f"{passed - captured:.1f} s, order check {checked - passed:.1f} s, backend "
            f"'{self.backend}' {compiled - checked:.1f} s"
        )
        self.on_report(joint, report)
        return step

    def _partitioned(
        self, joint: JointGraph, model: nn.Module, args: Any, kwargs: Any, together: bool
    ) -> _Partitioned:
        if self.partition == "tags" and self.backend != "inductor":
            step = partition(joint, model, self.backend, compare_ranks=together)
            return _Partitioned(joint, step)
        # imports torch._dynamo, for seconds
        from graph_trainer.core.partition.exported_step import ExportedStep

        step = partition(joint, model, compare_ranks=False)
        with ExportedStep(step, *args, **kwargs) as exported:
            exported.refresh()
            exported.remove_unused_waits()
            compiled = exported.compile(
                partition=self.partition, compiler=self.backend, compare_ranks=together
            )
        return _Partitioned(joint, step, compiled)
