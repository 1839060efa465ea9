"""Unwrap tensor subclasses into plain tensors, and wrap those again.

Works for any subclass that follows torch's flatten protocol (DTensor does), so that the graph
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
    """Attributes that the protocol names and that are not tensors."""
    context: Any = None
    """The context that the protocol returns, for example a DTensor's mesh and placements."""

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
        """Return whether a graph captured with this layout can take another tensor.

        Strides must be equal: the graph has views and kernels chosen for the captured strides. So
        must be the context of a subclass, such as a DTensor's mesh and placements.
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
    """Return the subclass to unwrap, torch.Tensor for a plain tensor or a parameter."""
    return type(tensor) if is_traceable_wrapper_subclass(tensor) else torch.Tensor


def unwrap(tensor: torch.Tensor, name: str = "") -> tuple[list[torch.Tensor], Layout]:
    """Return the plain tensors inside a tensor, and how to wrap them again.

    Args:
        name: the name of the tensor in errors.

    Returns:
        The plain tensors inside (the tensor itself if it is plain), and the layout that
        `wrap` needs.

    Raises:
        CaptureError: a subclass inside a subclass; with a name, a tensor that is not dense.
    """
    if name and is_lazy(tensor):
        raise CaptureError(
            f"'{name}' has no shape yet: run the model once on a batch before capture, which "
            "initializes lazy modules"
        )
    if name and not _is_dense(tensor):
        raise CaptureError(
            f"'{name}' is a {_storage_kind(tensor)} tensor, and a graph takes dense tensors alone: "
            "pass its parts, or make it dense"
        )
    common = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor], Layout(*common)
    parts, context = _flattened(tensor)
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, Any] = {}
    for part in parts:
        value = getattr(tensor, part)
        if not isinstance(value, torch.Tensor):
            constants[part] = value
            continue
        tensors[part] = value
        if is_traceable_wrapper_subclass(value):
            raise CaptureError(
                f"'{name or 'a tensor'}' is a {type(tensor).__name__} that contains a "
                f"{type(value).__name__} as '{part}', and only one level of tensor subclass can be "
                "captured: unwrap the outer one first"
            )
    layout = Layout(
        *common,
        subclass=type(tensor),
        parts=tuple(tensors),
        constants=tuple(constants.items()),
        context=context,
    )
    return list(tensors.values()), layout


def _is_dense(tensor: torch.Tensor) -> bool:
    return not (tensor.is_nested or tensor.is_quantized) and tensor.layout is torch.strided


def _storage_kind(tensor: torch.Tensor) -> str:
    """Return the word for how a tensor is stored: nested, quantized, or the name of its layout."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return str(tensor.layout).removeprefix("torch.")


def wrap(tensors: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Make a tensor from the plain tensors that `unwrap` returned."""
    if layout.subclass is None:
        (tensor,) = tensors
        return tensor
    inner = dict(zip(layout.parts, tensors, strict=True)) | dict(layout.constants)
    unflatten: Any = layout.subclass.__tensor_unflatten__  # type: ignore[attr-defined]
    return unflatten(inner, layout.context, layout.shape, layout.stride)


def with_stride(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these strides: the tensor itself if it has them, else a copy."""
    if tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def _flattened(tensor: Any) -> tuple[list[str], Any]:
    """Return the attribute names of the inner tensors, and the context for rebuilding."""
    return tensor.__tensor_flatten__()
