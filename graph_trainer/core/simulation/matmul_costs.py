"""The time of matrix products on units that compute them tile by tile.

The arithmetic of tiles and waves is that of NVIDIA's Matrix Multiplication Background User's Guide
(DU-09799-001, 2023): section 2.3 on tiles and their efficiency, 3.1 and 3.2 on quantization.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import torch
from torch import fx

from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.content import once_per_node
from graph_trainer.core.graph.data_sizes import shape_of
from graph_trainer.core.graph.ops import argument, schema_of
from graph_trainer.core.simulation.hardware import Hardware

Tile = tuple[int, int]
"""The rows and columns of the part of a result that one unit computes at a time."""


@dataclass(frozen=True, slots=True)
class Product:
    """One or more matrix products of equal shapes that one op computes."""

    groups: int
    """The number of products: the batch of a batched product, or the groups of a grouped one."""
    rows: int
    """Rows of all results together, divided among the products as evenly as possible."""
    columns: int
    """Columns of each result."""
    depth: float
    """The length of each dot product, the mean over groups that differ."""
    dtype: torch.dtype
    is_grouped: bool = False
    """Whether offsets on the device divide the rows, or the summed dimension, into groups."""


class ProductTime(NamedTuple):
    """The time of a product whose operands arrive in time."""

    seconds: float
    kernels: int


# The tiles that the guide names for cuBLAS (section 2.3).
_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))

# Larger tiles load less for each multiplication (the guide, 2.3). Loading an operand of one row or
# column of a tile delays the tile as much as 18 multiplications: tiles of 128 x 128 and 128 x 160
# compute 4,096 x 7,168 x 16,384 in FP8 at 1,404 and 1,470 TFLOP/s on an H800 (DeepGEMM, pull 74,
# 2025), of which 14 and 11 waves of 132 units explain half. In bf16 both times double.
_BORDER = 18

# A profile's matmul_efficiency is what large square products reach, with their waves and waits:
# 8,192 cubed takes 2 * 8,192 ** 3 FLOPs at that efficiency, in tiles of this shape.
_LARGE = 8192
_LARGE_TILE = (128, 256)

# torch._grouped_mm's tiles for bf16 by major compute capability: for groups of at most 128 rows or
# columns, and for larger ones. Two units work together, so rows are rounded up to two tiles; on
# Blackwell the tile of 256 x 256 is that of two units. From PyTorch's
# aten/src/ATen/native/cuda/GroupMM.cu, dispatch_bf16_grouped_kernel_on_tile_size (2.9 to 2.13).
_SMALL_GROUP = 128
_GROUPED_TILES: dict[int, tuple[Tile, Tile]] = {
    9: ((64, 128), (128, 256)),
    10: ((128, 256), (128, 256)),
}

# The names of the operands of each op in its schema.
_OPERANDS = {
    "aten::mm": ("self", "mat2"),
    "aten::addmm": ("mat1", "mat2"),
    "aten::bmm": ("self", "mat2"),
    "aten::baddbmm": ("batch1", "batch2"),
    "aten::_grouped_mm": ("self", "mat2"),
    "aten::_scaled_mm": ("self", "mat2"),
}


def operands_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the two matrices that a node multiplies, none for any other op."""
    schema = schema_of(node)
    if schema is None or schema.name not in _OPERANDS:
        return ()
    return tuple(tensors_of(argument(node, name))[0] for name in _OPERANDS[schema.name])


def product_of(node: fx.Node) -> Product | None:
    """Return the product that a node computes, None for any other op."""
    schema, operands = schema_of(node), operands_of(node)
    if schema is None or not operands:
        return None
    a, b = operands
    (*batch, rows, depth), columns = shape_of(a), shape_of(b)[-1]
    is_grouped = schema.name == "aten::_grouped_mm"
    if not is_grouped or (a.ndim == 3 and b.ndim == 3):
        groups = batch[0] if batch else 1
        return Product(groups, groups * rows, columns, depth, a.dtype)
    if b.ndim == 3:  # the offsets divide the rows of `a`
        return Product(shape_of(b)[0], rows, columns, depth, a.dtype, is_grouped)
    if a.ndim == 3:  # the offsets divide the columns of `b`, here as rows of the transposed result
        return Product(batch[0], columns, rows, depth, a.dtype, is_grouped)
    groups = shape_of(tensors_of(argument(node, "offs"))[0])[0]  # they divide the summed dimension
    return Product(groups, groups * rows, columns, depth / groups, a.dtype, is_grouped)


products_of = once_per_node(product_of)
"""Maps every node of a graph to the product that it computes, if any. Linear in nodes."""


def product_time(product: Product, hardware: Hardware) -> ProductTime:
    """Return the time of a product on one device, without that of its bytes.

    A unit computes one tile at a time, and waits once for the first operands of a tile and once for
    its results to leave. All units together compute a wave of tiles; the last wave takes as long
    as any, however few tiles it has.
    """
    if hardware.compute_units == 1:  # no tiles: a CPU
        flops = 2 * product.rows * product.columns * product.depth
        return ProductTime(flops / _usable_flops(product, hardware), 1)
    if not product.is_grouped:
        return _plain_time(product, hardware)
    if is_one_by_one(product, hardware):
        rows = ceil(product.rows / product.groups)
        one = _plain_time(replace(product, groups=1, rows=rows, is_grouped=False), hardware)
        least = one.kernels * hardware.launch_seconds
        seconds = product.groups * max(one.seconds, least) + hardware.launch_seconds
        return ProductTime(seconds, product.groups * one.kernels + 1)
    tiles = _GROUPED_TILES[int(hardware.compute_capability)]
    is_small = min(product.rows / product.groups, product.columns) <= _SMALL_GROUP
    tile = tiles[0] if is_small else tiles[1]
    num_tiles = 2 * _tiles_of_rows(product, 2 * tile[0]) * ceil(product.columns / tile[1])
    waves = ceil(num_tiles / hardware.compute_units)
    seconds = waves * _tile_seconds(tile, product.depth, product, hardware)
    # a kernel before it computes the addresses and shapes of the groups
    return ProductTime(seconds + hardware.launch_seconds, 2)


def is_one_by_one(product: Product, hardware: Hardware) -> bool:
    """Return whether the groups of a product are products one after another, which the host
    launches once it has copied the offsets.

    PyTorch's kernel takes bfloat16 on Hopper and Blackwell (aten/src/ATen/native/cuda/
    GroupedBlas.cpp, _grouped_mm_cuda); otherwise `_grouped_mm_fallback` of GroupedMMUtils.h runs.
    """
    if not product.is_grouped or hardware.compute_units == 1:
        return False
    has_kernel = int(hardware.compute_capability) in _GROUPED_TILES
    return not has_kernel or product.dtype is not torch.bfloat16


def _plain_time(product: Product, hardware: Hardware) -> ProductTime:
    """Return the time of the best tiles for a product, as a library chooses them.

    If there are fewer tiles than units, several units may compute parts of each dot product for
    one tile. A second kernel then adds their results, float32, from memory (cuBLAS's split-K).
    """
    memory_speed = hardware.memory_bytes_per_second * hardware.memory_efficiency
    best = ProductTime(float("inf"), 1)
    for tile in _TILES:
        num_tiles = _tiles_of_rows(product, tile[0]) * ceil(product.columns / tile[1])
        parts = 1
        while parts == 1 or parts * num_tiles <= hardware.compute_units:
            waves = ceil(parts * num_tiles / hardware.compute_units)
            seconds = waves * _tile_seconds(tile, product.depth / parts, product, hardware)
            if parts > 1:
                partial_bytes = parts * product.rows * product.columns * torch.float32.itemsize
                seconds += 2 * partial_bytes / memory_speed + hardware.launch_seconds
            if seconds < best.seconds:
                best = ProductTime(seconds, min(parts, 2))
            parts *= 2
    return best


def _tiles_of_rows(product: Product, rows_of_tile: int) -> int:
    """Return the tiles into which the rows of all groups divide; a tile has rows of one group."""
    rows, longer_groups = divmod(product.rows, product.groups)
    shorter = (product.groups - longer_groups) * ceil(rows / rows_of_tile)
    return shorter + longer_groups * ceil((rows + 1) / rows_of_tile)


def _tile_seconds(tile: Tile, depth: float, product: Product, hardware: Hardware) -> float:
    """Return the seconds in which a unit computes one tile, with what it waits for memory."""
    wait = 2 * hardware.memory_latency_seconds
    waves = ceil(_LARGE // _LARGE_TILE[0] * (_LARGE // _LARGE_TILE[1]) / hardware.compute_units)
    large_seconds = 2 * _LARGE**3 / _usable_flops(product, hardware)
    work_per_second = waves * _work(_LARGE_TILE, _LARGE) / (large_seconds - waves * wait)
    return _work(tile, depth) / work_per_second + wait


def _work(tile: Tile, depth: float) -> float:
    """Return a tile's multiplications, and as many as take the time that loading delays it."""
    rows, columns = tile
    return depth * (rows * columns + _BORDER * (rows + columns))


def _usable_flops(product: Product, hardware: Hardware) -> float:
    return hardware.flops(product.dtype) * hardware.clock * hardware.matmul_efficiency
