"""Give each output of a step memory that it shares with nothing, decided on fake tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.torch_private import is_traceable_wrapper_subclass, storage_id

Range = tuple[int, int]


class TakenMemory:
    """The memory of a step's inputs and outputs, so that no output shares memory.

    Autograd does the same when it writes gradients into `.grad`. Clipping and optimizers write
    gradients in place: a gradient that is the batch itself, another parameter's gradient, or one
    value expanded to a shape, would be written twice or not at all.
    """

    def __init__(self, taken: Iterable[torch.Tensor]) -> None:
        self._taken: dict[int, list[Range]] = defaultdict(list)
        for tensor in taken:
            self._take(tensor)

    def unshared(self, tensor: torch.Tensor, *, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return `tensor`, or a clone if its memory is taken or some of its elements overlap.

        Args:
            tensor: an output of the step.
            like: a parameter; the tensor is also cloned if its strides differ from the parameter's.
                Autograd gives `.grad` those strides, and a norm over other strides sums in another
                order.
        """
        if like is not None and not _has_strides_of(like, tensor):
            tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
        elif any(self._is_shared(part) for part in unwrap(tensor)[0]):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        for part in unwrap(tensor)[0]:
            self._take(part)
        return tensor

    def _is_shared(self, part: torch.Tensor) -> bool:
        """Return whether the memory of a plain tensor is taken, or some of its elements overlap."""
        start, stop = _range(part)
        if stop - start < part.numel():
            return True
        taken = self._taken[storage_id(part)]
        return any(start < taken_stop and taken_start < stop for taken_start, taken_stop in taken)

    def _take(self, part: torch.Tensor) -> None:
        self._taken[storage_id(part)].append(_range(part))


def _has_strides_of(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether a gradient has its parameter's strides, where they matter."""
    if is_traceable_wrapper_subclass(parameter):
        return True  # the backward of the subclass decides the layout of the tensors inside
    dimensions = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in dimensions)


def _range(tensor: torch.Tensor) -> Range:
    """Return the first element and one past the last, counted in the tensor's storage."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + 1 + int(sum((size - 1) * stride for size, stride in steps))
