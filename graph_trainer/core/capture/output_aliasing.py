"""Who shares memory with whom, asked of fake tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from graph_trainer.core.capture.subclasses import unwrap
from graph_trainer.core.torch_private import is_traceable_wrapper_subclass, storage_id

Range = tuple[int, int]


class Storages:
    """Memory that is taken, so that what a step returns can be given memory of its own.

    Autograd does the same when it puts gradients into `.grad`: clipping and optimizers write
    gradients in place, and one that is the batch itself, or another parameter's gradient too,
    or one value expanded to a shape, would be written twice or not at all.
    """

    def __init__(self, taken: Iterable[torch.Tensor]) -> None:
        self._taken: dict[int, list[Range]] = defaultdict(list)
        for tensor in taken:
            self._take(tensor)

    def own(self, tensor: torch.Tensor, *, like: torch.Tensor | None = None) -> torch.Tensor:
        """`tensor`, or a clone where some of its memory is taken or holds several elements.

        With `like`, also a clone where `tensor` is not laid out like that parameter: autograd
        lays `.grad` out so, and a norm over other strides sums in another order.
        """
        parts, _ = unwrap(tensor)
        if like is not None and not _laid_out_like(tensor, like):
            tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
        elif not all(map(self._is_free, parts)):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        parts, _ = unwrap(tensor)
        for part in parts:
            self._take(part)
        return tensor

    def _is_free(self, part: torch.Tensor) -> bool:
        start, stop = _range(part)
        overlapping = stop - start < part.numel()
        taken = self._taken[storage_id(part)]
        return not overlapping and all(stop <= a or b <= start for a, b in taken)

    def _take(self, part: torch.Tensor) -> None:
        self._taken[storage_id(part)].append(_range(part))


def _laid_out_like(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether autograd would keep a gradient's strides for this parameter. Subclasses keep
    theirs: what is inside is laid out by their own backward."""
    if is_traceable_wrapper_subclass(like):
        return True
    dimensions = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in dimensions)


def _range(tensor: torch.Tensor) -> Range:
    """First element and one past the last, counted in the tensor's storage."""
    start = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + 1 + int(sum((size - 1) * stride for size, stride in steps))
