"""Measure the bytes of a running step that `lifetimes` predicts."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch

from graph_trainer.core.torch_private import TorchDispatchMode, pytree


class LiveStorages(TorchDispatchMode):
    """Counts, while entered, the bytes of storages that ops make and tensors refer to.

    Counts plain tensors on any device, without the inputs of the step. An allocator counts more:
    threads of a backend may refer to the tensors of a complete collective for some time, which
    depends on scheduling and not on the graph. Slows the step down.

    Example::

        with LiveStorages() as live:
            step(model, *batch)
        print(live.peak_bytes)
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        """The most bytes alive at once."""
        self.live_bytes = 0
        """Bytes alive now."""
        self._tensors: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        of_caller = {t.untyped_storage().data_ptr() for t in _tensors_in((args, kwargs))}
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
            if not self._tensors[pointer]:
                if pointer in of_caller:
                    continue  # a view of an input of the step
                self.live_bytes += size
            self._tensors[pointer] += 1
            weakref.finalize(tensor, self._drop, pointer, size)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _drop(self, pointer: int, size: int) -> None:
        self._tensors[pointer] -= 1
        if not self._tensors[pointer]:
            self.live_bytes -= size


def _tensors_in(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
