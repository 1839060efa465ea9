"""The time that each node of a graph takes on some hardware, from its FLOPs and its bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import log
from typing import NamedTuple, cast

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from graph_trainer.core.analysis.fusible import free_nodes
from graph_trainer.core.graph.annotations import tensor_of, tensors_of, value_of
from graph_trainer.core.graph.content import once_per_node
from graph_trainer.core.graph.data_sizes import distinct_bytes, nbytes_of, sized, stride_of
from graph_trainer.core.graph.host_copies import starts_copy
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    OpOverload,
    Storage,
    argument,
    aten,
    is_collective,
    schema_of,
    storage_roots,
)
from graph_trainer.core.simulation.fusion import NO_FUSION, Fusion
from graph_trainer.core.simulation.hardware import Hardware, OpKind
from graph_trainer.core.simulation.kernel_launches import (
    Kernels,
    launches_of,
    moves_rows,
    row_kernels,
    runs_no_kernel,
)
from graph_trainer.core.simulation.matmul_costs import (
    Product,
    ProductTime,
    operands_of,
    product_time,
    products_of,
)
from graph_trainer.core.torch_private import inputs_of


class CostKind(StrEnum):
    """What determines the time of a node."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"
    FREE = "free"
    HOST_COPY = "host_copy"
    """A GPU's copy to host memory or back, on the link's stream."""


class Cost(NamedTuple):
    """The cost of one node on the compute stream."""

    kind: CostKind
    seconds: float
    flops: int
    bytes: int
    """Bytes read from and written to memory."""
    launches: int = 1
    """Kernels that the host launches: none for views and for all but one node of a fused group."""


_FREE = Cost(CostKind.FREE, 0.0, 0, 0, launches=0)

# torch's counter knows the kernel for GPUs; the kernel for CPUs computes the same.
_SAME_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}

# Ops that read as many rows of a table as they write.
_LOOKUPS = {
    "aten::embedding",
    "aten::gather",
    "aten::index",
    "aten::index_select",
    "aten::nll_loss_forward",
}

# Ops that use the shape of their first argument, or overwrite it, and do not read it.
_READ_NOT_SELF = {
    "aten::copy_",
    "aten::fill_",
    "aten::full_like",
    "aten::new_full",
    "aten::new_ones",
    "aten::new_zeros",
    "aten::nll_loss_backward",
    "aten::ones_like",
    "aten::rand_like",
    "aten::randn_like",
    "aten::zero_",
    "aten::zeros_like",
}

# Allocates the buffer of an all-gather and writes the part of one rank: from the bucketing of
# torch._inductor.fx_passes, in graphs that other tools captured.
_WRITE_ONE_PART = {"bucketing::_pre_bucket_all_gather"}


def costs(joint: JointGraph, hardware: Hardware, fusion: Fusion = NO_FUSION) -> dict[fx.Node, Cost]:
    """Return the cost of every node on one rank. Linear in nodes.

    Collectives and a GPU's copies to host memory and back cost nothing here: they take the time of
    links. Any other node takes the time of its bytes, or that of its FLOPs if it is longer: of a
    product by its tiles, of others at the efficiency of their kind. Each kernel takes at least a
    launch. A fused group is launched once, reads each storage from outside at most once, and writes
    only storages that other nodes read. On a GPU an op that moves rows takes the time of its
    kernels. What a calibrated profile measured by size holds for ops that are not fused.
    """
    on_gpu = hardware.device != "cpu"
    is_free = free_nodes(joint.graph)
    flops_by_node = _flops_by_node(joint.graph)
    products = products_of(joint.graph)
    product_times: dict[Product, ProductTime] = {}
    roots = storage_roots(joint.graph)
    size = _sizes(joint.graph)
    # what a fused group has read so far: nodes, and of each storage the bytes
    read_by: dict[int, tuple[set[fx.Node], dict[Storage, int]]] = {}
    speed = hardware.memory_bytes_per_second * hardware.memory_efficiency
    measured = Curves(hardware)

    def traffic_of(node: fx.Node) -> tuple[int, int]:
        """Return the bytes that a node moves, and the kernels that are launched for it."""
        group = fusion.group.get(node)
        written, reads = _traffic_alone(node, size)
        if group is None:
            return written + sum(reads.values()), launches_of(node) if on_gpu else 1
        launches = int(group not in read_by)
        already_read, bytes_read = read_by.setdefault(group, (set(), {}))
        moved = 0 if roots[node] in fusion.kept_inside else written
        for source, num in reads.items():
            root = roots[source]
            if source in already_read or fusion.group.get(root[0]) == group:
                continue
            # several views may be parts of a storage, or all of it
            before = bytes_read.get(root, 0)
            bytes_read[root] = max(before, min(before + num, size[root[0]]))
            moved += bytes_read[root] - before
            if num:
                already_read.add(source)
        return moved, launches

    cost = {}
    for node in joint.graph.nodes:
        if is_free[node] or node.op != "call_function" or is_collective(node):
            cost[node] = _FREE
            continue
        if on_gpu and runs_no_kernel(node):
            cost[node] = _FREE
            continue
        if on_gpu and starts_copy(node):
            num = nbytes_of(tensor_of(node))
            cost[node] = Cost(CostKind.HOST_COPY, seconds=0.0, flops=0, bytes=num)
            continue
        if on_gpu and node not in fusion.group:
            kernels = row_kernels(node, fusion.is_compiled(node), hardware)
            if kernels is not None:
                of_kernels = _cost_of_kernels(kernels, hardware)
                scale = measured.of_node(node, OpKind.ROWS, of_kernels.bytes)
                cost[node] = of_kernels._replace(seconds=of_kernels.seconds * scale)
                continue
        moved, launches = traffic_of(node)
        flops, kind = flops_by_node[node]
        seconds = moved / speed
        product = products[node]
        if product is None and not flops and node not in fusion.group:
            measured_as = OpKind.ROWS if moves_rows(node) else OpKind.MEMORY
            seconds *= measured.of_node(node, measured_as, moved)
        if product is not None:
            if product not in product_times:
                product_times[product] = product_time(product, hardware)
            by_tiles, launches = product_times[product]
            by_tiles *= measured.of_node(node, OpKind.MATMUL, flops)
            seconds = max(seconds, by_tiles)
        elif flops:
            peak = hardware.flops(dtype_of(node) or torch.float32) * hardware.clock
            measured_as, efficiency = OpKind.MATMUL, hardware.matmul_efficiency
            if kind is CostKind.ATTENTION:
                measured_as, efficiency = OpKind.ATTENTION, hardware.attention_efficiency
            scale = measured.of_node(node, measured_as, flops)
            seconds = max(seconds, flops / (peak * efficiency) * scale)
        seconds = max(seconds, launches * hardware.launch_seconds)
        cost[node] = Cost(kind, seconds, flops, moved, launches)
    return cost


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a node's first input, None for a node without tensors."""
    return next((t.dtype for n in inputs_of(node) for t in tensors_of(n)), None)


class Curves:
    """The measured efficiencies of a calibrated profile, by kind, op, dtype and size."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        points: dict[tuple[str, str | None, str | None], dict[float, float]] = {}
        for entry in hardware.efficiencies:
            curve = points.setdefault((entry.kind, entry.op, entry.dtype), {})
            curve[log(max(entry.size, 1.0))] = entry.efficiency
        self._curves = {key: sorted(curve.items()) for key, curve in points.items()}

    def slowdown(self, kind: OpKind, op: str, dtype: str, size: float) -> float:
        """Return by what to multiply a time at the efficiency of the kind, for that at a size.

        The efficiency is measured for the op, else for ops of its kind and dtype, else for those
        of its kind; where nothing was measured it is that of the kind, and the result 1.
        """
        for key in ((kind, op, dtype), (kind, None, dtype), (kind, None, None)):
            curve = self._curves.get(key)
            if curve is not None:
                return self._hardware.scalar_efficiency(kind) / _interpolated(curve, size)
        return 1.0

    def of_node(self, node: fx.Node, kind: OpKind, size: float) -> float:
        """Return `slowdown` of an op of a graph."""
        if not self._curves:
            return 1.0
        dtype = str(dtype_of(node)).removeprefix("torch.")
        return self.slowdown(kind, measured_name(node), dtype, size)


def measured_name(node: fx.Node) -> str:
    """Return the name of a node's op, with the order in memory of both operands of a matmul: n for
    rows and t for columns, as in "aten::mm nt"."""
    schema = schema_of(node)
    if schema is None:
        return ""
    operands = operands_of(node)
    return f"{schema.name} {orders_of(operands)}" if operands else schema.name


def orders_of(operands: Sequence[torch.Tensor]) -> str:
    """Return "n" for each matrix whose rows are adjacent in memory, and "t" for each other one."""
    return "".join("n" if stride_of(t)[-1] == 1 else "t" for t in operands)


def _interpolated(curve: list[tuple[float, float]], size: float) -> float:
    """Return the efficiency at a size, linear in the logarithm of the size."""
    where = log(max(size, 1.0))
    place = bisect_left(curve, (where, 0.0))
    if place in (0, len(curve)):
        return curve[min(place, len(curve) - 1)][1]
    (low, below), (high, above) = curve[place - 1 : place + 1]
    return below + (above - below) * (where - low) / (high - low)


def _cost_of_kernels(kernels: list[Kernels], hardware: Hardware) -> Cost:
    """Return the cost of an op that launches kernels one after another."""
    return Cost(
        CostKind.MEMORY,
        seconds=sum(part.seconds(hardware) for part in kernels),
        flops=0,
        bytes=sum(part.launches * (part.bytes + part.scattered_bytes) for part in kernels),
        launches=sum(part.launches for part in kernels),
    )


def _traffic_alone(node: fx.Node, size: Mapping[fx.Node, int]) -> tuple[int, dict[fx.Node, int]]:
    """Return the bytes that a node writes and those that it reads of each input, without fusion."""
    written = size[node]
    reads = {source: size[source] for source in inputs_of(node)}
    schema = schema_of(node)
    name = "" if schema is None else schema.name
    if name in _WRITE_ONE_PART:
        ranks = argument(node, "group_size")
        assert isinstance(ranks, int)
        return written // ranks, reads
    if name in _READ_NOT_SELF:
        overwritten = argument(node, "self")
        if overwritten in reads:
            reads[overwritten] = 0
    if name in _LOOKUPS:
        reads = {source: min(num, written) for source, num in reads.items()}
    return written, reads


@once_per_node
def _sizes(node: fx.Node) -> int:
    """Return the bytes of a node's tensors, in which an expanded dimension counts once."""
    return sum(map(distinct_bytes, tensors_of(node)))


def flops_of(node: fx.Node) -> tuple[int, CostKind]:
    """Return the FLOPs of a node by torch's flop counter, 0 for an op that it does not know.

    Causal attention computes half of the scores; the counter counts all of them.
    """
    schema = schema_of(node)
    if schema is None:
        return 0, CostKind.MEMORY
    assert isinstance(node.target, OpOverload)
    packet = node.target.overloadpacket
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: sized(value_of(n)))
    if packet is aten._grouped_mm:  # products of groups, which torch's counter does not know
        # Every row of `a` belongs to one group, or every column if the groups are along the summed
        # dimension. If offsets divide the columns of `b`, each column belongs to one group too.
        a, b = cast(tuple[torch.Tensor, torch.Tensor], args[:2])
        columns = b.shape[-1] if a.ndim == 2 or b.ndim == 3 else b.shape[-1] / a.shape[0]
        return int(2 * a.numel() * columns), CostKind.MATMUL
    count = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    if count is None:
        return 0, CostKind.MEMORY
    if packet in _SAME_FLOPS:
        kwargs = {}
        args = args[:4] if "backward" in schema.name else args[:3]
    flops = int(count(*args, **kwargs, out_val=sized(value_of(node))))
    if "attention" not in schema.name:
        return flops, CostKind.MATMUL
    if is_causal(node):
        flops //= 2
    return flops, CostKind.ATTENTION


_flops_by_node = once_per_node(flops_of)


def is_causal(node: fx.Node) -> bool:
    """Return whether an attention kernel masks later positions."""
    return bool(argument(node, "is_causal", argument(node, "custom_mask_type")))
