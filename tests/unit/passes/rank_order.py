"""All ranks of a small world in one process: their graphs made one by one, then run in step.

A collective takes what the ranks of its group hold, in the order of the group, so that a graph
with a group in the wrong order gives other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import graph_trainer as gt
from graph_trainer.analysis.collectives import collectives
from graph_trainer.compat import group_ranks
from graph_trainer.joint_graph import JointGraph
from tests.unit.fake_ranks import become
from tests.unit.graphs import values_for

Change = Callable[[JointGraph], None]


@dataclass(frozen=True)
class OfRank:
    """One rank's graph, and what is known of it when the rank is another one."""

    joint: JointGraph
    groups: dict[str, tuple[int, ...]]
    made: list[tuple[int, ...]]
    """The groups that the change made, or took part in making."""


def world_of(
    sizes: tuple[int, ...], make: Callable[[], JointGraph], change: Change | None = None
) -> list[OfRank]:
    """What `make` captures on every rank of a mesh of these sizes, and `change` does to it."""
    found = []
    for rank in range(math.prod(sizes)):
        become(rank, math.prod(sizes))
        joint = make()
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            if change is not None:
                change(joint)
        made = [tuple(call.args[0]) for call in new_group.call_args_list]
        joint.validate()
        groups = {str(c.node.args[-1]): c.ranks for c in collectives(joint, group_ranks)}
        found.append(OfRank(joint, groups, made))
    return found


def run_world(world: list[OfRank], *, integers: bool = False) -> list[list[torch.Tensor]]:
    """What each rank's graph returns, for parameters and batches of its own.

    Arguments:
        integers: small whole numbers, whose sums are exact in any order.
    """
    held: list[dict[fx.Node, Any]] = []
    for rank, each in enumerate(world):
        values = values_for(each.joint, seed=rank)
        if integers:
            values = [(v * 4).round() for v in values]
        held.append(dict(zip(each.joint.placeholders(), values, strict=True)))
    for nodes in zip(*(each.joint.graph.nodes for each in world), strict=True):
        assert len({str(node.target) for node in nodes[:1] if node.op != "output"}) <= 1
        results = [_of(rank, node, nodes, world, held) for rank, node in enumerate(nodes)]
        for node, own, result in zip(nodes, held, results, strict=True):
            own.setdefault(node, result)
    return [own[each.joint.output_node()] for own, each in zip(held, world, strict=True)]


def _of(rank: int, node: fx.Node, nodes: Any, world: list[OfRank], held: Any) -> Any:
    def at(member: int, value: Any) -> Any:
        return fx.map_arg(value, held[member].__getitem__)

    name = str(node.target)
    if node.op == "placeholder":
        return None
    if node.op == "output":
        return list(at(rank, node.args[0]))
    if "c10d" not in name:
        return node.target(*at(rank, node.args), **at(rank, node.kwargs))
    sent = node.args[0]
    if "wait_tensor" in name:
        return at(rank, sent)
    ranks = world[rank].groups[str(node.args[-1])]
    parts = [at(member, nodes[member].args[0]) for member in ranks]
    if "all_gather_into_tensor" in name:
        return torch.cat(parts)
    if "reduce_scatter_tensor" in name:
        own = ranks.index(rank)
        return torch.stack([part.chunk(len(ranks))[own] for part in parts]).sum(0)
    raise NotImplementedError(name)


class InnerFirst(nn.Module):
    """A weight split by rows over all axes of a mesh, gathered from the last axis to the first."""

    def __init__(self, mesh: DeviceMesh, rows: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.mesh, self.dtype = mesh, dtype
        placements = [Shard(0)] * mesh.ndim
        whole = torch.randn(rows, 4)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.dtype is None else self.weight.to(self.dtype)
        whole = weight.redistribute(self.mesh, [Replicate()] * self.mesh.ndim)
        local = whole.to_local(grad_placements=[Partial()] * self.mesh.ndim)
        return x @ local.to(x.dtype).t()


class OuterFirst(nn.Module):
    """A weight that FSDP gathers over the first axis and the model over the second."""

    def __init__(self, mesh: DeviceMesh, rows: int) -> None:
        super().__init__()
        self.tp = mesh["tp"]
        whole = torch.randn(rows, 4)
        self.weight = nn.Parameter(
            distribute_tensor(whole, self.tp, [Shard(0)], src_data_rank=None)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.weight.redistribute(self.tp, [Replicate()])
        return x @ whole.to_local(grad_placements=[Partial()]).t()


def sum_of_squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients are whole numbers for whole numbers."""
    return model(x).square().sum()


def inner_first(*sizes: int, rows: int = 24, dtype: torch.dtype | None = None) -> JointGraph:
    """The captured step of a weight gathered over every axis, the last one first."""
    torch.manual_seed(0)
    model = InnerFirst(init_device_mesh("cpu", sizes), rows, dtype)
    return gt.capture(model, sum_of_squares, (torch.randn(3, 4),))


def outer_first(*sizes: int, rows: int = 24, replicate: int = 1) -> JointGraph:
    """The captured step of a weight gathered over the first axis first, on a mesh that may be
    one of `replicate` slices of the world."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (replicate, *sizes), mesh_dim_names=("dp", "fsdp", "tp"))
    model = OuterFirst(mesh, rows)
    gt.simple_fsdp(model, mesh["fsdp"])
    return gt.capture(model, sum_of_squares, (torch.randn(3, 4),))
