"""All ranks of a small world in one process: their graphs made one by one, then run together.

A collective takes what the ranks of its group hold, in the order of the group, so that a graph
with a group in the wrong order gives other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument, collective_name, is_collective, is_wait
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.testing import become, values_for

Change = Callable[[JointGraph], None]


@dataclass(frozen=True)
class OfRank:
    """One rank's graph, and what is known of it when the rank is another one."""

    joint: JointGraph
    groups: dict[str, tuple[int, ...]]
    made: list[tuple[int, ...]]
    """The groups that the change made, or took part in making."""


def worlds_of(
    sizes: tuple[int, ...], make: Callable[[], JointGraph], change: Change
) -> tuple[list[OfRank], list[OfRank]]:
    """What `make` captures on every rank of a mesh of these sizes, and what `change` does to it."""
    before, after = [], []
    for rank in range(math.prod(sizes)):
        become(rank, math.prod(sizes))
        joint = make()
        before.append(_of_rank(copy_graph(joint), []))
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            change(joint)
        joint.validate()
        after.append(_of_rank(joint, [tuple(call.args[0]) for call in new_group.call_args_list]))
    return before, after


def _of_rank(joint: JointGraph, made: list[tuple[int, ...]]) -> OfRank:
    groups = {str(argument(c.node, "group_name")): c.ranks for c in collectives(joint)}
    return OfRank(joint, groups, made)


def run_world(world: list[OfRank], *, integers: bool = False) -> list[list[torch.Tensor]]:
    """Run every rank's graph, each on other parameters and batches.

    Ranks may have different graphs, but all issue their collectives in step: those of a group at
    once, or it is an AssertionError.

    Args:
        integers: small whole numbers, whose sums are exact in any order.
    """
    ranks = []
    for rank, each in enumerate(world):
        values = values_for(each.joint, seed=rank)
        ranks.append(_rank(each, [(v * 4).round() for v in values] if integers else values))
    returned: list[list[torch.Tensor]] = []
    results: list[torch.Tensor | None] = [None] * len(world)
    while not returned:
        asked = []
        for of_rank, result in zip(ranks, results, strict=True):
            try:
                asked.append(of_rank.send(result))
            except StopIteration as ended:
                returned.append(ended.value)
        assert not (asked and returned), f"these wait for ranks that have ended: {asked}"
        results = [_communicated(asked, rank) for rank in range(len(asked))]
    return returned


class _Asked(NamedTuple):
    """What a rank communicates next."""

    ranks: tuple[int, ...]
    kind: str
    sent: torch.Tensor


def _rank(each: OfRank, values: list[torch.Tensor]) -> Generator[_Asked, torch.Tensor, Any]:
    """One rank, up to each of its collectives."""
    values_of: dict[fx.Node, Any] = dict(zip(each.joint.placeholders(), values, strict=True))
    for node in each.joint.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values_of.__getitem__)
        if node.op == "output":
            return list(args[0])
        if is_collective(node):
            ranks = each.groups[str(argument(node, "group_name"))]
            values_of[node] = yield _Asked(ranks, collective_name(node), args[0])
        elif is_wait(node):
            values_of[node] = args[0]
        elif node.op == "call_function":
            values_of[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph without an output")


def _communicated(asked: list[_Asked], rank: int) -> torch.Tensor:
    """What a rank gets of what all of its group have sent."""
    group, kind, _ = asked[rank]
    assert len({(*asked[r][:2], asked[r].sent.shape) for r in group}) == 1, asked
    parts = [asked[r].sent for r in group]
    if kind == "all_gather_into_tensor":
        return torch.cat(parts)
    if kind == "reduce_scatter_tensor":
        return torch.stack([part.chunk(len(parts))[group.index(rank)] for part in parts]).sum(0)
    assert kind == "all_reduce", kind
    return torch.stack(parts).sum(0)


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
