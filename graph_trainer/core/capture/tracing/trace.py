"""One trace of a step on fake tensors: forward, loss and backward become one flat FX graph."""

from __future__ import annotations

import contextlib
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
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
    """What is captured; see `capture`."""

    model: nn.Module
    loss_fn: LossFn
    args: Sequence[Any]
    kwargs: dict[str, Any]
    backward: bool
    meta_as: torch.device | str
    returned: Returned
    """Takes what the function returns."""


@dataclass(slots=True)
class StepTrace:
    """One trace of a step: the function that make_fx runs, and its outputs."""

    step: Step
    inputs: list[Input]
    state: ModelState
    left_out: list[tuple[Input, torch.Tensor, torch.Tensor]]
    """The tensors of layers that are left out, which are not inputs of the graph. Each is described
    and has a stand-in, which the step must not use; the last is the model's tensor."""
    batch: CapturedBatch
    scopes: Scopes = field(default_factory=Scopes)
    outputs: list[Output] = field(default_factory=list)
    without_grad: list[str] = field(default_factory=list)
    made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """The fake tensors that the step's ops made."""

    def graph_of(self, fakes: list[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
        """Return the flat graph of the step on fake inputs, one for each plain tensor.

        Raises:
            CaptureError: something in the step cannot be traced.
        """
        try:
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(self.step.backward),
                # on this thread, so that backward sees context variables and annotations
                torch.autograd.set_multithreading_enabled(False),
                selective_checkpoint_as_in_eager(),
                without_fused_layers(),
                strided_shards_outside_traces(),
                local_slices(lambda group: annotate(annotation(local_slice=group))),
                mode,
                self.scopes.trace(self.step.model),
                Assignments(),
                # which logs the traceback of what is explained below
                patch.object(logging.getLogger(FakeTensorMode.__module__), "disabled", True),
            ):
                # fx counts the arguments of a method's code, and self would be one of them
                traced = make_fx(lambda flat: self.run(flat), _allow_non_fake_inputs=True)
                graph_module = traced(fakes)
        except GraphTrainerError:
            raise
        except Exception as error:
            module = self.scopes.failed_module()
            where = f"module '{module}'" if module else "the forward of the model itself"
            # the innermost line of the user's own that the error went through
            for frame in reversed(traceback.extract_tb(error.__traceback__)):
                if not is_library_file(frame.filename) and not frame.filename.startswith("<"):
                    where += f" at {frame.filename}:{frame.lineno}"
                    break
            # the most common reasons, whose class names do not say what to do
            remedy, kind, said = "", type(error).__name__, str(error)
            if "dynamo-optimized function" in str(error):
                remedy = " (the graph is of the whole step: leave torch.compile out of the model)"
            elif kind in (
                "DataDependentOutputException",
                "DynamicOutputShapeException",
                "GuardOnDataDependentSymNode",
            ):
                # without what to set for torch's logs, and with single spaces, as prose has
                said = " ".join(said.partition("\n")[0].split())
                remedy = (
                    " (the step reads a tensor's value into Python, by .item(), .tolist(), "
                    "bool(...) or indexing with a mask, and there are no values while it is "
                    "captured: compute with tensors, torch.where for example; "
                    "torch.distributions take validate_args=False)"
                )
            raise CaptureError(
                f"{type(self.step.model).__name__} cannot be captured: in {where}: "
                f"{kind}: {said}{remedy}"
            ) from error
        # make_fx records that the traced function took a list: inputs and outputs become flat
        graph_module.graph.set_codegen(fx.graph.CodeGen())
        output = graph_module.graph.output_node()
        output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
        for node in graph_module.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                node.meta.pop("custom", None)
        # later traces of torch keep assertions with a message, and drop the others as unused
        asserts = torch.ops.aten._assert_async
        for inner in graph_module.modules():
            if isinstance(inner, fx.GraphModule):
                for node in inner.graph.find_nodes(op="call_function", target=asserts.default):
                    node.target = asserts.msg
                    message = "Expected Tensor with single nonzero value, but got zero"
                    node.args = (*node.args, message)
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
        before = [place_of(part) for part in flat]
        count = len(self.state.tensors)
        state = [*zip(self.inputs, tensors, self.state.tensors, strict=False), *self.left_out]
        stand_ins = {id(real): stand_in for _, stand_in, real in state}
        # a stand-in takes the attributes that were set on the model's tensor, and counts as a
        # parameter where that is one
        own: list[set[str]] = []
        with without_torch_functions():
            for _, stand_in, real in state:
                own.append(set(vars(stand_in)))
                vars(stand_in).update({n: v for n, v in vars(real).items() if n not in own[-1]})
                if isinstance(real, nn.Parameter):
                    mark_as_parameter(stand_in)
        args, kwargs = self.batch.rebuild(tensors[count:])
        leaves = [
            (spec.name, tensor)
            for spec, tensor in zip(self.inputs, tensors, strict=True)
            if self.step.backward and spec.kind is InputKind.PARAMETER and spec.requires_grad
        ]
        watched = [*leaves, *((spec.name, stand_in) for spec, stand_in, _ in self.left_out)]
        # Backward runs inside too: checkpointed blocks read their parameters again there.
        with (
            swap_tensors(self.step.model, stand_ins),
            SideEffects(self.made),
            RandomDraws(),
            _autocast_cache(),
        ):
            if self.step.backward:
                self._pass_on_hooks(stand_ins)
            outputs = self.step.returned(self.step.loss_fn(self.step.model, *args, **kwargs))
            _refuse_accumulated(watched, "loss_fn")
            roots = [tensor for _, _, tensor in outputs if tensor.requires_grad]
            if leaves and not roots:
                raise CaptureError(
                    "the loss does not depend on any parameter that requires a gradient; look "
                    "for a detach or a no_grad in the model and in loss_fn"
                )
            outputs = [(kind, name, tensor.detach()) for kind, name, tensor in outputs]
            gradients: Sequence[torch.Tensor | None] = ()
            if leaves:
                with self.scopes.backward(*roots):
                    ones = []
                    for place, root in enumerate(roots):  # ones, as autograd.grad would make them
                        with annotate(annotation(loss_gradient=place)):
                            ones.append(torch.ones_like(root, memory_format=torch.preserve_format))
                    gradients = torch.autograd.grad(
                        roots, [t for _, t in leaves], ones, allow_unused=True
                    )
                _refuse_accumulated(watched, "the backward of a custom function")
            self._refuse_assigned_parameters(stand_ins)
            with without_torch_functions():
                self._refuse_changed_stand_ins(state, own)
            with annotate(annotation(phase=Phase.LOSS)):
                self._write_back_rebound_buffers(stand_ins)
        for (spec, parts), places in zip(
            with_parts(self.inputs, flat), with_parts(self.inputs, before), strict=True
        ):
            if [place_of(part) for part in parts] != list(places[1]):
                raise CaptureError(
                    f"the step changes the shape, the strides or the memory of "
                    f"{spec.kind.value} '{spec.name}' in place: work on a view of it, or on a copy"
                )
        # what is returned shares no memory, and is flat
        taken = TakenMemory(flat)
        values: list[torch.Tensor] = []

        def emit(kind: OutputKind, name: str, tensor: torch.Tensor) -> None:
            parts, layout = unwrap(tensor)
            self.outputs.append(Output(kind, name, layout))
            values.extend(parts)

        for kind, name, tensor in outputs:
            emit(kind, name, taken.unshared(tensor))
        for (name, leaf), gradient in zip(leaves, gradients, strict=False):
            if gradient is None:
                self.without_grad.append(name)
                continue
            _check_gradient(name, leaf, gradient)
            emit(OutputKind.GRADIENT, name, taken.unshared(gradient, like=leaf))
        return values

    def _refuse_changed_stand_ins(
        self, state: list[tuple[Input, torch.Tensor, torch.Tensor]], own: list[set[str]]
    ) -> None:
        """Refuse attributes that the step has set on tensors of the model.

        Args:
            state: inputs with what stood in for their tensors, and these.
            own: the attributes that each stand-in had of its own.
        """
        for (spec, stand_in, real), names in zip(state, own, strict=True):
            now, earlier = vars(stand_in), vars(real)
            for name in sorted((now.keys() | earlier.keys()) - names):
                if not name.startswith("_") and now.get(name) is not earlier.get(name):
                    raise CaptureError(
                        f"the step sets attribute '{name}' of {spec.kind.value} '{spec.name}', "
                        "which no graph does: keep it in a buffer, or set it outside of the step"
                    )
        for spec, stand_in, real in self.left_out:
            # where a layer is traced, autograd shows both
            if stand_in.requires_grad != real.requires_grad or tensor_hooks(stand_in)[0]:
                raise CaptureError(f"the step sets requires_grad or a hook of '{spec.name}'")

    def _pass_on_hooks(self, stand_ins: dict[int, torch.Tensor]) -> None:
        """Register the gradient hooks of the model's parameters on the traced ones."""
        for spec, tensor in zip(self.state.inputs, self.state.tensors, strict=True):
            on_gradient, after_accumulation = tensor_hooks(tensor)
            if after_accumulation:
                raise CaptureError(
                    f"parameter '{spec.name}' has a hook that runs after its gradient is "
                    "accumulated into .grad, which a captured step does not do: remove it"
                )
            for hook in on_gradient:
                stand_ins[id(tensor)].register_hook(hook)

    def _named(
        self, kind: InputKind, stand_ins: dict[int, torch.Tensor]
    ) -> dict[str, tuple[Input, torch.Tensor]]:
        """Return the stand-ins of one kind, by each of their names."""
        specs = [*self.state.inputs, *(spec for spec, _, _ in self.left_out)]
        pairs = zip(specs, stand_ins.values(), strict=True)
        of_kind = [(spec, tensor) for spec, tensor in pairs if spec.kind is kind]
        return {name: pair for pair in of_kind for name in (pair[0].name, *pair[0].aliases)}

    def _refuse_assigned_parameters(self, stand_ins: dict[int, torch.Tensor]) -> None:
        names = {n: p for n, (_, p) in self._named(InputKind.PARAMETER, stand_ins).items()}
        now = {clean_fqn(n): p for n, p in self.step.model.named_parameters(remove_duplicate=False)}
        for name in sorted(names.keys() | now.keys()):
            if now.get(name) is not names.get(name):
                raise CaptureError(
                    f"forward assigns or removes parameter '{name}'; a step must leave the model "
                    "with the parameters it had: write in place under torch.no_grad(), or "
                    "compute with a tensor that is not a parameter"
                )

    def _write_back_rebound_buffers(self, stand_ins: dict[int, torch.Tensor]) -> None:
        """Copy buffers that forward assigned into the old ones, so that the next step sees them."""
        names = self._named(InputKind.BUFFER, stand_ins)
        now = {clean_fqn(n): b for n, b in self.step.model.named_buffers(remove_duplicate=False)}
        if names.keys() != now.keys():
            raise CaptureError(
                f"forward adds or removes buffers: {sorted(names.keys() ^ now.keys())}; a step "
                "must leave the model with the buffers it had: register them in __init__"
            )
        assigned: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, buffer in now.items():
            spec, before = names[name]
            if buffer is before:
                continue
            if buffer.shape != before.shape or buffer.dtype != before.dtype:
                raise CaptureError(
                    f"forward replaces buffer '{name}' of {tuple(before.shape)} {before.dtype} by "
                    f"one of {tuple(buffer.shape)} {buffer.dtype}; a buffer must keep its shape "
                    "and dtype"
                )
            if spec.aliases:
                raise CaptureError(
                    f"forward replaces buffer '{name}', which is one tensor under the names "
                    f"{[spec.name, *spec.aliases]}; write into it in place instead"
                )
            assigned.append((before, buffer))
        replaced = {storage_id(part) for before, _ in assigned for part in unwrap(before)[0]}
        with torch.no_grad():
            # a value that is one of these buffers, or a view, is read before any is written
            values = []
            for _, value in assigned:
                parts = {storage_id(part) for part in unwrap(value)[0]}
                values.append(value if parts.isdisjoint(replaced) else value.clone())
            for (before, _), value in zip(assigned, values, strict=True):
                before.copy_(value)


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """Inside, torch.nn's encoder layers and attention run op by op without gradients too.

    Their fused kernels sum in another order, and torch leaves them out of a trace.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
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
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


def _refuse_accumulated(leaves: list[tuple[str, torch.Tensor]], where: str) -> None:
    with without_torch_functions():
        accumulated = [name for name, leaf in leaves if leaf.grad is not None]
    if accumulated:
        raise CaptureError(
            f"{where} leaves a gradient in .grad of '{accumulated[0]}': it calls backward() "
            "itself, which a captured step would lose; return the loss and let capture "
            "run backward"
        )


def _check_gradient(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise CaptureError(
            f"the gradient of '{name}' is sparse, and a graph returns dense ones: set sparse=False "
            "in its embedding"
        )
    expected, actual = unwrap(parameter)[1], unwrap(gradient)[1]
    if expected.subclass is not actual.subclass or expected.shape != actual.shape:
        raise CaptureError(
            f"the gradient of '{name}' is a {type(gradient).__name__} of {tuple(actual.shape)} "
            f"while the parameter is a {type(parameter).__name__} of {tuple(expected.shape)}"
        )
    placements = getattr(parameter, "placements", None)
    if placements != getattr(gradient, "placements", None):
        raise CaptureError(
            f"the gradient of '{name}' has placements {gradient.placements} while the parameter "  # type: ignore[attr-defined]
            f"has {placements}; redistribute it in the parameter's backward"
        )


def _clone_constants_returned(graph: fx.Graph) -> None:
    """Clone outputs in the memory of a constant. Linear in nodes.

    A write into a gradient, as by clipping, would change what the next step reads.
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
