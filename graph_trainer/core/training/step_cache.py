"""A train step that captures one graph for each shape of batch, up to a bounded number."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graph_trainer.core.capture.capture import capture
from graph_trainer.core.capture.tracing.trace import LossFn
from graph_trainer.core.graph.call import Call
from graph_trainer.core.graph.call_signature import Batch, HoldsTensors, constant_key
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.module_settings import defaults_of
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.ordering.agreement import Agreement, OneRank, published_failure
from graph_trainer.core.ordering.exchange import check_order_across_ranks, check_same_collectives
from graph_trainer.core.partition.partitioned_step import partition
from graph_trainer.core.passes.pipeline import PassConfig, run_passes
from graph_trainer.core.passes.report import Report
from graph_trainer.core.runtime.step import Gradients, Step, compile
from graph_trainer.core.torch_private import PARAMETERS, pytree
from graph_trainer.errors import CollectiveError, VerificationError


class _Partitioned:
    """Calls a partitioned step and its backward, where a `Step` is called."""

    def __init__(self, joint: JointGraph, step: Callable[..., torch.Tensor]) -> None:
        self.joint = joint
        self._step = step

    def run(self, call: Call) -> tuple[torch.Tensor, Gradients]:
        args, kwargs = pytree.tree_unflatten(call.leaves, call.tree)
        loss = self._step(*args, **kwargs)
        loss.backward()
        return loss.detach(), {}


_CompiledStep = Step | _Partitioned


@dataclass(slots=True)
class TrainStep:
    """`loss, gradients = step(model, *args, **kwargs)`, captured at the first call.

    The step captures again for another shape, dtype or constant in the batch, and for another
    model, set of trainable parameters, training mode, hooks or autocast (together: the program).
    Beyond `max_graphs`, the least recently used graph is dropped.

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
    """How many captured graphs are kept."""
    on_event: Callable[[str], None] = lambda line: None
    """Called with a line before the first capture and after every capture."""
    on_phase: Callable[[str], None] = lambda phase: None
    """Called with what the step does next whenever it captures, and with "" when that is done."""
    on_report: Callable[[JointGraph, Report], None] = lambda joint, report: None
    """Called with every new graph and its report; the first row has the seconds of the capture."""
    check: Callable[[JointGraph], None] = lambda joint: None
    """Called with the first graph after its passes, before any of its collectives runs; an error
    that it raises on one rank is raised on all."""
    _steps: OrderedDict[object, _CompiledStep] = field(default_factory=OrderedDict, init=False)
    _firsts: OrderedDict[object, JointGraph] = field(default_factory=OrderedDict, init=False)
    """By program, its first graph."""

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
        call = Call(model, args, kwargs)
        step = self._step_for(call, args, kwargs)
        try:
            return step.run(call)
        except CollectiveError as error:
            failure = published_failure()
            if failure:
                raise VerificationError(failure) from error
            raise

    def prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Capture the step for a batch like this one without running it; errors as of a call."""
        self._step_for(Call(model, args, kwargs), args, kwargs)

    def _step_for(self, call: Call, args: Any, kwargs: Any) -> _CompiledStep:
        """Return the step that fits a call, captured now if there is none."""
        program = _program_key(call)
        try:
            key = (program, _batch_key(call))
            step = self._steps.get(key)
        except (TypeError, RuntimeError, HoldsTensors):
            # these raise with the constant that cannot be compared, or the tensor that is not dense
            batch = Batch(args, kwargs)
            batch.inputs(batch.take(call))
            raise
        if step is None:
            step = self._prepared(program, call, args, kwargs)
        # kept, as the one used last; those used longest ago are dropped
        self._steps[key] = step
        self._firsts.setdefault(program, step.joint)
        self._steps.move_to_end(key)
        self._firsts.move_to_end(program)
        # every rank runs the same programs in the same order, so all ranks drop the same first one
        for kept in (self._steps, self._firsts):
            while len(kept) > self.max_graphs:
                kept.popitem(last=False)
        return step

    def joint_graphs(self) -> list[JointGraph]:
        """List the kept graphs, least recently used first."""
        return [step.joint for step in self._steps.values()]

    def _prepared(self, program: object, call: Call, args: Any, kwargs: Any) -> _CompiledStep:
        """Capture, run the passes, check the order and compile; on all ranks for a new program."""
        first, together = not self._firsts, program not in self._firsts
        phase = f"Capturing the {'train step' if self.backward else 'step without backward'}"
        if first:
            self.on_event(phase)
        self.on_phase(phase)
        agreement = Agreement() if together else OneRank(is_apart=True)
        start = time.perf_counter()
        with agreement.errors_sent():
            joint = capture(
                *(call.model, self.loss_fn, args, kwargs),
                backward=self.backward,
                full_capture=self.full_capture,
            )
            captured = time.perf_counter()
            self.on_phase("Running the passes")
            earlier = None if together else self._firsts[program]
            report = run_passes(joint, self.passes, first=earlier, agreement=agreement)
            passed = time.perf_counter()
            report.rows[0] = replace(report.rows[0], seconds=captured - start)
            if first:
                self.check(joint)
            if earlier is not None:
                check_same_collectives(earlier, joint)
        if together:
            check_order_across_ranks(joint, agreement)
        self.on_phase(f"Compiling for the backend '{self.backend}'")
        checked = time.perf_counter()
        with agreement.errors_sent("compile the step"):
            step: _CompiledStep
            if self.partitioned and self.backward:
                step = self._partitioned(joint, call.model, args, kwargs, together)
            else:
                step = compile(joint, self.backend, compare_ranks=False)
        compiled = time.perf_counter()
        agreement.gather(None, "compile the step")
        self.on_phase("")
        shapes = [tuple(v.shape) for v in call.leaves if isinstance(v, torch.Tensor)]
        what = "" if first else f"Captured again for batch {shapes}: "
        self.on_event(
            f"{what}{report.last.nodes:,} nodes: captured in {captured - start:.1f} s, passes "
            f"{passed - captured:.1f} s, order check {checked - passed:.1f} s, backend "
            f"'{self.backend}' {compiled - checked:.1f} s"
        )
        self.on_report(joint, report)
        return step

    def _partitioned(
        self, joint: JointGraph, model: nn.Module, args: Any, kwargs: Any, together: bool
    ) -> _Partitioned:
        if self.partition == "tags" and self.backend != "inductor":
            run = partition(joint, model, self.backend, compare_ranks=together)
            return _Partitioned(joint, run)
        # imports torch._dynamo, for seconds
        from graph_trainer.core.partition.export import ExportedStep

        step = partition(joint, model, compare_ranks=False)
        with ExportedStep(step, *args, **kwargs) as exported:
            exported.refresh()
            exported.remove_unused_waits()
            compiled = exported.compile(
                partition=self.partition, compiler=self.backend, compare_ranks=together
            )
        return _Partitioned(joint, compiled)


def _program_key(call: Call) -> object:
    """Make a key of everything that changes the graph and is not in the batch."""
    trainable = [
        p.requires_grad for m in call.modules for p in vars(m)[PARAMETERS].values() if p is not None
    ]
    devices = {v.device.type for v in call.leaves if isinstance(v, torch.Tensor)} | {"cpu"}
    # the model itself: another one of the same class may have other hyperparameters
    model = weakref.ref(call.model)
    return (model, tuple(trainable), tuple(call.training), call.hooks, defaults_of(devices))


def _batch_key(call: Call) -> object:
    """Make a key that is equal for two batches exactly when one graph serves both."""
    described = tuple(
        (unwrap(v)[1], v.requires_grad) if isinstance(v, torch.Tensor) else constant_key(v)
        for v in call.leaves
    )
    return (call.tree, call.tree_text, described)
