"""What torch's caching allocator takes from a GPU for the storages of a step."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable

from graph_trainer.core.analysis.memory import Category, LiveStorage, Memory
from graph_trainer.core.graph.annotations import Role, role_of
from graph_trainer.core.graph.ops import is_collective
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

# At the first node the only gradients and activations are those of earlier microbatches.
_BEFORE_STEP = (
    Category.PARAMETERS,
    Category.OPTIMIZER_STATE,
    Category.BUFFERS,
    Category.GRADIENTS,
    Category.ACTIVATIONS,
)

_COMPUTE = "compute"

PoolOf = Callable[[LiveStorage], str]
"""Returns the pool of memory of a storage. A pool has one segment for small blocks and one for
large ones; the allocator does not reuse memory of one stream on another."""


def one_pool(storage: LiveStorage) -> str:
    """Return the pool of the compute stream, on which graph_trainer's collectives allocate."""
    return _COMPUTE


def pool_per_stream(storage: LiveStorage) -> str:
    """Return the pool of the stream on which FSDP2 allocates a storage.

    Buckets of gathers are allocated on the stream of their copies, sharded gradients on that of
    reductions; parameters that are copied out of their bucket and gradients that are copied into
    one, on the compute stream (torch 2.13, foreach_all_gather, foreach_reduce).
    """
    if storage.category is Category.GRADIENTS:
        return "reduce"
    role = role_of(storage.node)
    if role is Role.UNSHARD:
        is_bucket = is_collective(storage.node) or storage.category is Category.COMMUNICATION
        return "unshard" if is_bucket else _COMPUTE
    if role is Role.REDUCE_GRAD and is_collective(storage.node):
        return "reduce"
    return _COMPUTE


class Segment:
    """One expandable segment, which grows by pages of `page` bytes. Each call takes logarithmic
    time, plus the time to shift a short list."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._size_at: dict[int, int] = {}
        """Of free blocks, by address."""
        self._start_of_end: dict[int, int] = {}
        """Of free blocks, by the address after their end."""
        self._used: dict[object, tuple[int, int]] = {}
        """Address and size by key."""
        self.reserved = 0
        """Bytes that the segment has taken from the device. It never returns them."""

    def allocate(self, key: object, num_bytes: int) -> None:
        """Take a block of at least `num_bytes` and store it under `key`."""
        needed = max(_ROUND, _round_up(num_bytes, _ROUND))
        index = bisect.bisect_left(self._free, (needed, -1))
        if index == len(self._free):  # no free block is large enough: the segment grows
            address = self.reserved
            if self.reserved in self._start_of_end:  # a free block at the end is extended
                address = self._start_of_end[self.reserved]
                self._drop(address)
            missing = needed - (self.reserved - address)
            self.reserved += _round_up(missing, self._page)
            size = self.reserved - address
        else:
            size, address = self._free.pop(index)
            del self._size_at[address], self._start_of_end[address + size]
        if size > needed:
            self._put(address + needed, size - needed)
        self._used[key] = (address, needed)

    def free(self, key: object) -> None:
        """Return the block of `key` to the segment."""
        address, size = self._used.pop(key)
        self._put(address, size)

    def _put(self, address: int, size: int) -> None:
        """Add a free block, merged with adjacent ones."""
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
        """Remove a free block and return its size."""
        size = self._size_at.pop(address)
        del self._start_of_end[address + size]
        self._free.pop(bisect.bisect_left(self._free, (size, address)))
        return size


def reserved_bytes(memory: Memory, pool_of: PoolOf = one_pool, steps: int = 2) -> int:
    """Return the most bytes that the allocator takes, in all pools. n log n in storages.

    Parameters, buffers, optimizer state, and gradients and activations of earlier microbatches are
    allocated before the first of `steps` equal steps. Gradients of the graph are alive until the
    next step begins.
    """
    before_step = sum(memory.by_category[c][0] for c in _BEFORE_STEP if memory.by_category[c])
    small_segments: dict[str, Segment] = defaultdict(lambda: Segment(_SMALL_PAGE))  # by pool
    large_segments: dict[str, Segment] = defaultdict(lambda: Segment(_LARGE_PAGE))
    large_segments[_COMPUTE].allocate("before the step", before_step)

    def segment_of(storage: LiveStorage) -> Segment:
        pool = pool_of(storage)
        return large_segments[pool] if storage.bytes > _SMALL else small_segments[pool]

    def free(storages: Iterable[LiveStorage], step: int) -> None:
        for storage in storages:
            segment_of(storage).free((step, storage.node, storage.index))

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
                segment_of(storage).allocate((step, storage.node, storage.index), storage.bytes)
    segments = [*small_segments.values(), *large_segments.values()]
    return sum(segment.reserved for segment in segments)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
