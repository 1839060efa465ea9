"""A partitioned step as a module: forward when it is called, backward when autograd runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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

    Backward adds to `.grad` of the model's parameters as autograd does: DTensors where the
    parameter is one, and scaled as the gradient of the loss is. Between the two calls only what
    the forward graph saves is kept. It is freed as backward goes, and a second backward without
    `retain_graph` is autograd's error. Under `torch.no_grad()` nothing is saved, and the loss
    alone is computed.

    `partition` makes it of a joint graph and a model, which it has as `joint` and `model`, beside
    the two graphs in `halves`.
    """

    def __init__(
        self, joint: JointGraph, model: nn.Module, backend: str, compare_ranks: bool
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
        # node, and AOTAutograd traces through it, keeping the metadata of the two graphs' nodes.
        inputs_of_forward = [spec.name for spec in self.halves.forward.signature.inputs]
        trained = [inputs_of_forward.index(name) for name in self._gradients]

        def interpreted(half: JointGraph) -> BoxedFunction:
            return lambda values: fx.Interpreter(half.graph_module).run(*values)

        def partitioned_step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = [part.detach() for tensor in tensors for part in unwrap(tensor)[0]]
            run = (interpreted(self.halves.forward), interpreted(self.halves.backward))
            return _Function.apply(self, run, values, *(tensors[place] for place in trained))

        partitioned_step.partitioned_step = self  # type: ignore[attr-defined]
        torch.compiler.allow_in_graph(partitioned_step)
        self.call_on_tensors = partitioned_step

        def check_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
            self._check_ranks()
            tensors = self._guard.tensors(self.model, args, kwargs)
            self._guard.values(tensors)
            self._trained(tensors)
            return tensors

        # Not as a decorator: that would import torch._dynamo along with this package, which makes
        # TORCHINDUCTOR_CACHE_DIR before the command line can refuse it.
        self.checked_tensors = torch.compiler.disable(
            check_tensors,
            reason="fullgraph=True needs a batch of plain tensors with the shapes of the capture, "
            "no nests, constants or DTensors",
        )
        """Returns the tensors of a call, checked; torch.compile does not look inside."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward graph on a batch.

        Returns:
            the loss; what the model returns for a graph of `capture_forward`.

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
        self._check_ranks()
        tensors = self._guard.tensors(self.model, args, kwargs)
        values = self._guard.values(tensors)
        if torch.is_grad_enabled() and self._gradients:
            run = (self._run_forward, self._run_backward)
            return self.returned(_Function.apply(self, run, values, *self._trained(tensors)))
        if self._run_loss is None:
            alone = copy_graph(self.halves.forward)
            specs = [s for s in alone.signature.outputs if s.kind is not OutputKind.SAVED]
            count = sum(spec.layout.num_tensors for spec in specs)
            alone.output_node().args = (alone.output_values()[:count],)
            erase_unused(alone.graph)
            self._run_loss = self._compile(alone)
        return self.returned(
            self._outputs(run_compiled(self._run_loss, self.halves.forward, values))
        )

    def _trained(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that get a gradient, in the order of the gradients, from the
        tensors of the first inputs."""
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
        """Return the tensors of a call as torch.compile can read them in its graph.

        None for a batch that can only be checked outside of the graph. `gt.backend` has the model
        checked at each run.
        """
        if self._batch is None or len(args) != self._batch[0] or sorted(kwargs) != self._batch[1]:
            return None
        batch = [*args, *(kwargs[name] for name in self._batch[1])]
        for value, layout in zip(batch, self._batch[2], strict=True):
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
        """Refuse a model whose tensors, modes or hooks are not those of the capture, ranks that
        issue other collectives, and a batch in memory that the step writes.

        Args:
            batch: one tensor in the memory of each tensor of the batch; None for new memory.
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
        pairs = with_parts(self.halves.forward.signature.outputs, results)
        return tuple(wrap(p, spec.layout) for spec, p in pairs if spec.kind is not OutputKind.SAVED)

    def returned(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Return the loss, or what the model returns."""
        return outputs[0] if self.joint.outputs is None else self.joint.outputs.rebuild(outputs)


class _Function(torch.autograd.Function):
    """Runs the two graphs of a `PartitionedStep`."""

    @staticmethod
    def forward(
        ctx: Any,
        step: PartitionedStep,
        run: tuple[BoxedFunction, BoxedFunction],
        values: list[torch.Tensor],
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        given = [values[place] for place in step.halves.inputs_read]
        results = run_compiled(run[0], step.halves.forward, values)
        outputs = step._outputs(results)
        count = len(results) - step._num_saved
        ctx.step, ctx.run = step, run[1]
        # saved so, autograd refuses a backward after a write into one of them
        ctx.save_for_backward(*given, *results[count:])
        kept = set(step._differentiable)
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in kept))
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
        clear_saved_tensors(ctx)  # the graph frees each after its last reader
        results = run_compiled(ctx.run, step.halves.backward, values)
        outputs = with_parts(step.halves.backward.signature.outputs, results)
        return None, None, None, *(output_tensor(spec, parts) for spec, parts in outputs)


def _plain_batch(joint: JointGraph) -> tuple[int, list[str], list[tuple[Any, ...]]] | None:
    """Return number, names and layouts of the arguments of a call, None if one is not a tensor."""
    specs = [spec for spec in joint.signature.inputs if spec.kind is InputKind.BATCH]
    args, kwargs = joint.captured_call.batch.rebuild(specs)
    if len(args) + len(kwargs) != len(specs) or any(s.layout.subclass for s in specs):
        return None
    ordered = [*args, *(kwargs[name] for name in sorted(kwargs))]
    if [id(spec) for spec in ordered] != [id(spec) for spec in specs]:
        return None  # one is a nest of tensors, or a constant
    layouts = [(tuple(n.shape), n.stride, n.dtype, n.device) for n in (s.layout for s in specs)]
    return len(args), sorted(kwargs), layouts


def partition(
    joint: JointGraph,
    model: nn.Module | None = None,
    backend: str = "eager",
    *,
    compare_ranks: bool = True,
) -> PartitionedStep:
    """Partition a joint graph into a forward and a backward graph, as a module.

    What backward reads of forward in the joint graph is what is saved, so the tags of activations
    and parameters and `rematerialize` have decided it: no partitioner decides again.

    Args:
        joint: as captured, or after `run_passes`; stays as it was.
        model: whose parameters and buffers are used; None for the captured one.
        backend: the name of one of `backends.registry`, which compiles both graphs.
        compare_ranks: whether the first call compares the collectives of all ranks of the default
            process group, as `gt.compile` does.

    Returns:
        the step as a module: `loss = step(*args, **kwargs); loss.backward()`.

    Raises:
        PassError: the graph was captured without backward, or cannot be cut.
        CaptureError: the captured model is gone, and no other was given.
        ConfigError: an unknown backend.

    Example::

        step = gt.partition(joint)
        (step(tokens, labels) * scale).backward()
    """
    joint.validate()
    if model is None:
        model = joint.model() if joint.model is not None else None
    if model is None:
        raise CaptureError("the captured model does not exist any more: gt.partition(joint, model)")
    return PartitionedStep(joint, model, backend, compare_ranks)
