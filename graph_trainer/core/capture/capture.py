"""Capture: one step, run once on fake tensors, becomes a JointGraph."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate

from graph_trainer.core.capture.call_signature import Batch
from graph_trainer.core.capture.fsdp_roles import find_fsdp_roles
from graph_trainer.core.capture.model_state import (
    ModelState,
    refuse_state_among_constants,
    state_of,
)
from graph_trainer.core.capture.module_scopes import Scopes
from graph_trainer.core.capture.output_aliasing import TakenMemory
from graph_trainer.core.capture.rng_replay import RandomDraws, share_repeated_draws
from graph_trainer.core.capture.subclasses import unwrap, wrap
from graph_trainer.core.graph.annotations import (
    annotation,
    set_input_name,
)
from graph_trainer.core.graph.joint_graph import (
    Input,
    InputKind,
    JointGraph,
    Output,
    OutputKind,
    Signature,
    with_parts,
)
from graph_trainer.core.graph.last_writes import LastWrites
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.torch_private import (
    FakeTensorMode,
    local_slices,
    rename_node,
    selective_checkpoint_as_in_eager,
    storage_id,
    swap_tensors,
    tensor_hooks,
)
from graph_trainer.errors import CaptureError, GraphTrainerError

LossFn = Callable[..., torch.Tensor]


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = True,
    meta_as: torch.device | str = "meta",
) -> JointGraph:
    """Trace forward, loss and backward of one step into one flat graph.

    Args:
        model: any module; its parameters and buffers become inputs of the graph. They may be
            DTensors (see `simple_fsdp`) and may be on meta. It is left as it was, with the
            attributes that forward assigns.
        loss_fn: `loss_fn(model, *args, **kwargs)` -> scalar loss.
        args, kwargs: one batch. Tensors become inputs; everything else is baked in and
            checked at every later call.
        backward: whether gradients are computed. If not, forward and loss run as under
            `torch.no_grad()` and the loss is the graph's only output: for validation. Call
            `model.eval()` first where that is meant: a graph keeps the mode it was captured in.
        meta_as: the device that replaces meta: ops are chosen as on that device.

    Returns:
        The graph: inputs are the model's tensors and the batch, outputs the loss and the
        gradient of every parameter that requires one and that the loss reaches (none without
        `backward`). Gradients of batch tensors are not returned.

    Runs on fake tensors: no tensor storage is allocated, no kernel and no collective runs. A
    model that asks whether its tensors are fake and then computes otherwise (transformers
    does where it would look into a mask) is captured as it computes with fake ones.

    Raises:
        CaptureError: something in the step cannot be traced; the message names the module.
    """
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"args is a {type(args).__name__}; it must be a tuple of loss_fn's arguments after "
            "the model, for example (batch,)"
        )
    kwargs = dict(kwargs or {})
    state = state_of(model)
    batch = Batch(args, kwargs)
    batch_tensors = batch.take(args, kwargs)
    inputs = [*state.inputs, *batch.inputs(batch_tensors)]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Detached one by one: a tensor that is passed twice becomes two inputs, since the next call
    # may pass two tensors.
    real = [part.detach() for t in (*state.tensors, *batch_tensors) for part in unwrap(t)[0]]
    fakes = [_fake(part, mode, torch.device(meta_as)) for part in real]

    scopes = Scopes()
    trace = _Trace(model, loss_fn, inputs, state, batch, scopes, backward)
    try:
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(backward),
            # on this thread, so that backward sees context variables and annotations
            torch.autograd.set_multithreading_enabled(False),
            selective_checkpoint_as_in_eager(),
            local_slices(lambda group: annotate(annotation(local_slice=group))),
            mode,
            scopes.trace(model),
        ):
            traced = make_fx(lambda flat: trace.run(flat), _allow_non_fake_inputs=True)
            graph_module = traced(fakes)
    except GraphTrainerError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: in "
            f"{_place(scopes.failed_module())}: {type(error).__name__}: {error}{_remedy(error)}"
        ) from error
    refuse_state_among_constants(graph_module, state)
    _flatten_output(graph_module)
    share_repeated_draws(graph_module.graph)
    signature = Signature(
        _mutated(graph_module.graph, inputs),
        tuple(trace.outputs),
        tuple(trace.without_grad),
        backward,
    )
    _name_placeholders(graph_module.graph, signature)
    graph_module.recompile()
    training = tuple(module.training for module in model.modules())
    joint = JointGraph(graph_module, signature, batch, type(model).__name__, training)
    find_fsdp_roles(joint)
    joint.validate()
    return joint


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, meta_as: torch.device) -> torch.Tensor:
    if tensor.is_meta and meta_as.type != "meta":
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=meta_as
            )
    return mode.from_tensor(tensor)


def _place(module: str) -> str:
    return f"module '{module}'" if module else "the forward of the model itself"


def _remedy(error: Exception) -> str:
    """Return what to do about the most common reason, whose class name does not tell."""
    if type(error).__name__ != "DataDependentOutputException":
        return ""
    return (
        " (the step reads a tensor's value into Python, by .item(), .tolist(), bool(...) or "
        "indexing with a mask, and there are no values while it is captured: compute with "
        "tensors, torch.where for example)"
    )


class _Trace:
    """The function that make_fx traces, and the outputs that it found."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        inputs: list[Input],
        state: ModelState,
        batch: Batch,
        scopes: Scopes,
        backward: bool,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.inputs = inputs
        self.state = state
        self.batch = batch
        self.scopes = scopes
        self.backward = backward
        self.outputs: list[Output] = []
        self.without_grad: list[str] = []

    def run(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        tensors = self._rebuild(flat)
        count = len(self.state.tensors)
        stand_ins = dict(zip(map(id, self.state.tensors), tensors[:count], strict=True))
        args, kwargs = self.batch.rebuild(tensors[count:])
        leaves = [
            (spec.name, tensor)
            for spec, tensor in zip(self.inputs, tensors, strict=True)
            if self.backward and spec.kind is InputKind.PARAMETER and spec.requires_grad
        ]
        # Backward runs inside too: checkpointed blocks read their parameters again there.
        with swap_tensors(self.model, stand_ins), RandomDraws():
            if self.backward:
                self._pass_on_hooks(stand_ins)
            loss = self._run_loss(args, kwargs, leaves)
            detached = loss.detach()
            gradients: Sequence[torch.Tensor | None] = ()
            if leaves:
                with self.scopes.backward(loss):
                    gradients = torch.autograd.grad(loss, [t for _, t in leaves], allow_unused=True)
            self._write_back_rebound_buffers(stand_ins)
        taken = TakenMemory(flat)
        values = self._emit(OutputKind.LOSS, "loss", taken.unshared(detached))
        for (name, leaf), gradient in zip(leaves, gradients, strict=False):
            if gradient is None:
                self.without_grad.append(name)
                continue
            _check_gradient(name, leaf, gradient)
            values += self._emit(OutputKind.GRADIENT, name, taken.unshared(gradient, like=leaf))
        return values

    def _rebuild(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            wrap(parts, spec.layout).requires_grad_(spec.requires_grad)
            for spec, parts in with_parts(self.inputs, flat)
        ]

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

    def _run_loss(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[tuple[str, torch.Tensor]],
    ) -> torch.Tensor:
        loss = self.loss_fn(self.model, *args, **kwargs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(
                f"loss_fn must return a scalar tensor and returned {found}; sum or average it"
            )
        accumulated = [name for name, leaf in leaves if leaf.grad is not None]
        if accumulated:
            raise CaptureError(
                f"loss_fn leaves a gradient in .grad of '{accumulated[0]}': it calls backward() "
                "itself, which a captured step would lose; return the loss and let capture "
                "run backward"
            )
        if leaves and not loss.requires_grad:
            raise CaptureError(
                "the loss does not depend on any parameter that requires a gradient; look for "
                "a detach or a no_grad in the model and in loss_fn"
            )
        return loss

    def _write_back_rebound_buffers(self, stand_ins: dict[int, torch.Tensor]) -> None:
        """Copy buffers that forward assigned into the old ones, so that the next step sees them."""
        names = {
            name: (i, t)
            for i, t in zip(self.state.inputs, stand_ins.values(), strict=True)
            for name in (i.name, *i.aliases)
        }
        known = {name for name, (i, _) in names.items() if i.kind is InputKind.BUFFER}
        found = {clean_fqn(n): b for n, b in self.model.named_buffers(remove_duplicate=False)}
        if known != found.keys():
            raise CaptureError(
                f"forward adds or removes buffers: {sorted(known ^ found.keys())}; a step must "
                "leave the model with the buffers it had: register them in __init__"
            )
        assigned: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, buffer in found.items():
            spec, before = names[name]
            if buffer is before:
                continue
            if buffer.shape != before.shape or buffer.dtype != before.dtype:
                raise CaptureError(
                    f"forward replaces buffer '{name}' of {tuple(before.shape)} {before.dtype} by "
                    f"one of {tuple(buffer.shape)} {buffer.dtype}; a buffer must keep its shape"
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
            values = [
                value.clone() if any(storage_id(p) in replaced for p in unwrap(value)[0]) else value
                for _, value in assigned
            ]
            for (before, _), value in zip(assigned, values, strict=True):
                before.copy_(value)

    def _emit(self, kind: OutputKind, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts, layout = unwrap(tensor)
        self.outputs.append(Output(kind, name, layout))
        return parts


def _check_gradient(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    expected, found = unwrap(parameter)[1], unwrap(gradient)[1]
    if expected.subclass is not found.subclass or expected.shape != found.shape:
        raise CaptureError(
            f"the gradient of '{name}' is a {type(gradient).__name__} of {tuple(found.shape)} "
            f"while the parameter is a {type(parameter).__name__} of {tuple(expected.shape)}"
        )
    placements = getattr(parameter, "placements", None)
    if placements != getattr(gradient, "placements", None):
        raise CaptureError(
            f"the gradient of '{name}' has placements {gradient.placements} while the parameter "  # type: ignore[attr-defined]
            f"has {placements}; redistribute it in the parameter's backward"
        )


def _flatten_output(graph_module: fx.GraphModule) -> None:
    """Make inputs and outputs flat: make_fx records that the traced function took a list."""
    graph = graph_module.graph
    graph.set_codegen(fx.graph.CodeGen())
    output = graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            node.meta.pop("custom", None)


def _name_placeholders(graph: fx.Graph, signature: Signature) -> None:
    """Name placeholders after their inputs: 'layers_0_attention_wo_weight', not 'arg0_17'."""
    for spec, nodes in with_parts(signature.inputs, graph.find_nodes(op="placeholder")):
        for node in nodes:
            set_input_name(node, spec.name)
            rename_node(graph, node, re.sub(r"\W+", "_", spec.name).strip("_") or "input")


def _mutated(graph: fx.Graph, inputs: list[Input]) -> tuple[Input, ...]:
    """Return the inputs, marking those that the traced step writes in place."""
    written = LastWrites(graph).written_inputs()
    return tuple(
        dataclasses.replace(spec, mutated=not written.isdisjoint(nodes))
        for spec, nodes in with_parts(inputs, graph.find_nodes(op="placeholder"))
    )
