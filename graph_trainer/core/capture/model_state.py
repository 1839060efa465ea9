"""The tensors of a model that a captured step takes as inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx, nn

from graph_trainer.core.capture.repeated_layers import NotRepeated
from graph_trainer.core.graph.signature import Input, InputKind, with_parts
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.torch_private import FakeTensor, storage_id
from graph_trainer.errors import CaptureError


@dataclass(slots=True)
class ModelState:
    """The model's tensors, each once, with every name it has."""

    tensors: list[torch.Tensor]
    inputs: list[Input]

    def parted(self, ids: Set[int]) -> tuple[ModelState, ModelState]:
        """Return the tensors without those of some ids, and these, each in their order."""
        parts = ModelState([], []), ModelState([], [])
        for tensor, spec in zip(self.tensors, self.inputs, strict=True):
            part = parts[id(tensor) in ids]
            part.tensors.append(tensor)
            part.inputs.append(spec)
        return parts


def state_of(model: nn.Module) -> ModelState:
    """List parameters, then buffers, each tensor once under its first name.

    Raises:
        CaptureError: a tensor that no graph can hold, or a module that is not in Python.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module '{clean_fqn(name)}' is scripted or traced by torch.jit, which hides its "
                "operators: capture the Python module that it was made of"
            )
    known: dict[int, tuple[InputKind, torch.Tensor, list[str]]] = {}
    for kind, named in (
        (InputKind.PARAMETER, model.named_parameters(remove_duplicate=False)),
        (InputKind.BUFFER, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            known.setdefault(id(tensor), (kind, tensor, []))[2].append(clean_fqn(name))
    state = ModelState([], [])
    for kind, tensor, (name, *aliases) in known.values():
        _, layout = unwrap(tensor, name)
        state.tensors.append(tensor)
        state.inputs.append(Input(kind, name, layout, tensor.requires_grad, tuple(aliases)))
    return state


def refuse_state_among_constants(
    graph_module: fx.GraphModule,
    state: ModelState,
    apart: Iterable[tuple[Input, torch.Tensor, torch.Tensor]],
) -> None:
    """Refuse a constant of the graph that is a tensor of the model or requires a gradient.

    A tensor that forward does not read through an attribute of the model becomes a constant of
    the graph: right for a table, and silently wrong for anything that training changes.

    Raises:
        CaptureError: with the name of the tensor, or its shape and dtype.
        NotRepeated: with the name of one whose stand-in the step uses: its layer is left out.
    """
    of_left_out = {
        storage_id(part): spec.name for spec, stand_in, _ in apart for part in unwrap(stand_in)[0]
    }
    names = {
        storage_id(part): spec.name
        for spec, tensor in zip(state.inputs, state.tensors, strict=True)
        for part in unwrap(tensor)[0]
    }
    for node in graph_module.graph.find_nodes(op="get_attr"):
        constant = getattr(graph_module, str(node.target), None)
        if not isinstance(constant, torch.Tensor):
            continue
        used = of_left_out.get(storage_id(constant))
        if used is not None:
            raise NotRepeated(f"the step uses '{used}' beside its layer")
        if isinstance(constant, FakeTensor):
            raise CaptureError(
                f"the step reads a tensor of {tuple(constant.shape)} {constant.dtype} without "
                "data, made by an earlier capture that has kept it: clear what holds it (a "
                "cache, a global, an attribute) and compute it in the step"
            )
        name = names.get(storage_id(constant))
        if name is not None:
            raise CaptureError(
                f"'{name}' is read through something else than its attribute (a "
                "list, a closure, an attribute of another object), where capture cannot "
                "replace it: read it as an attribute of its module"
            )
        if constant.requires_grad:
            raise CaptureError(
                f"the step reads a tensor of {tuple(constant.shape)} {constant.dtype} that "
                "requires a gradient and is neither a parameter of the model nor in the batch; "
                "its gradient would be lost: make it a parameter of the model"
            )


def refuse_batch_with_gradient(spec: Input, tensor: torch.Tensor, backward: bool) -> None:
    """Refuse a tensor of the batch whose gradient eager would carry further than a step does.

    Raises:
        CaptureError: with the argument of the batch.
    """
    if isinstance(tensor, nn.Parameter):
        raise CaptureError(
            f"'{spec.name}' of the batch is a parameter: read it in loss_fn as an attribute of the "
            "model, so that its gradient is computed"
        )
    if tensor.grad_fn is not None:
        raise CaptureError(
            f"'{spec.name}' of the batch was computed with gradients, which would not be carried "
            "further back: compute it in loss_fn and capture again, or detach it"
        )
    if backward and tensor.requires_grad:
        raise CaptureError(
            f"'{spec.name}' of the batch requires a gradient, and a step returns those of "
            "parameters only: pass it detached, and where loss_fn itself needs its gradient, write "
            "x = x.detach().requires_grad_() there; to train it, make it a parameter of the model"
        )


def refuse_shared_memory(inputs: Sequence[Input], values: Sequence[torch.Tensor]) -> None:
    """Refuse a batch in memory that the step writes as another input.

    Args:
        inputs: the inputs of a graph; `mutated` says which it writes.
        values: the plain tensors of all inputs.

    Raises:
        CaptureError: with both names.
    """
    if not any(spec.mutated for spec in inputs):
        return
    pairs = [(spec, part) for spec, parts in with_parts(inputs, values) for part in parts]
    written = {storage_id(p): spec.name for spec, p in pairs if spec.mutated and p.numel()}
    for spec, part in pairs:
        owner = written.get(storage_id(part), spec.name) if spec.kind is InputKind.BATCH else None
        if owner not in (None, spec.name):
            raise CaptureError(
                f"'{spec.name}' of the batch shares the memory of '{owner}', which the step "
                "writes: clone it"
            )
