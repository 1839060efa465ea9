"""A partitioned step as a module: forward when it is called, backward when autograd runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.autograd.function import once_differentiable

from graph_trainer.core.capture.refusals.inputs import refuse_shared_memory
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import erase_unused
from graph_trainer.core.graph.signature import InputKind, OutputKind, with_parts
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.graph.subclasses import unwrap, with_stride, wrap
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.partition.cut import cut
from graph_trainer.core.runtime.backends.backend import BoxedFunction
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.runtime.guard import Guard
from graph_trainer.core.runtime.step import output_tensor, run_compiled
from graph_trainer.core.torch_private import MODULES, clear_saved_tensors, tensor_hooks
from graph_trainer.errors import CaptureError


class PartitionedStep(nn.Module):
    """A step as two graphs: `loss = step(*args, **kwargs)`, then `loss.backward()`.

    Backward adds to `.grad` of the model's parameters as autograd does: DTensors for parameters
    that are DTensors, scaled by the gradient of the loss. Between the two calls only the saved
    values of the forward graph are kept. Backward frees them as it runs, and a second backward
    without `retain_graph` raises autograd's error. Under `torch.no_grad()` nothing is saved, and
    only the loss is computed.

    `partition` makes it from a joint graph and a model, its attributes `joint` and `model`; the two
    graphs are in `halves`.
    """

    def __init__(
        self, joint: JointGraph, model: nn.Module, backend: str, *, compare_ranks: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.joint = joint
        self.halves = cut(joint)
        self._compile: Callable[[JointGraph], BoxedFunction] = find_backend(backend).compile
        self._run_forward = self._compile(self.halves.forward)
        self._run_backward = self._compile(self.halves.backward)
        self._run_loss: BoxedFunction | None = None
        self._compare_ranks = compare_ranks
        self._guard = Guard(self.halves.forward, under_autograd=True)
        names = [spec.name for spec in self.halves.forward.signature.outputs]
        inputs = self.halves.backward.signature.inputs
        gradients = [i.name for i in inputs if i.kind is InputKind.OUTPUT_GRADIENT]
        self._differentiable = [names.index(name) for name in gradients]
        self._num_saved = len(self.halves.saved())
        self._gradients = [spec.name for spec in self.halves.backward.signature.outputs]
        self._places = self._guard.model.places(model)
        self._batch = _plain_batch(joint)

        # This function takes the tensors of a call. torch.compile puts it into its graph as one
        # node, and AOTAutograd traces through it and keeps the metadata of the two graphs' nodes.
        inputs_of_forward = [spec.name for spec in self.halves.forward.signature.inputs]
        trained = [inputs_of_forward.index(name) for name in self._gradients]

        def interpreted(half: JointGraph) -> BoxedFunction:
            return lambda values: fx.Interpreter(half.graph_module).run(*values)

        def partitioned_step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = [part.detach() for tensor in tensors for part in unwrap(tensor)[0]]
            run_forward = interpreted(self.halves.forward)
            run_backward = interpreted(self.halves.backward)
            parameters = [tensors[place] for place in trained]
            return _Function.apply(self, run_forward, run_backward, values, *parameters)

        partitioned_step.partitioned_step = self  # type: ignore[attr-defined]
        torch.compiler.allow_in_graph(partitioned_step)
        self.call_on_tensors = partitioned_step

        def check_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
            self._check_ranks()
            tensors = self._guard.tensors(self.model, args, kwargs)
            self._guard.values(tensors)
            self._trained(tensors)
            return tensors

        # Not as a decorator: importing this package would then import torch._dynamo, which makes
        # TORCHINDUCTOR_CACHE_DIR before the command line can refuse it.
        self.checked_tensors = torch.compiler.disable(
            check_tensors,
            reason="fullgraph=True needs a batch of plain tensors with the shapes of the capture, "
            "without nested arguments, constants or DTensors",
        )
        """Checks a call and returns its tensors; torch.compile does not trace it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward graph on a batch.

        Returns:
            The loss; for a graph of `capture_forward`, what the model returns.

        Raises:
            CaptureError: the model's tensors, modes or hooks, or the batch, differ from those of
                the capture.
            VerificationError: the ranks' graphs issue different collectives (first call only).
            CollectiveError: a collective timed out or lost its connection, in forward or in
                backward (gloo; see `collective_failure`).
        """
        if torch.compiler.is_compiling():
            tensors = self._tensors_in_graph(args, kwargs)
            if tensors is None:
                tensors = self.checked_tensors(args, kwargs)
            return self.returned(self.call_on_tensors(*tensors))
        return self.run(self._guard.tensors(self.model, args, kwargs))

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the forward graph on the tensors of a call that has been compared; see `forward`."""
        self._check_ranks()
        values = self._guard.values(tensors)
        if torch.is_grad_enabled() and self._gradients:
            parameters = self._trained(tensors)
            outputs = _Function.apply(
                self, self._run_forward, self._run_backward, values, *parameters
            )
            return self.returned(outputs)
        if self._run_loss is None:
            self._run_loss = self._compile(self._loss_graph())
        results = run_compiled(self._run_loss, self.halves.forward, values)
        return self.returned(self._outputs(results))

    def _loss_graph(self) -> JointGraph:
        """Return the forward graph without saved values."""
        graph = copy_graph(self.halves.forward)
        specs = [s for s in graph.signature.outputs if s.kind is not OutputKind.SAVED]
        count = sum(spec.layout.num_tensors for spec in specs)
        graph.output_node().args = (graph.output_values()[:count],)
        erase_unused(graph.graph)
        return graph

    def _trained(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that get a gradient, in the order of the gradients.

        Args:
            tensors: the tensors of the first inputs of the forward graph, with all parameters.
        """
        inputs = zip(self.halves.forward.signature.inputs, tensors, strict=False)
        by_name = {spec.name: tensor for spec, tensor in inputs}
        for name in self._gradients:
            if any(tensor_hooks(by_name[name])):
                raise CaptureError(
                    f"parameter '{name}' has a gradient hook, which the graph runs and autograd "
                    "would run again: call the step of gt.compile, or remove the hook and capture "
                    "again"
                )
        return [by_name[name] for name in self._gradients]

    def _check_ranks(self) -> None:
        if self._compare_ranks:
            check_order_across_ranks(self.halves.forward)
            check_order_across_ranks(self.halves.backward)
            self._compare_ranks = False

    def _tensors_in_graph(self, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
        """Return the tensors of a call, read so that torch.compile can trace it.

        None for a batch that can only be checked outside of the graph. `gt.backend` checks the
        model at each run.
        """
        expected = self._batch
        if expected is None:
            return None
        if len(args) != expected.num_args or sorted(kwargs) != expected.names:
            return None
        batch = [*args, *(kwargs[name] for name in expected.names)]
        for value, layout in zip(batch, expected.layouts, strict=True):
            if type(value) is not torch.Tensor or value.requires_grad:
                return None
            if (tuple(value.shape), tuple(value.stride()), value.dtype, value.device) != layout:
                return None
        state = []
        for path, kind, last in self._places:
            module = self.model
            for name in path:
                module = getattr(module, MODULES)[name]
            state.append(getattr(module, kind)[last])
        return [*state, *batch]

    def check_model(self, batch: Sequence[torch.Tensor | None]) -> None:
        """Refuse a model whose tensors, modes or hooks differ from the captured ones, ranks that
        issue other collectives, and a batch in memory that the step writes.

        Args:
            batch: for each tensor of the batch, one that shares its memory; None for new memory.
        """
        self._check_ranks()
        state = self._guard.model.tensors(self.model)
        values = [part for tensor in state for part in unwrap(tensor)[0]]
        specs = self.halves.forward.signature.inputs
        for spec, tensor in zip(specs[len(specs) - len(batch) :], batch, strict=True):
            part = torch.empty(0) if tensor is None else unwrap(tensor)[0][0]
            values += [part] * spec.layout.num_tensors
        refuse_shared_memory(specs, values)
        self._trained(state)

    def _outputs(self, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outputs = with_parts(self.halves.forward.signature.outputs, results)
        return tuple(
            wrap(parts, spec.layout) for spec, parts in outputs if spec.kind is not OutputKind.SAVED
        )

    def returned(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Return the loss, or what the model returns."""
        return outputs[0] if self.joint.outputs is None else self.joint.outputs.rebuild(outputs)


class _Function(torch.autograd.Function):
    """Runs the two graphs of a `PartitionedStep`."""

    @staticmethod
    def forward(
        ctx: Any,
        step: PartitionedStep,
        run_forward: BoxedFunction,
        run_backward: BoxedFunction,
        values: list[torch.Tensor],
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        inputs_read = [values[place] for place in step.halves.inputs_read]
        results = run_compiled(run_forward, step.halves.forward, values)
        outputs = step._outputs(results)
        num_outputs = len(results) - step._num_saved
        ctx.step = step
        ctx.run_backward = run_backward
        # with this method, autograd refuses a backward after a write into one of them
        ctx.save_for_backward(*inputs_read, *results[num_outputs:])
        others = [o for place, o in enumerate(outputs) if place not in step._differentiable]
        ctx.mark_non_differentiable(*others)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        step: PartitionedStep = ctx.step
        specs = step.halves.forward.signature.outputs
        values = list(ctx.saved_tensors)
        for place in step._differentiable:
            spec = specs[place]
            gradient = with_stride(gradients[place], spec.layout.stride)
            if not spec.layout.matches(gradient):
                raise CaptureError(
                    f"the gradient of '{spec.name}' is {unwrap(gradient)[1].describe()}; backward "
                    f"was captured for {spec.layout.describe()}: return another tensor of the "
                    "model, or redistribute what it returns"
                )
            values += unwrap(gradient)[0]
        clear_saved_tensors(ctx)  # the graph frees each tensor after its last reader
        results = run_compiled(ctx.run_backward, step.halves.backward, values)
        outputs = with_parts(step.halves.backward.signature.outputs, results)
        gradients_of_parameters = [output_tensor(spec, parts) for spec, parts in outputs]
        # None for the step, the two functions and the values
        return None, None, None, None, *gradients_of_parameters


class _PlainBatch(NamedTuple):
    """The arguments of a call, all of them plain tensors."""

    num_args: int
    names: list[str]
    """Of keyword arguments, sorted."""
    layouts: list[tuple[Any, ...]]
    """Shape, strides, dtype and device of each argument."""


def _plain_batch(joint: JointGraph) -> _PlainBatch | None:
    """Describe the captured batch, None if one of its arguments is not a plain tensor."""
    specs = [spec for spec in joint.signature.inputs if spec.kind is InputKind.BATCH]
    args, kwargs = joint.captured_call.batch.rebuild(specs)
    if len(args) + len(kwargs) != len(specs) or any(s.layout.subclass for s in specs):
        return None
    names = sorted(kwargs)
    arguments = [*args, *(kwargs[name] for name in names)]
    if [id(argument) for argument in arguments] != [id(spec) for spec in specs]:
        return None  # an argument is a constant, or has several tensors
    layouts = [
        (tuple(spec.layout.shape), spec.layout.stride, spec.layout.dtype, spec.layout.device)
        for spec in specs
    ]
    return _PlainBatch(len(args), names, layouts)


def partition(
    joint: JointGraph,
    model: nn.Module | None = None,
    backend: str = "eager",
    *,
    compare_ranks: bool = True,
) -> PartitionedStep:
    """Partition a joint graph into a forward and a backward graph, as a module.

    The values of forward that backward reads in the joint graph are saved. Tags of activations and
    parameters, and `rematerialize`, have decided which these are: no partitioner decides again.

    Args:
        joint: as captured, or after `run_passes`; not changed.
        model: the model with the parameters and buffers to use; None for the captured one.
        backend: the name of one of `backends.registry`, which compiles both graphs.
        compare_ranks: whether the first call compares the collectives of all ranks of the default
            process group, as `gt.compile` does.

    Returns:
        The step as a module: `loss = step(*args, **kwargs); loss.backward()`.

    Raises:
        PassError: the graph was captured without backward, or cannot be cut.
        CaptureError: the captured model does not exist any more, and `model` is None.
        ConfigError: an unknown backend.

    Example::

        step = gt.partition(joint)
        (step(tokens, labels) * scale).backward()
    """
    joint.validate()
    if model is None:
        model = joint.model() if joint.model is not None else None
    if model is None:
        raise CaptureError(
            "the captured model does not exist any more: call gt.partition(joint, model)"
        )
    return PartitionedStep(joint, model, backend, compare_ranks=compare_ranks)
