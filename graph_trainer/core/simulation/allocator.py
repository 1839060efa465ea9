"""What torch's caching allocator takes from a GPU for the storages of a step."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping

from graph_trainer.core.analysis.memory import Category, LiveStorage, Memory
from graph_trainer.core.units import MIB

# Sizes and rules of c10/cuda/CUDACachingAllocator with expandable segments, which run_train.sh
# turns on: a block is a multiple of 512 bytes; up to 1 MiB it comes from a segment of 2 MiB pages,
# a larger one from a segment of 20 MiB pages; the smallest free block that is large enough is
# taken and split; adjacent free blocks are merged; a segment grows at its end.
# (PyTorch 2.13, docs "CUDA semantics: Memory management".)
_ROUND = 512
_SMALL = MIB
_SMALL_PAGE = 2 * MIB
_LARGE_PAGE = 20 * MIB

# At the first node the only gradients are those of earlier microbatches.
_GIVEN = (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.BUFFERS, Category.GRADIENTS)

Pools = Mapping[Category, str]
"""By category, the pool of memory of its storages, where that is not the one named "compute". A
pool has one segment for small blocks and one for large ones."""

ONE_POOL: Pools = {}
"""All are allocated on the compute stream, as graph_trainer's collectives allocate."""
POOL_PER_STREAM: Pools = {
    Category.UNSHARDED: "unshard",
    Category.GRADIENTS: "reduce",
    Category.COMMUNICATION: "reduce",
}
"""FSDP2 allocates gathered parameters and reduced gradients on separate streams, and the allocator
does not reuse memory of one stream on another."""


class Segment:
    """One expandable segment, which grows by pages of `page` bytes. Each call takes logarithmic
    time, and the time to shift a short list."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._used: dict[object, tuple[int, int]] = {}
        self.reserved = 0
        """Bytes that the segment has taken from the device. It never returns them."""

    def allocate(self, key: object, num_bytes: int) -> None:
        """Take a block of at least `num_bytes` and store it under `key`."""
        wanted = max(_ROUND, -(-num_bytes // _ROUND) * _ROUND)
        place = bisect.bisect_left(self._free, (wanted, -1))
        if place == len(self._free):  # the segment grows
            address = self.reserved
            if self.reserved in self._start_of_end:  # a free block at the end is extended
                address = self._start_of_end[self.reserved]
                self._drop(address)
            missing = wanted - (self.reserved - address)
            self.reserved += -(-missing // self._page) * self._page
            size = self.reserved - address
        else:
            size, address = self._free.pop(place)
            del self._size_at[address], self._start_of_end[address + size]
        if size > wanted:
            self._put(address + wanted, size - wanted)
        self._used[key] = (address, wanted)

    def free(self, key: object) -> None:
        """Return the block of `key` to the segment."""
        self._put(*self._used.pop(key))

    def _put(self, address: int, size: int) -> None:
        if address in self._start_of_end:
            before = self._start_of_end[address]
            size += self._drop(before)
            address = before
        if address + size in self._size_at:
            size += self._drop(address + size)
        self._size_at[address] = size
        self._start_of_end[address + size] = address
        bisect.insort(self._free, (size, address))

    def _drop(self, address: int) -> int:
        size = self._size_at.pop(address)
        del self._start_of_end[address + size]
        self._free.pop(bisect.bisect_left(self._free, (size, address)))
        return size


def reserved_bytes(memory: Memory, pools: Pools = ONE_POOL, steps: int = 2) -> int:
    """Return the most bytes that the allocator takes, in all pools. n log n in storages.

    Parameters, buffers, optimizer state and gradients of earlier microbatches are allocated before
    the first of `steps` equal steps. Gradients of the graph are alive until the next step begins.
    """
    always = sum(memory.by_category[c][0] for c in _GIVEN if memory.by_category[c])
    segments: dict[str, tuple[Segment, Segment]] = defaultdict(
        lambda: (Segment(_SMALL_PAGE), Segment(_LARGE_PAGE))
    )
    segments["compute"][1].allocate("always", always)

    def segment(storage: LiveStorage) -> Segment:
        return segments[pools.get(storage.category, "compute")][storage.bytes > _SMALL]

    def free(storages: Iterable[LiveStorage], step: int) -> None:
        for storage in storages:
            segment(storage).free((step, storage.node, storage.index))

    born: dict[int, list[LiveStorage]] = defaultdict(list)
    dead: dict[int, list[LiveStorage]] = defaultdict(list)
    for storage in memory.storages:
        if storage.bytes:
            born[storage.born].append(storage)
            dead[storage.last + 1].append(storage)
    places = sorted({*born, *dead})
    gradients: list[LiveStorage] = []
    for step in range(steps):
        free(gradients, step - 1)
        gradients = []
        for place in places:
            ends = dead.get(place, ())
            gradients += [s for s in ends if s.category is Category.GRADIENTS]
            free((s for s in ends if s.category is not Category.GRADIENTS), step)
            for storage in born.get(place, ()):
                segment(storage).allocate((step, storage.node, storage.index), storage.bytes)
    return sum(s.reserved for pair in segments.values() for s in pair)
