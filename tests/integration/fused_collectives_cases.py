"""Chains of collectives on real ranks, fused and not, for test_fused_collectives.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graph_trainer as gt
from graph_trainer.core.graph.annotations import is_backward
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.torch_private import c10d_functional
from graph_trainer.core.torch_private_groups import process_groups
from graph_trainer.core.training.step_cache import TrainStep
from tests.unit.core.passes.rank_order import InnerFirst, OuterFirst, sum_of_squares

GATHER = c10d_functional.all_gather_into_tensor.default
REDUCE = c10d_functional.reduce_scatter_tensor.default
ROWS = 24


class Net(nn.Module):
    """Two weights behind each other, so that backward reads one of them."""

    def __init__(self, kind: type[nn.Module], mesh: DeviceMesh) -> None:
        super().__init__()
        self.first, self.second = kind(mesh, ROWS), kind(mesh, ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))[:, :4])


def sharded(kind: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    net = Net(kind, mesh)
    if kind is OuterFirst:
        gt.simple_fsdp(net, mesh["fsdp"])
    return net


def capture(model: nn.Module, x: torch.Tensor, **passes: Any) -> JointGraph:
    joint = gt.capture(model, sum_of_squares, (x,))
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always", **passes))
    check_order_across_ranks(joint)
    return joint


def values(model: nn.Module, joint: JointGraph, x: torch.Tensor) -> list[torch.Tensor]:
    loss, gradients = gt.compile(joint, "eager")(model, x)
    return [loss, *(g.to_local() for g in gradients.values())]


def eager(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = sum_of_squares(model, x)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [loss, *(g.to_local() for g in gradients)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def counts(joint: JointGraph) -> list[int]:
    """Gathers in forward and in backward, and reductions."""
    gathers = joint.graph.find_nodes(op="call_function", target=GATHER)
    backward = sum(map(is_backward, gathers))
    reductions = joint.graph.find_nodes(op="call_function", target=REDUCE)
    return [len(gathers) - backward, backward, len(reductions)]


def compare(kind: type[nn.Module], mesh: DeviceMesh) -> dict[str, Any]:
    model = sharded(kind, mesh)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    reference = eager(model, x)
    chained = capture(model, x, disable_passes=["fuse_chained_all_gathers"])
    fused = capture(model, x)
    result = {
        "chained": counts(chained),
        "fused": counts(fused),
        "chained equals eager": equal(values(model, chained, x), reference),
        "fused equals eager": equal(values(model, fused, x), reference),
    }
    groups = len(process_groups())
    again = capture(model, x)
    result["same groups again"] = (counts(again), len(process_groups())) == (counts(fused), groups)

    with torch.no_grad():  # whole numbers, whose sums are exact in any order
        for parameter in model.parameters():
            parameter.to_local().mul_(8).round_()
    whole = (x * 4).round()
    reference = eager(model, whole)
    reduced = capture(
        model,
        whole,
        passes=["fuse_chained_reduce_scatters", "tag_fsdp_unshards", "rematerialize"],
    )
    result["reduced at once"] = counts(reduced)
    result["reduced at once equals eager"] = equal(values(model, reduced, whole), reference)
    return result


def in_training(kind: type[nn.Module], mesh: DeviceMesh) -> dict[str, Any]:
    """As training does it: ranks agree on the groups, and a batch of another shape on one rank
    alone finds them."""
    model = sharded(kind, mesh)
    step = TrainStep(sum_of_squares, passes=gt.PassConfig(reshard_after_forward="always"))
    same = []
    for rows in (3, 5 if dist.get_rank() == 2 else 3):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        loss, gradients = step(model, x)
        same.append(equal([loss, *(g.to_local() for g in gradients.values())], eager(model, x)))
    return {"equal": same, "counts": [counts(joint) for joint in step.joint_graphs()]}


def run(folder: Path, _: str) -> dict[str, Any]:
    """Every case, on eight ranks."""
    names = ("dp", "fsdp", "tp")
    large = init_device_mesh("cpu", (1, 4, 2), mesh_dim_names=names)
    small = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    results: dict[str, Any] = {}
    for name, mesh in (("4x2", large), ("2x2", small)):
        results[f"inner first {name}"] = compare(InnerFirst, mesh["fsdp", "tp"])
        results[f"outer first {name}"] = compare(OuterFirst, mesh)
    return results | {"training": in_training(OuterFirst, large)}
