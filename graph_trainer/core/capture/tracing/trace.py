"""One trace of a step on fake tensors: forward, loss and backward become one flat FX graph."""

from __future__ import annotations

import contextlib
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate

from graph_trainer.core.capture.refusals.second_step import place_of
from graph_trainer.core.capture.refusals.side_effects import (
    Assignments,
    SideEffects,
    is_library_file,
    refuse_sparse,
    refuse_uninitialised,
)
from graph_trainer.core.capture.tracing.model_state import ModelState
from graph_trainer.core.capture.tracing.module_scopes import Scopes
from graph_trainer.core.capture.tracing.output_aliasing import TakenMemory
from graph_trainer.core.capture.tracing.repeated_reads import RepeatedReads
from graph_trainer.core.capture.tracing.rng_replay import RandomDraws, share_repeated_draws
from graph_trainer.core.capture.tracing.views import let_views_copy, views_out_of_place
from graph_trainer.core.graph.annotations import Phase, annotation, copy_annotations, value_of
from graph_trainer.core.graph.captured_call import CapturedBatch
from graph_trainer.core.graph.ops import storage_roots
from graph_trainer.core.graph.returned import Returned
from graph_trainer.core.graph.signature import Input, InputKind, Output, OutputKind, with_parts
from graph_trainer.core.graph.subclasses import unwrap, wrap
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.torch_private import (
    FakeTensorMode,
    local_slices,
    mark_as_parameter,
    selective_checkpoint_as_in_eager,
    storage_id,
    strided_shards_outside_traces,
    swap_tensors,
    tensor_hooks,
    without_torch_functions,
)
from graph_trainer.errors import CaptureError, GraphTrainerError

LossFn = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """The step to capture; see `capture`."""

    model: nn.Module
    loss_fn: LossFn
    args: Sequence[Any]
    kwargs: dict[str, Any]
    backward: bool
    meta_as: torch.device | str
    returned: Returned
    """Takes what the function returns."""
    is_stage: bool = False
    """Whether `args` were received from another stage of a pipeline: gradients of those that are
    floating point are returned too."""


class StandIn(NamedTuple):
    """A tensor of the trace in place of a parameter or buffer of the model."""

    spec: Input
    tensor: torch.Tensor
    real: torch.Tensor
    """The model's tensor."""


@dataclass(slots=True)
class StepTrace:
    """One trace of a step: the function that make_fx runs, and its outputs."""

    step: Step
    inputs: list[Input]
    state: ModelState
    left_out: list[StandIn]
    """For the tensors of layers that are left out. They are not inputs of the graph, and the step
    must not use them."""
    batch: CapturedBatch
    scopes: Scopes = field(default_factory=Scopes)
    outputs: list[Output] = field(default_factory=list)
    without_grad: list[str] = field(default_factory=list)
    results: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """The fake tensors that the step's ops returned."""

    def graph_of(self, fakes: list[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
        """Return the flat graph of the step on fake inputs, one for each plain tensor.

        Raises:
            CaptureError: something in the step cannot be traced.
        """
        try:
            with (
                torch.inference_mode(mode=False),
                torch.set_grad_enabled(self.step.backward),
                # on this thread, so that backward sees context variables and annotations
                torch.autograd.set_multithreading_enabled(mode=False),
                selective_checkpoint_as_in_eager(),
                without_fused_layers(),
                strided_shards_outside_traces(),
                local_slices(lambda group: annotate(annotation(local_slice=group))),
                mode,
                self.scopes.trace(self.step.model),
                Assignments(),
                # torch logs a traceback of each error, which is explained below
                patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", new=True),
            ):
                # fx counts the arguments of a method's code, and self would be one of them
                traced = make_fx(lambda flat: self.run(flat), _allow_non_fake_inputs=True)
                graph_module = traced(fakes)
        except GraphTrainerError:
            raise
        except Exception as error:
            module = self.scopes.failed_module()
            where = f"module '{module}'" if module else "the forward of the model itself"
            raise CaptureError(
                f"{type(self.step.model).__name__} cannot be captured: in {where}"
                f"{_line_of(error)}: {_explained(error)}"
            ) from error
        # make_fx records that the traced function took a list: inputs and outputs become flat
        graph_module.graph.set_codegen(fx.graph.CodeGen())
        output = graph_module.graph.output_node()
        output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
        for node in graph_module.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                node.meta.pop("custom", None)
        _add_messages_to_assertions(graph_module)
        _clone_constants_returned(graph_module.graph)
        views_out_of_place(graph_module.graph)
        share_repeated_draws(graph_module.graph)
        refuse_uninitialised(graph_module.graph)
        refuse_sparse(graph_module.graph)
        let_views_copy(graph_module.graph)
        return graph_module

    def run(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the step as autograd would, and return its outputs as plain tensors."""
        tensors = [
            wrap(parts, spec.layout).requires_grad_(spec.requires_grad)
            for spec, parts in with_parts(self.inputs, flat)
        ]
        places_before = [place_of(part) for part in flat]
        num_state = len(self.state.tensors)
        args, kwargs = self.batch.rebuild(tensors[num_state:])
        stand_ins = [
            StandIn(spec, tensor, real)
            for spec, tensor, real in zip(
                self.state.inputs, tensors[:num_state], self.state.tensors, strict=True
            )
        ]
        stand_ins += self.left_out
        attributes = _copy_attributes(stand_ins)
        # the parameters, and what a stage received, whose gradients are computed
        leaves: dict[str, torch.Tensor] = {}
        received: list[str] = []
        if self.step.backward:
            for spec, tensor in zip(self.inputs, tensors, strict=True):
                if spec.kind is not InputKind.BUFFER and spec.requires_grad:
                    leaves[spec.name] = tensor
                    received += [spec.name] if spec.kind is InputKind.BATCH else []
        watched = leaves | {spec.name: tensor for spec, tensor, _ in self.left_out}
        # Backward runs inside too: checkpointed blocks read their parameters again there.
        with (
            swap_tensors(self.step.model, {id(s.real): s.tensor for s in stand_ins}),
            SideEffects(self.results),
            RandomDraws(),
            RepeatedReads(),
            _autocast_cache(),
        ):
            if self.step.backward:
                _register_gradient_hooks(stand_ins[:num_state])
            outputs = self.step.returned(self.step.loss_fn(self.step.model, *args, **kwargs))
            _refuse_accumulated(watched, "loss_fn")
            roots = [tensor for _, _, tensor in outputs if tensor.requires_grad]
            if leaves and not roots:
                raise CaptureError(
                    "the loss does not depend on any parameter that requires a gradient: look "
                    "for a detach or a no_grad in the model and in loss_fn"
                )
            outputs = [(kind, name, tensor.detach()) for kind, name, tensor in outputs]
            gradients: dict[str, torch.Tensor | None] = {}
            if leaves:
                with self.scopes.backward(*roots):
                    ones = []
                    for index, root in enumerate(roots):  # ones, as autograd.grad would make them
                        with annotate(annotation(loss_gradient=index)):
                            ones.append(torch.ones_like(root, memory_format=torch.preserve_format))
                    results = torch.autograd.grad(
                        roots, list(leaves.values()), ones, allow_unused=True
                    )
                    gradients = dict(zip(leaves, results, strict=True))
                _refuse_accumulated(watched, "the backward of a custom function")
            self._refuse_assigned_parameters(stand_ins)
            with without_torch_functions():
                _refuse_changed_attributes(stand_ins, attributes)
                _refuse_changed_gradients(self.left_out)
            with annotate(annotation(phase=Phase.LOSS)):
                self._write_back_assigned_buffers(stand_ins)
        places_after = [place_of(part) for part in flat]
        moved = [before != after for before, after in zip(places_before, places_after, strict=True)]
        for spec, parts_moved in with_parts(self.inputs, moved):
            if any(parts_moved):
                raise CaptureError(
                    f"the step changes the shape, the strides or the memory of "
                    f"{spec.kind.value} '{spec.name}' in place: work on a view of it, or on a copy"
                )
        # outputs are flat, and share no memory
        taken = TakenMemory(flat)
        values: list[torch.Tensor] = []

        def emit(kind: OutputKind, name: str, tensor: torch.Tensor) -> None:
            parts, layout = unwrap(tensor)
            self.outputs.append(Output(kind, name, layout))
            values.extend(parts)

        for kind, name, tensor in outputs:
            emit(kind, name, taken.unshared(tensor))
        for name in received:
            gradient = gradients.pop(name)
            if gradient is None:
                raise CaptureError(
                    f"no output of the stage depends on '{name}', so that the stage before gets no "
                    "gradient: pass a tensor that needs none as a keyword argument"
                )
            emit(OutputKind.INPUT_GRADIENT, name, taken.unshared(gradient, like=leaves[name]))
        for name, gradient in gradients.items():
            if gradient is None:
                self.without_grad.append(name)
                continue
            _check_gradient(name, leaves[name], gradient)
            emit(OutputKind.GRADIENT, name, taken.unshared(gradient, like=leaves[name]))
        return values

    def _refuse_assigned_parameters(self, stand_ins: list[StandIn]) -> None:
        before = _by_name(stand_ins, InputKind.PARAMETER)
        tensors = {name: stand_in.tensor for name, stand_in in before.items()}
        now = {clean_fqn(n): p for n, p in self.step.model.named_parameters(remove_duplicate=False)}
        for name in sorted(tensors.keys() | now.keys()):
            if now.get(name) is not tensors.get(name):
                raise CaptureError(
                    f"forward assigns or removes parameter '{name}', and a step must not replace "
                    "the parameters of the model: write in place under torch.no_grad(), or "
                    "compute with a tensor that is not a parameter"
                )

    def _write_back_assigned_buffers(self, stand_ins: list[StandIn]) -> None:
        """Copy buffers that forward assigned into the old ones, for the next step to read."""
        before = _by_name(stand_ins, InputKind.BUFFER)
        now = {clean_fqn(n): b for n, b in self.step.model.named_buffers(remove_duplicate=False)}
        if before.keys() != now.keys():
            raise CaptureError(
                f"forward adds or removes buffers {sorted(before.keys() ^ now.keys())}, and a step "
                "must keep the buffers of the model: register them in __init__"
            )
        assigned: list[tuple[torch.Tensor, torch.Tensor]] = []  # the old buffer and its new value
        for name, value in now.items():
            spec, buffer, _ = before[name]
            if value is buffer:
                continue
            if value.shape != buffer.shape or value.dtype != buffer.dtype:
                raise CaptureError(
                    f"forward replaces buffer '{name}' of {tuple(buffer.shape)} {buffer.dtype} by "
                    f"one of {tuple(value.shape)} {value.dtype}: a buffer must keep its shape and "
                    "dtype"
                )
            if spec.aliases:
                raise CaptureError(
                    f"forward replaces buffer '{name}', which is one tensor under the names "
                    f"{[spec.name, *spec.aliases]}: write into it in place instead"
                )
            assigned.append((buffer, value))
        written = {storage_id(part) for buffer, _ in assigned for part in unwrap(buffer)[0]}
        with torch.no_grad():
            # a value that is one of these buffers, or a view, is read before any is written
            values = []
            for _, value in assigned:
                parts = {storage_id(part) for part in unwrap(value)[0]}
                values.append(value if parts.isdisjoint(written) else value.clone())
            for (buffer, _), value in zip(assigned, values, strict=True):
                buffer.copy_(value)


def _copy_attributes(stand_ins: list[StandIn]) -> list[set[str]]:
    """Give stand-ins the attributes that were set on the model's tensors, and mark parameters.

    Returns:
        The names of the attributes that each stand-in had before.
    """
    names = []
    with without_torch_functions():
        for _, tensor, real in stand_ins:
            attributes = vars(tensor)
            names.append(set(attributes))
            attributes.update({k: v for k, v in vars(real).items() if k not in attributes})
            if isinstance(real, nn.Parameter):
                mark_as_parameter(tensor)
    return names


def _refuse_changed_attributes(stand_ins: list[StandIn], ignored: list[set[str]]) -> None:
    """Refuse attributes that the step has set on tensors of the model.

    Args:
        ignored: the attributes of each stand-in that the model's tensor does not have.
    """
    for (spec, tensor, real), names in zip(stand_ins, ignored, strict=True):
        now = vars(tensor)
        before = vars(real)
        for name in sorted((now.keys() | before.keys()) - names):
            if not name.startswith("_") and now.get(name) is not before.get(name):
                raise CaptureError(
                    f"the step sets attribute '{name}' of {spec.kind.value} '{spec.name}', "
                    "which a graph does not: keep it in a buffer, or set it outside of the step"
                )


def _refuse_changed_gradients(left_out: list[StandIn]) -> None:
    """Refuse a step that sets requires_grad or a hook of a tensor of a layer that is left out.

    Where a layer is traced, autograd shows both.
    """
    for spec, tensor, real in left_out:
        on_gradient, _ = tensor_hooks(tensor)
        if tensor.requires_grad != real.requires_grad or on_gradient:
            raise CaptureError(f"the step sets requires_grad or a hook of '{spec.name}'")


def _register_gradient_hooks(stand_ins: list[StandIn]) -> None:
    """Register the gradient hooks of the model's parameters on the traced ones."""
    for spec, tensor, real in stand_ins:
        on_gradient, after_accumulation = tensor_hooks(real)
        if after_accumulation:
            raise CaptureError(
                f"parameter '{spec.name}' has a hook that runs after its gradient is "
                "accumulated into .grad, which a captured step does not do: remove it"
            )
        for hook in on_gradient:
            tensor.register_hook(hook)


def _by_name(stand_ins: list[StandIn], kind: InputKind) -> dict[str, StandIn]:
    """Return the stand-ins of one kind, by each of their names."""
    by_name = {}
    for stand_in in stand_ins:
        if stand_in.spec.kind is kind:
            for name in (stand_in.spec.name, *stand_in.spec.aliases):
                by_name[name] = stand_in
    return by_name


def _line_of(error: Exception) -> str:
    """Return the innermost line of the user's code that an error went through, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_library_file(frame.filename) and not frame.filename.startswith("<"):
            return f" at {frame.filename}:{frame.lineno}"
    return ""


def _explained(error: Exception) -> str:
    """Return the class and the message of an error, with a remedy for the most common ones."""
    kind = type(error).__name__
    message = str(error)
    remedy = ""
    if "dynamo-optimized function" in message:
        remedy = " (capture traces the complete step: leave torch.compile out of the model)"
    elif kind in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "GuardOnDataDependentSymNode",
    ):
        # the first line: the others describe torch's logs
        message = " ".join(message.partition("\n")[0].split())
        remedy = (
            " (the step reads a tensor's value into Python, by .item(), .tolist(), bool(...) or "
            "indexing with a mask, and tensors have no values during capture: compute with "
            "tensors, torch.where for example; torch.distributions take validate_args=False)"
        )
    return f"{kind}: {message}{remedy}"


def _add_messages_to_assertions(graph_module: fx.GraphModule) -> None:
    """Add a message to assertions without one, which later traces of torch drop as unused."""
    assertions = torch.ops.aten._assert_async
    message = "Expected Tensor with single nonzero value, but got zero"
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=assertions.default):
                node.target = assertions.msg
                node.args = (*node.args, message)


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """Run torch.nn's encoder layers and attention op by op, also without gradients.

    Their fused kernels sum in another order, and torch does not use them in a trace.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _autocast_cache() -> Iterator[None]:
    """Turn on autocast's cache, which make_fx turns off.

    Without it a weight that is read twice is cast twice, and its gradient rounded twice.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)  # takes no keyword
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


def _refuse_accumulated(tensors: dict[str, torch.Tensor], where: str) -> None:
    with without_torch_functions():
        accumulated = [name for name, tensor in tensors.items() if tensor.grad is not None]
    if accumulated:
        raise CaptureError(
            f"{where} leaves a gradient in .grad of '{accumulated[0]}': it calls backward() "
            "itself, which a captured step would lose. Return the loss and let capture run "
            "backward"
        )


def _check_gradient(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise CaptureError(
            f"the gradient of '{name}' is sparse, and a graph returns dense gradients only: set "
            "sparse=False in its embedding"
        )
    _, expected = unwrap(parameter)
    _, actual = unwrap(gradient)
    if expected.subclass is not actual.subclass or expected.shape != actual.shape:
        raise CaptureError(
            f"the gradient of '{name}' is a {type(gradient).__name__} of {tuple(actual.shape)}, "
            f"and the parameter is a {type(parameter).__name__} of {tuple(expected.shape)}: "
            "return a gradient like the parameter from the custom function that computes it"
        )
    placements = getattr(parameter, "placements", None)
    if placements != getattr(gradient, "placements", None):
        raise CaptureError(
            f"the gradient of '{name}' has placements {gradient.placements}, and the parameter "  # type: ignore[attr-defined]
            f"has {placements}: redistribute the gradient in the parameter's backward"
        )


def _clone_constants_returned(graph: fx.Graph) -> None:
    """Clone outputs that share memory with a constant. Linear in nodes.

    A write into a gradient, as by clipping, would change the constant for the next step.
    """
    roots = storage_roots(graph)
    output = graph.output_node()
    for node in output.all_input_nodes:
        if roots[node][0].op == "get_attr":
            with graph.inserting_after(node):
                clone = graph.call_function(torch.ops.aten.clone.default, (node,))
            clone.meta = {"val": value_of(node)}
            copy_annotations(node, clone, phase=Phase.BACKWARD)
            output.replace_input_with(node, clone)
