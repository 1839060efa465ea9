"""Refuse tensors that a step may not read: state among its constants, and parts of its batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx, nn

from graph_trainer.core.graph.signature import Input, InputKind, with_parts
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.torch_private import FakeTensor, storage_id
from graph_trainer.errors import CaptureError


def names_of_storages(tensors: Iterable[tuple[Input, torch.Tensor]]) -> dict[int, str]:
    """Return the name of each tensor by the storages of its plain tensors."""
    return {storage_id(part): spec.name for spec, tensor in tensors for part in unwrap(tensor)[0]}


def refuse_state_among_constants(
    graph_module: fx.GraphModule, inputs: Sequence[Input], tensors: Sequence[torch.Tensor]
) -> None:
    """Refuse a constant of the graph that is a tensor of the model or requires a gradient.

    A tensor that forward does not read through an attribute of the model becomes a constant of
    the graph: right for a table, and silently wrong for anything that training changes.

    Args:
        inputs, tensors: parameters and buffers of the model.

    Raises:
        CaptureError: with the name of the tensor, or its shape and dtype.
    """
    names = names_of_storages(zip(inputs, tensors, strict=True))
    for node in graph_module.graph.find_nodes(op="get_attr"):
        constant = getattr(graph_module, str(node.target), None)
        if not isinstance(constant, torch.Tensor):
            continue
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
