"""Tensor subclasses taken apart into plain tensors and put together again.

Works on any subclass that follows torch's flatten protocol (DTensor does), so that the graph
has plain tensors only and no subclass is dispatched while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from graph_trainer.core.torch_private import is_traceable_wrapper_subclass
from graph_trainer.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Layout:
    """How to rebuild a tensor from the plain tensors inside it.

    For a plain tensor `subclass` is None, and the tensor is its one part.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    subclass: type | None = None
    parts: tuple[str, ...] = ()
    """Attribute names of the plain tensors inside, in placeholder order."""
    constants: tuple[tuple[str, Any], ...] = ()
    """What the protocol returns beside tensors, for example a DTensor's mesh."""
    context: Any = None
    """What the protocol returns about the whole tensor, for example a DTensor's placements."""

    @property
    def num_tensors(self) -> int:
        """The number of plain tensors inside."""
        return 1 if self.subclass is None else len(self.parts)

    def describe(self) -> str:
        """Describe class, shape, stride, dtype, device and placements for a message."""
        kind = (self.subclass or torch.Tensor).__name__
        strides = f"stride {self.stride}"
        context = "" if self.context is None else f", {self.context}"
        return f"{kind} {tuple(self.shape)} {self.dtype} on {self.device}, {strides}{context}"

    def matches(self, tensor: torch.Tensor) -> bool:
        """Return whether a graph captured with this layout fits another tensor.

        Strides must be equal: the graph has views and kernels chosen for the captured strides.
        So must be what a subclass returns about itself, a DTensor's mesh and placements.
        """
        # the protocol of subclasses is looked up only where the class is not the captured one
        if type(tensor) is not self.subclass and plain_type(tensor) is not (
            self.subclass or torch.Tensor
        ):
            return False
        return (
            not tensor.is_nested  # a nested tensor has no shape
            and tensor.layout is torch.strided
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.dtype == self.dtype
            and tensor.device == self.device
            and (self.subclass is None or _flattened(tensor)[1] == self.context)
        )

    def parts_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the plain tensors inside a tensor that this layout matches."""
        return [getattr(tensor, part) for part in self.parts] if self.subclass else [tensor]


def plain_type(tensor: torch.Tensor) -> type:
    """Return the subclass to take apart, torch.Tensor for a plain tensor or a parameter."""
    return type(tensor) if is_traceable_wrapper_subclass(tensor) else torch.Tensor


def unwrap(tensor: torch.Tensor, name: str = "") -> tuple[list[torch.Tensor], Layout]:
    """Take a tensor apart.

    Args:
        name: what an error calls it.

    Returns:
        The plain tensors inside (the tensor itself if it is plain), and the layout that
        `wrap` needs.

    Raises:
        CaptureError: a subclass inside a subclass; with a name, a tensor that is not dense.
    """
    if name and is_lazy(tensor):
        raise CaptureError(
            f"'{name}' has no shape yet: run the model once on a batch, which initializes lazy "
            "modules, before it is captured"
        )
    if name and (tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided):
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else None
        raise CaptureError(
            f"'{name}' is a {kind or str(tensor.layout).removeprefix('torch.')} tensor; a graph "
            "takes dense ones: pass its parts, or make it dense"
        )
    common = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor], Layout(*common)
    parts, context = _flattened(tensor)
    values = [(part, getattr(tensor, part)) for part in parts]
    inside = [(part, value) for part, value in values if isinstance(value, torch.Tensor)]
    for part, value in inside:
        if is_traceable_wrapper_subclass(value):
            raise CaptureError(
                f"'{name or 'a tensor'}' is a {type(tensor).__name__} that holds a "
                f"{type(value).__name__} in '{part}'; only one level of tensor subclass can be "
                "captured: unwrap the outer one first"
            )
    layout = Layout(
        *common,
        subclass=type(tensor),
        parts=tuple(part for part, _ in inside),
        constants=tuple((part, v) for part, v in values if not isinstance(v, torch.Tensor)),
        context=context,
    )
    return [value for _, value in inside], layout


def wrap(tensors: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Put a tensor together from the plain tensors that `unwrap` gave."""
    if layout.subclass is None:
        (tensor,) = tensors
        return tensor
    inner = dict(zip(layout.parts, tensors, strict=True)) | dict(layout.constants)
    unflatten: Any = layout.subclass.__tensor_unflatten__  # type: ignore[attr-defined]
    return unflatten(inner, layout.context, layout.shape, layout.stride)


def with_stride(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these strides: itself where it has them, else a copy."""
    if tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def _flattened(tensor: Any) -> tuple[list[str], Any]:
    """Return the attribute names of the inner tensors, and what else rebuilding needs."""
    return tensor.__tensor_flatten__()
