"""Give what a step returns memory that nothing else shares, decided on fake tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.torch_private import is_traceable_wrapper_subclass, storage_id

Range = tuple[int, int]


class TakenMemory:
    """The memory of a step's inputs and outputs, so that no output shares memory.

    Autograd does the same when it writes gradients into `.grad`: clipping and optimizers write
    gradients in place, and a gradient that is the batch itself, or also another parameter's
    gradient, or one value expanded to a shape, would be written twice or not at all.
    """

    def __init__(self, taken: Iterable[torch.Tensor]) -> None:
        self._taken: dict[int, list[Range]] = defaultdict(list)
        for tensor in taken:
            self._take(tensor)

    def unshared(self, tensor: torch.Tensor, *, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return `tensor`, or a clone where its memory is taken or elements of it overlap.

        Args:
            tensor: an output of the step.
            like: a parameter; the tensor is also cloned where its strides differ from the
                parameter's. Autograd gives `.grad` those strides, and a norm over other strides
                sums in another order.
        """
        # a tensor subclass keeps its strides: its backward decides the layout of what is inside
        same_strides = like is None or is_traceable_wrapper_subclass(like)
        if like is not None and not same_strides:
            dimensions = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
            same_strides = all(size == 1 or given == wanted for size, given, wanted in dimensions)
        shared = False
        for part in unwrap(tensor)[0]:
            start, stop = _range(part)
            taken = self._taken[storage_id(part)]
            overlapping = stop - start < part.numel()
            shared |= overlapping or any(start < b and a < stop for a, b in taken)
        if like is not None and not same_strides:
            tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
        elif shared:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        for part in unwrap(tensor)[0]:
            self._take(part)
        return tensor

    def _take(self, part: torch.Tensor) -> None:
        self._taken[storage_id(part)].append(_range(part))


def _range(tensor: torch.Tensor) -> Range:
    """First element and one past the last, counted in the tensor's storage."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + 1 + int(sum((size - 1) * stride for size, stride in steps))
