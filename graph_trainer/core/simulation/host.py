"""What a step costs the process of a rank: the seconds to issue every node, and where it waits for
the device to read a value."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import fx

from graph_trainer.core.analysis.fusible import free_nodes
from graph_trainer.core.graph.annotations import (
    block_of,
    is_backward,
    is_recomputed,
    module_of,
    phase_of,
    role_of,
    tensors_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import aten, is_collective, is_getitem, is_wait
from graph_trainer.core.simulation.fusion import Fusion
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.matmul_costs import is_one_by_one, product_of
from graph_trainer.core.simulation.op_costs import Cost
from graph_trainer.core.simulation.runtimes import Runtime


class Checkpoints(StrEnum):
    """How an eager program recomputes its blocks."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


class Dispatch(NamedTuple):
    """What the ops of a program under autograd pass before their kernels are launched."""

    dtensors: bool = False
    """Whether it computes with DTensors, as under tensor parallelism."""
    checkpoints: Checkpoints = Checkpoints.NONE


PLAIN = Dispatch()


def host_seconds(
    joint: JointGraph,
    cost: dict[fx.Node, Cost],
    fusion: Fusion,
    hardware: Hardware,
    runtime: Runtime,
    dispatch: Dispatch = PLAIN,
    compiles: bool = False,
) -> dict[fx.Node, float]:
    """Return by node the seconds that the host takes to issue it; none for most nodes without a
    kernel. Linear in nodes.

    A compiled program launches a kernel a fused group, and its views are free. An eager program
    under autograd (see `Runtime.is_torchtitan`) records the ops of forward, and its backward is
    called by autograd's engine. The nodes of an unshard or a reduction of a program with FSDP2 are
    part of FSDP2's hooks, which cost as much for any number of parameters. Ops on tensors in host
    memory cost nothing.

    Args:
        cost, fusion: of the graph.
        compiles: whether the backend compiles what the runtime lets it see.
    """
    host = hardware.host
    is_free = free_nodes(joint.graph)
    seconds: dict[fx.Node, float] = {}
    launched: set[int] = set()  # fused groups
    hooked: set[object] = set()  # blocks whose hooks have been counted, by phase and role
    checkpoint = {
        Checkpoints.NONE: 0.0,
        Checkpoints.FULL: host.checkpoint_seconds,
        Checkpoints.SELECTIVE: host.checkpoint_seconds + host.selective_seconds,
    }[dispatch.checkpoints]
    has_device = not _all_on_host([t for n in joint.placeholders() for t in tensors_of(n)])
    part: object = None  # block and phase of the compiled program that runs
    for node in joint.graph.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        phase, role, block = phase_of(node), role_of(node), block_of(module_of(node))
        if role is not None and runtime.is_torchtitan:
            hooks = (block, phase, role)
            if is_collective(node) and hooks not in hooked:
                hooked.add(hooks)
                seconds[node] = host.fsdp_seconds
            continue
        if is_collective(node):
            seconds[node] = host.start_collective_seconds
            continue
        if is_wait(node) or (has_device and _is_on_host(node)):
            continue
        launches = max(1, cost[node].launches)
        if compiles and runtime.compiled(node):
            group = fusion.group.get(node)
            if is_free[node] or group in launched:
                continue
            if group is not None:
                launched.add(group)
            seconds[node] = host.compiled_seconds + (launches - 1) * host.next_kernel_seconds
            program = (block, phase) if runtime.is_torchtitan else True
            if program != part:
                part = program
                seconds[node] += host.graph_seconds
            continue
        group = fusion.group.get(node)  # of nodes that are one op of the eager program
        if group in launched:
            continue
        if group is not None:
            launched.add(group)
        by_engine = runtime.is_torchtitan and is_backward(node) and not is_recomputed(node)
        issue = host.view_seconds
        if not is_free[node]:
            issue = host.backward_seconds if by_engine else host.op_seconds
            issue += (launches - 1) * host.next_kernel_seconds
        if runtime.is_torchtitan and dispatch.dtensors:
            issue += host.dtensor_seconds
        if runtime.is_torchtitan and not by_engine:
            issue += host.autograd_seconds + (checkpoint if block is not None else 0.0)
        seconds[node] = issue
    return seconds


def reads_on_host(node: fx.Node) -> bool:
    """Return whether the host waits for the device to read what a node computes.

    A copy to host memory that is not asynchronous, a value read into Python, and ops whose data
    decide the size of their result.
    """
    if node.target in _READ:
        return not _is_on_host(node)
    if node.target is aten._to_copy.default and not node.kwargs.get("non_blocking"):
        return _all_on_host(tensors_of(node)) and not _is_on_host(node)
    return node.target is aten.repeat_interleave.Tensor and node.kwargs.get("output_size") is None


def reads_before_kernels(node: fx.Node, hardware: Hardware) -> bool:
    """Return whether an op copies to the host what its kernels depend on: the offsets of groups
    that are multiplied one by one."""
    product = product_of(node) if hardware.device == "cuda" else None
    return product is not None and is_one_by_one(product, hardware)


_READ = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten._unique2.default,
}


def _is_on_host(node: fx.Node) -> bool:
    """Return whether a node computes with tensors in host memory alone."""
    return _all_on_host([t for source in node.all_input_nodes for t in tensors_of(source)])


def _all_on_host(tensors: list[torch.Tensor]) -> bool:
    return bool(tensors) and all(t.device.type == "cpu" for t in tensors)
