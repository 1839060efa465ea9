"""Tensor subclasses taken apart into plain tensors and put together again.

Works on any subclass that follows torch's flatten protocol (DTensor does), so that the graph
holds plain tensors only and no subclass is dispatched while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graph_trainer.core.torch_private import is_traceable_wrapper_subclass
from graph_trainer.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Layout:
    """How to rebuild a tensor from the plain tensors inside it.

    A plain tensor is its own only part: `subclass` is None then.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    subclass: type | None = None
    parts: tuple[str, ...] = ()
    """Attribute names of the plain tensors inside, in placeholder order."""
    constants: tuple[tuple[str, Any], ...] = ()
    """What else the protocol hands out beside tensors, a DTensor's mesh for one."""
    context: Any = None
    """What the protocol says of the whole, a DTensor's placements for one."""

    @property
    def num_tensors(self) -> int:
        """How many plain tensors there are inside."""
        return 1 if self.subclass is None else len(self.parts)

    def describe(self) -> str:
        """A few words for a person: class, shape, stride, dtype, device and placements."""
        kind = (self.subclass or torch.Tensor).__name__
        strides = f"stride {self.stride}"
        context = "" if self.context is None else f", {self.context}"
        return f"{kind} {tuple(self.shape)} {self.dtype} on {self.device}, {strides}{context}"

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether a graph captured with this layout fits another tensor.

        Strides count: the graph holds views and kernels chosen for those it was captured
        with. So does what a subclass says of itself, a DTensor's mesh and placements.
        """
        return (
            (self.subclass or torch.Tensor) is plain_type(tensor)
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.dtype == self.dtype
            and tensor.device == self.device
            and (self.subclass is None or _flattened(tensor)[1] == self.context)
        )


def plain_type(tensor: torch.Tensor) -> type:
    """The subclass to take apart, or torch.Tensor for everything that is one itself."""
    return type(tensor) if is_traceable_wrapper_subclass(tensor) else torch.Tensor


def unwrap(tensor: torch.Tensor, name: str = "") -> tuple[list[torch.Tensor], Layout]:
    """Take a tensor apart. `name` is what an error calls it.

    Returns:
        the plain tensors inside (the tensor itself if it is plain), and the layout that
        `wrap` needs.

    Raises:
        CaptureError: a subclass inside a subclass.
    """
    common = {
        "shape": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
    }
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor], Layout(**common)  # type: ignore[arg-type]
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
        **common,  # type: ignore[arg-type]
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


def _flattened(tensor: Any) -> tuple[list[str], Any]:
    """Names of the attributes that hold the inner tensors, and what else rebuilding needs."""
    return tensor.__tensor_flatten__()
