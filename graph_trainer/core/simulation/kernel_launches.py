"""The kernels of ops that launch several, or that move rows in no order, on a GPU.

From the sources of PyTorch 2.9 to 2.13, named by file; folders are those of aten/src/ATen/native.
Each kernel takes at least a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2, prod
from typing import NamedTuple

import torch
from torch import fx

from graph_trainer.core.graph.annotations import tensor_of, tensors_of
from graph_trainer.core.graph.data_sizes import distinct_bytes, numel_of, shape_of, stride_of
from graph_trainer.core.graph.ops import argument, argument_nodes, schema_of
from graph_trainer.core.simulation.hardware import Hardware

_INDEX = torch.int64.itemsize

# Memory is read and written in sectors of 32 bytes, whatever part of them is used (NVIDIA, CUDA C++
# Best Practices Guide, coalesced access).
_SECTOR = 32

# A table of this size stays in the L2 cache, whose smallest is an A100's of 40 MB, so that a row
# that is read again does not come from memory again.
_CACHED_BYTES = 32 * 2**20

# The part of the speed of reads in order at which rows in no order are read or written. A gather
# of rows of 4 KB and its backward move 4.7 and 4.6 TB/s on a B200 (pytorch/ao, pull 4623, 2026),
# where elementwise kernels move 0.85 of 7.7.
_SCATTERED_SPEED = 0.7

# The kernel that adds rows with the same index: a block has 4 warps, each for an index and 128
# columns; the first warp of an index adds all its rows, one after another, and the others return
# (cuda/Indexing.cu, indexing_backward_kernel). A unit runs 16 such blocks at once, 64 warps.
_WARPS_OF_BLOCK = 4
_COLUMNS_OF_BLOCK = 128
_BLOCKS_OF_UNIT = 16

_FEW_SORTED = 4096  # cuda/Sort.h, should_use_small_sort
_FEW_LOOKUPS = 3072  # cuda/Embedding.cu, embedding_dense_backward_cuda
_RADIX_BITS = 8  # of a pass of cub::DeviceRadixSort (cub, dispatch_radix_sort.cuh, onesweep)
_SEGMENTED_RADIX_BITS = 6  # of a pass of cub::DeviceSegmentedRadixSort (same file)
_SELECT_RADIX_BITS = 2  # cuda/SortingRadixSelect.cuh


class Kernels(NamedTuple):
    """Kernels that run one after another, all alike."""

    launches: int = 1
    bytes: int = 0
    """Bytes that each reads and writes in order."""
    scattered_bytes: int = 0
    """Bytes that each reads and writes in no order, as sectors."""
    blocks: int = 0
    """Blocks that wait for memory in each, `_BLOCKS_OF_UNIT` at a time on a unit."""
    waits: float = 0.0
    """How often a block waits for memory."""

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of all these kernels."""
        bytes_in_order = self.bytes + self.scattered_bytes / _SCATTERED_SPEED
        speed = hardware.memory_bytes_per_second * hardware.memory_efficiency
        rounds = ceil(self.blocks / (hardware.compute_units * _BLOCKS_OF_UNIT))
        waiting = rounds * self.waits * hardware.memory_latency_seconds
        return self.launches * max(bytes_in_order / speed, waiting, hardware.launch_seconds)


class Call(NamedTuple):
    """A call of an op, with what its arguments do not say."""

    node: fx.Node
    in_place: bool
    """Whether the result takes the place of `self`, which nothing else reads."""
    is_compiled: bool
    """Whether a compiler generates the kernels, where it can."""
    adds_bfloat16: bool
    """Whether the device adds a bfloat16 to memory in one instruction."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the value of an argument."""
        return tensor_of(argument(self.node, name))

    def is_tensor(self, name: str) -> bool:
        """Return whether an argument is a tensor, and neither a number nor missing."""
        return isinstance(argument(self.node, name), fx.Node)


_NO_KERNEL: frozenset[str] = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::empty_strided"),
        *("aten::new_empty", "aten::new_empty_strided"),
        *("aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset"),
        # of a number that is on the host: torchtitan copies counts there first
        "aten::_local_scalar_dense",
    }
)
"""Ops that allocate, or that the host computes."""

_LAUNCHES: dict[str, int] = {
    # transformers/cuda/flash_attn/flash_bwd_launch_template.h: products of the output and its
    # gradient, gradients of keys and values, the cast of the gradient of queries
    "aten::_scaled_dot_product_flash_attention_backward": 3,
    "aten::_scaled_dot_product_cudnn_attention_backward": 3,  # as flash attention: estimate
    "aten::_fused_rms_norm_backward": 2,  # cuda/layer_norm_kernel.cu: input; weight
    "aten::histc": 2,  # cuda/SummaryOps.cu: zeros, histogram
    "aten::bincount": 6,  # cuda/SummaryOps.cu: as histc, and least and greatest with a copy each
    "aten::nonzero": 6,  # cuda/Nonzero.cu: count (2) and its copy, selection (2), coordinates
    "aten::repeat_interleave": 3,  # cuda/Repeat.cu: cumsum (2), repetition
}
"""The kernels of further ops that launch several. Their time is that of their FLOPs and bytes."""

_ALLOCATIONS: frozenset[str] = frozenset(
    {
        *("aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::full", "aten::full_like"),
        *("aten::new_full", "aten::ones", "aten::ones_like", "aten::new_ones"),
        *("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"),
    }
)
"""Ops whose result is new. An op that writes to one that nothing else reads writes in place, in
eager autograd and in compiled code, although the op in the graph returns a changed copy."""


def _gather_rows(call: Call, table: torch.Tensor, row_bytes: int, indices: int) -> list[Kernels]:
    written = sum(map(distinct_bytes, tensors_of(call.node)))
    rows = ceil(written / max(1, row_bytes))
    scattered = _scattered(table, rows, row_bytes)
    return [Kernels(bytes=written + indices, scattered_bytes=scattered)]


def _scattered(table: torch.Tensor, rows: int, row_bytes: int) -> int:
    """Return the bytes that move between memory and rows of a table that are read or written."""
    moved = rows * ceil(row_bytes / _SECTOR) * _SECTOR
    table_bytes = distinct_bytes(table)
    return min(moved, table_bytes) if table_bytes <= _CACHED_BYTES else moved


def _index(call: Call) -> list[Kernels]:  # cuda/IndexKernel.cu, index_kernel
    table = call.tensor("self")
    positions = argument(call.node, "indices")
    indices = sum(distinct_bytes(tensor_of(n)) for n in argument_nodes(positions))
    return _gather_rows(call, table, _row_bytes(table, len(positions)), indices)


def _row_bytes(table: torch.Tensor, num_indexed: int) -> int:
    """Return the bytes that are adjacent in a table behind its first, indexed dimensions."""
    return prod(shape_of(table)[num_indexed:]) * table.dtype.itemsize


def _index_select(call: Call) -> list[Kernels]:  # cuda/Indexing.cu, index_select_out_cuda_impl
    table, index = call.tensor("self"), call.tensor("index")
    dim = argument(call.node, "dim") % max(1, table.ndim)
    return _gather_rows(call, table, _row_bytes(table, dim + 1), distinct_bytes(index))


def _embedding(call: Call) -> list[Kernels]:  # index_select of rows
    table, index = call.tensor("weight"), call.tensor("indices")
    return _gather_rows(call, table, _row_bytes(table, 1), distinct_bytes(index))


def _gather(call: Call) -> list[Kernels]:  # cuda/ScatterGatherKernel.cu
    table, index = call.tensor("self"), call.tensor("index")
    return _gather_rows(call, table, _picked_bytes(call, table, index), distinct_bytes(index))


def _picked_bytes(call: Call, table: torch.Tensor, index: torch.Tensor) -> int:
    """Return the bytes that are adjacent in a table for each number of an index of its shape.

    They are a row if the index is expanded over all dimensions behind the indexed one.
    """
    dim = argument(call.node, "dim") % max(1, table.ndim)
    behind = [*zip(shape_of(index), stride_of(index), strict=True)][dim + 1 :]
    if any(size > 1 and stride != 0 for size, stride in behind):
        return table.dtype.itemsize
    return prod(size for size, _ in behind) * table.dtype.itemsize


def _copy_of_self(call: Call) -> list[Kernels]:
    return [] if call.in_place else [Kernels(bytes=2 * distinct_bytes(call.tensor("self")))]


def _scatter(call: Call) -> list[Kernels]:  # cuda/ScatterGatherKernel.cu
    table, index = call.tensor("self"), call.tensor("index")
    read = distinct_bytes(index)
    if call.is_tensor("src"):
        read += distinct_bytes(call.tensor("src"))
    row_bytes = _picked_bytes(call, table, index)
    rows = numel_of(index) * table.dtype.itemsize // max(1, row_bytes)
    scattered = _scattered(table, rows, row_bytes)
    return [*_copy_of_self(call), Kernels(bytes=read, scattered_bytes=scattered)]


def _scatter_add(call: Call) -> list[Kernels]:  # cuda/ScatterGatherKernel.cu: atomic additions
    *copy, kernel = _scatter(call)
    return [*copy, kernel._replace(scattered_bytes=2 * kernel.scattered_bytes)]


def _index_add(call: Call) -> list[Kernels]:  # cuda/Indexing.cu, index_add_cuda_impl: atomic
    table, index, rows = (call.tensor(name) for name in ("self", "index", "source"))
    dim = argument(call.node, "dim") % max(1, table.ndim)
    scattered = 2 * _scattered(table, numel_of(index), _row_bytes(table, dim + 1))
    read = distinct_bytes(rows) + distinct_bytes(index)
    return [*_copy_of_self(call), Kernels(bytes=read, scattered_bytes=scattered)]


def _index_put(call: Call) -> list[Kernels]:
    table, values = call.tensor("self"), call.tensor("values")
    positions = argument(call.node, "indices")
    index = [tensor_of(n) for n in argument_nodes(positions)]
    rows = max(map(numel_of, index), default=1)
    row_bytes = _row_bytes(table, len(positions))
    if argument(call.node, "accumulate", False):
        return [*_copy_of_self(call), *_add_rows(call, table, values, rows, row_bytes)]
    read = distinct_bytes(values) + sum(map(distinct_bytes, index))
    scattered = _scattered(table, rows, row_bytes)  # cuda/IndexKernel.cu, index_put_kernel
    return [*_copy_of_self(call), Kernels(bytes=read, scattered_bytes=scattered)]


def _deterministic_scatter_add(call: Call) -> list[Kernels]:
    """torchtitan's scatter_add of expanded indices: TensorAdvancedIndexing.cpp,
    _scatter_via_index_put. It checks the greatest and the least index on the device, each by a
    reduction, a comparison and an assertion (cuda/Indexing.cu, wrapIndexOnce)."""
    table, index, values = (call.tensor(name) for name in ("out", "index", "src"))
    rows, row_bytes = shape_of(index)[0], _row_bytes(table, 1)
    copy = Kernels(bytes=2 * distinct_bytes(table))
    checks = [Kernels(2, bytes=_INDEX * rows), Kernels(4)]
    return [copy, *checks, *_add_rows(call, table, values, rows, row_bytes, sorts=True)]


def _add_rows(
    call: Call,
    table: torch.Tensor,
    values: torch.Tensor,
    rows: int,
    row_bytes: int,
    sorts: bool = False,
) -> list[Kernels]:
    """Return the kernels that add rows to rows of a table by index.

    PyTorch sorts the indices (cuda/Indexing.cu, index_put_with_sort_kernel). A compiler adds rows
    atomically where it can (torch/_inductor/utils.py, needs_fallback_due_to_atomic_add_limitations)
    and `sorts` is False.
    """
    read = distinct_bytes(values)
    is_atomic = table.dtype is not torch.bfloat16 or call.adds_bfloat16
    if call.is_compiled and is_atomic and not sorts:
        scattered = 2 * _scattered(table, rows, row_bytes)
        return [Kernels(bytes=read + _INDEX * rows, scattered_bytes=scattered)]
    rows_of_table = max(1, numel_of(table) * table.dtype.itemsize // max(1, row_bytes))
    changed_rows = min(rows, rows_of_table)
    columns = row_bytes // table.dtype.itemsize
    blocks = min(ceil(rows / _WARPS_OF_BLOCK), changed_rows) * ceil(columns / _COLUMNS_OF_BLOCK)
    added = Kernels(
        bytes=2 * _INDEX * rows,
        scattered_bytes=read + 2 * changed_rows * ceil(row_bytes / _SECTOR) * _SECTOR,
        blocks=blocks,
        waits=2 + rows / max(1, changed_rows),  # for both indices of a row, then for each row
    )
    return [
        Kernels(3, bytes=2 * _INDEX * rows),  # remainder, times the stride, divided by the row
        Kernels(bytes=_INDEX * rows),  # arange
        *_radix_sort(rows, key_bytes=_INDEX, value_bytes=_INDEX, bits=_bits(rows_of_table)),
        added,
    ]


def _bits(count: int) -> int:
    """Return the bits of numbers below a count."""
    return max(1, ceil(log2(max(1, count))))


def _radix_sort(count: int, *, key_bytes: int, value_bytes: int, bits: int) -> list[Kernels]:
    """Return the kernels of cub::DeviceRadixSort of pairs or, with no value, of keys."""
    passes = ceil(bits / _RADIX_BITS)
    return [
        Kernels(),  # clears the counts
        Kernels(bytes=key_bytes * count),  # counts digits
        Kernels(),  # sums the counts
        Kernels(passes),  # clears what the blocks of a pass tell each other
        Kernels(passes, bytes=2 * (key_bytes + value_bytes) * count),
    ]


def _sort(call: Call) -> list[Kernels]:  # cuda/Sort.cpp, cuda/SortStable.cu
    keys = call.tensor("self")
    count, key_bytes = numel_of(keys), keys.dtype.itemsize
    length = shape_of(keys)[argument(call.node, "dim", -1)] if keys.ndim else 1
    segments = count // max(1, length)
    pairs = 2 * (key_bytes + _INDEX) * count
    if length <= _FEW_SORTED:  # arange, spread over the rows, copy of the keys, sort in place
        first = [Kernels(bytes=_INDEX * length), Kernels(bytes=_INDEX * count)]
        return [*first, Kernels(bytes=2 * key_bytes * count), Kernels(bytes=pairs)]
    fill = Kernels(bytes=_INDEX * count)
    if segments == 1:
        bits = 8 * key_bytes
        return [fill, *_radix_sort(count, key_bytes=key_bytes, value_bytes=_INDEX, bits=bits)]
    if segments < 128:  # by key, then by segment, then into place
        by_key = _radix_sort(count, key_bytes=key_bytes, value_bytes=_INDEX, bits=8 * key_bytes)
        by_segment = _radix_sort(count, key_bytes=_INDEX, value_bytes=0, bits=_bits(segments))
        return [fill, *by_key, *by_segment, Kernels(bytes=pairs)]
    return [fill, Kernels(ceil(8 * key_bytes / _SEGMENTED_RADIX_BITS), bytes=pairs)]


def _topk(call: Call) -> list[Kernels]:  # cuda/TensorTopK.cu, sbtopk::gatherTopK
    keys = call.tensor("self")
    result = sum(map(distinct_bytes, tensors_of(call.node)))
    # reads a row for each digit, then for those above the last one and for those equal to it
    passes = ceil(8 * keys.dtype.itemsize / _SELECT_RADIX_BITS) + 2
    selection = Kernels(bytes=passes * distinct_bytes(keys) + result)
    in_order = argument(call.node, "sorted", True)
    return [selection, Kernels(bytes=2 * result)] if in_order else [selection]


def _cumsum(call: Call) -> list[Kernels]:  # cuda/ScanUtils.cuh, scan_dim
    source, result = call.tensor("self"), tensor_of(call.node)
    both = distinct_bytes(source) + distinct_bytes(result)
    if call.is_compiled:
        return [Kernels(bytes=both)]
    cast = [Kernels(bytes=both)] if source.dtype is not result.dtype else []
    is_flat = numel_of(source) == shape_of(source)[argument(call.node, "dim")]
    begin = [Kernels()] if is_flat else []  # cub::DeviceScan prepares the states of its blocks
    return [*cast, *begin, Kernels(bytes=2 * distinct_bytes(result))]


def _embedding_backward(call: Call) -> list[Kernels]:
    """cuda/Embedding.cu and cuda/EmbeddingBackwardKernel.cu: rows of the gradient with the same
    index are added in parts of ten, in float32, and the sums of parts are added and written."""
    rows, table = call.tensor("grad_output"), tensor_of(call.node)
    count, row_bytes = numel_of(call.tensor("indices")), _row_bytes(table, 1)
    clear = Kernels(bytes=distinct_bytes(table))
    scattered = _scattered(table, min(count, shape_of(table)[0]), row_bytes)
    read = distinct_bytes(rows)
    if call.is_compiled:  # index_put of torch's decomposition
        return [clear, *_add_rows(call, table, rows, count, row_bytes)]
    if count <= _FEW_LOOKUPS:
        return [clear, Kernels(bytes=_INDEX * count, scattered_bytes=read + 2 * scattered)]
    bits = _bits(shape_of(table)[0])
    partial = numel_of(rows) * torch.float32.itemsize
    return [
        clear,
        Kernels(bytes=_INDEX * count),  # arange
        *_radix_sort(count, key_bytes=_INDEX, value_bytes=_INDEX, bits=bits),
        # first of each index (2), parts of each, their sums (2), number of parts, first of each
        Kernels(7, bytes=2 * _INDEX * count),
        Kernels(bytes=partial, scattered_bytes=read),
        Kernels(bytes=partial, scattered_bytes=scattered),
    ]


def _unique(call: Call) -> list[Kernels]:  # cuda/UniqueCub.cu
    keys = call.tensor("self")
    count, key_bytes = numel_of(keys), keys.dtype.itemsize
    by_key = _radix_sort(count, key_bytes=key_bytes, value_bytes=_INDEX, bits=8 * key_bytes)
    # arange, sort, differences of neighbors, their sum (2), first of each value (2), copied count
    return [Kernels(bytes=_INDEX * count), *by_key, Kernels(6, bytes=2 * _INDEX * count)]


_ROW_OPS: dict[str, Callable[[Call], list[Kernels]]] = {
    "aten::index": _index,
    "aten::index_select": _index_select,
    "aten::embedding": _embedding,
    "aten::gather": _gather,
    **dict.fromkeys(("aten::scatter", "aten::scatter_"), _scatter),
    **dict.fromkeys(("aten::scatter_add", "aten::scatter_add_"), _scatter_add),
    **dict.fromkeys(("aten::index_add", "aten::index_add_"), _index_add),
    **dict.fromkeys(("aten::index_put", "aten::index_put_"), _index_put),
    "aten::_index_put_impl_": _index_put,
    "torchtitan::deterministic_scatter_add": _deterministic_scatter_add,
    **dict.fromkeys(("aten::sort", "aten::argsort"), _sort),
    "aten::topk": _topk,
    "aten::cumsum": _cumsum,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_unique2": _unique,
}
"""Returns the kernels of an op by its name."""


def moves_rows(node: fx.Node) -> bool:
    """Return whether an op moves rows of a table, or sorts."""
    schema = schema_of(node)
    return schema is not None and schema.name in _ROW_OPS


def row_kernels(node: fx.Node, is_compiled: bool, hardware: Hardware) -> list[Kernels] | None:
    """Return the kernels of an op that moves rows, in order; None for any other op."""
    schema = schema_of(node)
    if schema is None or schema.name not in _ROW_OPS:
        return None
    if any(t.dtype is torch.bool for t in _indices(node)):  # a mask, which selects no rows
        return None
    target = argument(node, "self")
    in_place = schema.name.endswith("_") or (
        isinstance(target, fx.Node) and _is_new(target) and len(target.users) == 1
    )
    # Triton has no such addition before Hopper
    adds_bfloat16 = hardware.compute_capability >= 9
    return _ROW_OPS[schema.name](Call(node, in_place, is_compiled, adds_bfloat16))


def runs_no_kernel(node: fx.Node) -> bool:
    """Return whether a node only allocates, or runs on the host."""
    schema = schema_of(node)
    return schema is not None and schema.name in _NO_KERNEL


def launches_of(node: fx.Node) -> int:
    """Return the kernels that an eager op launches whose time is that of its FLOPs and bytes."""
    schema = schema_of(node)
    return 1 if schema is None else _LAUNCHES.get(schema.name, 1)


def _indices(node: fx.Node) -> list[torch.Tensor]:
    positions = argument(node, "indices")
    return [t for n in argument_nodes(positions) for t in tensors_of(n)]


def _is_new(node: fx.Node) -> bool:
    schema = schema_of(node)
    return schema is not None and schema.name in _ALLOCATIONS
