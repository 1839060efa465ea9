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
    """Map the storages of the plain tensors inside each tensor to the tensor's name."""
    return {storage_id(part): spec.name for spec, tensor in tensors for part in unwrap(tensor)[0]}


def refuse_state_among_constants(
    graph_module: fx.GraphModule, inputs: Sequence[Input], tensors: Sequence[torch.Tensor]
) -> None:
    """Refuse a constant of the graph that is a tensor of the model or requires a gradient.

    A tensor that forward does not read through an attribute of the model becomes a constant of
    the graph. This is right for a table, and silently wrong for a tensor that training changes.

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
                "data, which an earlier capture made and something stored: clear the cache, the "
                "global or the attribute that stores it, and compute the tensor in the step"
            )
        name = names.get(storage_id(constant))
        if name is not None:
            raise CaptureError(
                f"the step reads '{name}' from a list, a closure or an attribute of another "
                "object, where capture cannot replace it: read it as an attribute of its module"
            )
        if constant.requires_grad:
            raise CaptureError(
                f"the step reads a tensor of {tuple(constant.shape)} {constant.dtype} that "
                "requires a gradient and is neither a parameter of the model nor in the batch, so "
                "that its gradient would be lost: make it a parameter of the model"
            )


def refuse_batch_with_gradient(spec: Input, tensor: torch.Tensor, backward: bool) -> None:
    """Refuse a tensor of the batch for which eager computes a gradient that a step does not return.

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
            f"'{spec.name}' of the batch was computed with gradients, and a step does not return a "
            "gradient for it: compute it in loss_fn and capture again, or detach it"
        )
    if backward and tensor.requires_grad:
        raise CaptureError(
            f"'{spec.name}' of the batch requires a gradient, and a step returns gradients of "
            "parameters only: pass it detached. If loss_fn itself needs its gradient, write "
            "x = x.detach().requires_grad_() there; to train it, make it a parameter of the model"
        )


def refuse_shared_memory(inputs: Sequence[Input], values: Sequence[torch.Tensor]) -> None:
    """Refuse a batch that shares memory with another input that the step writes.

    Args:
        inputs: the inputs of a graph; the graph writes those with `mutated`.
        values: the plain tensors of all inputs.

    Raises:
        CaptureError: with both names.
    """
    if not any(spec.mutated for spec in inputs):
        return
    pairs = [(spec, part) for spec, parts in with_parts(inputs, values) for part in parts]
    written = {storage_id(p): spec.name for spec, p in pairs if spec.mutated and p.numel()}
    for spec, part in pairs:
        if spec.kind is not InputKind.BATCH:
            continue
        name = written.get(storage_id(part), spec.name)
        if name != spec.name:
            raise CaptureError(
                f"'{spec.name}' of the batch shares the memory of '{name}', which the step "
                f"writes: clone '{spec.name}' first"
            )
