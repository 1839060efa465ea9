"""What torch's caching allocator takes from a GPU for what a step keeps alive."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable

from graph_trainer.core.analysis.memory import Category, LiveStorage, Memory
from graph_trainer.core.units import MIB

# Sizes and rules of c10/cuda/CUDACachingAllocator with expandable segments, which torchtitan's
# run_train.sh and ours turn on: blocks are multiples of 512 bytes; up to 1 MiB they come from a
# segment of 2 MiB pages, larger ones from a segment of 20 MiB pages; the smallest free block that
# is large enough is taken and split, neighbours that are free are one block, and a segment grows
# at its end. (PyTorch 2.13, docs "CUDA semantics: Memory management".)
_ROUND = 512
_SMALL = MIB
_SMALL_PAGE = 2 * MIB
_LARGE_PAGE = 20 * MIB

Pool = str


class Segment:
    """One expandable segment. Every call takes logarithmic time, but for moving a short list."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._used: dict[object, tuple[int, int]] = {}
        self.reserved = 0
        """Bytes that the segment has taken from the device; they are not given back."""

    def allocate(self, key: object, num_bytes: int) -> None:
        """Take a block under a name."""
        wanted = max(_ROUND, -(-num_bytes // _ROUND) * _ROUND)
        place = bisect.bisect_left(self._free, (wanted, -1))
        if place == len(self._free):
            size, address = self._grow(wanted)
        else:
            size, address = self._free.pop(place)
            del self._size_at[address], self._start_of_end[address + size]
        if size > wanted:
            self._put(address + wanted, size - wanted)
        self._used[key] = (address, wanted)

    def free(self, key: object) -> None:
        """Give a block back to the segment."""
        self._put(*self._used.pop(key))

    def _grow(self, wanted: int) -> tuple[int, int]:
        address = self.reserved
        if self.reserved in self._start_of_end:  # what is free at the end becomes its beginning
            address = self._start_of_end[self.reserved]
            self._drop(address)
        missing = wanted - (self.reserved - address)
        self.reserved += -(-missing // self._page) * self._page
        return self.reserved - address, address

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


def one_pool(storage: LiveStorage) -> Pool:
    """Everything on the compute stream, as graph_trainer's collectives allocate."""
    return "compute"


def pool_per_stream(storage: LiveStorage) -> Pool:
    """As FSDP2 allocates: what it gathers and what it reduces on streams of their own, whose
    memory no other stream uses again."""
    if storage.category is Category.UNSHARDED:
        return "unshard"
    if storage.category in (Category.GRADIENTS, Category.COMMUNICATION):
        return "reduce"
    return "compute"


def reserved_bytes(
    memory: Memory, pool_of: Callable[[LiveStorage], Pool] = one_pool, steps: int = 2
) -> int:
    """The most that the allocator takes, in all pools. n log n in storages.

    Parameters, buffers, optimizer state and gradients of earlier microbatches are there before
    the first of `steps` steps; gradients of the graph live until the next step begins.
    """
    given = sum(series[0] for c, series in memory.by_category.items() if c in _GIVEN and series)
    pools: dict[Pool, tuple[Segment, Segment]] = defaultdict(
        lambda: (Segment(_SMALL_PAGE), Segment(_LARGE_PAGE))
    )
    pools["compute"][1].allocate("given", given)

    def segment(storage: LiveStorage) -> Segment:
        return pools[pool_of(storage)][storage.bytes > _SMALL]

    born: dict[int, list[LiveStorage]] = defaultdict(list)
    dead: dict[int, list[LiveStorage]] = defaultdict(list)
    for storage in memory.storages:
        if storage.bytes:
            born[storage.born].append(storage)
            dead[storage.last + 1].append(storage)
    places = sorted({*born, *dead})
    kept: list[LiveStorage] = []
    for step in range(steps):
        _free(kept, step - 1, segment)
        kept = []
        for place in places:
            ends = dead.get(place, ())
            kept += [s for s in ends if s.category is Category.GRADIENTS]
            _free((s for s in ends if s.category is not Category.GRADIENTS), step, segment)
            for storage in born.get(place, ()):
                segment(storage).allocate((step, storage.node, storage.index), storage.bytes)
    return sum(s.reserved for pair in pools.values() for s in pair)


# At the first node the only gradients are those of earlier microbatches.
_GIVEN = (
    Category.PARAMETERS,
    Category.OPTIMIZER_STATE,
    Category.BUFFERS,
    Category.GRADIENTS,
)


def _free(
    storages: Iterable[LiveStorage], step: int, segment: Callable[[LiveStorage], Segment]
) -> None:
    for storage in storages:
        segment(storage).free((step, storage.node, storage.index))
