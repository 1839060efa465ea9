"""Gradients that are added up over microbatches and reduced once, beside a reduction in each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_trainer as gt
from graph_trainer.core.analysis.one_process import OneProcess, same_random_numbers
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.partition.cut import cut
from graph_trainer.core.pipeline.reduce_once import reduce_once, unreduced_bytes
from graph_trainer.core.sharding.simple_fsdp import Mode, ShardOver
from graph_trainer.testing import assert_same, fake_mesh, values_for

WIDTH = 6
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layers(nn.Module):
    """Weights of odd sizes, one of them frozen and one read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.norm(self.up(x)).tanh())
        return self.frozen(x + self.down(self.up(x)))


def captured(
    mode: Mode = "fully_shard",
    sizes: int | tuple[int, int] = 4,
    *,
    merged: bool = True,
    alone: bool = False,
) -> JointGraph:
    """The graph of a stage; with `alone`, no other rank has one of its parameters, as with experts
    that are parallel over all ranks, and its gradient is not even cast."""
    mesh = fake_mesh(sizes)
    one = init_device_mesh("cpu", (1,)) if alone else mesh

    def shard_over(name: str, parameter: nn.Parameter) -> ShardOver:
        return ShardOver(mesh=one if name == "up.bias" else mesh, mode=mode)

    module = gt.simple_fsdp(
        *(Layers(), mesh, mode),
        mp_policy=MixedPrecisionPolicy() if alone else BF16,
        gradient_divide_factor=1.0,
        shard_over=shard_over,
    )
    dtype = torch.float32 if alone else torch.bfloat16
    joint = gt.capture_stage(module, (torch.randn(4, WIDTH, dtype=dtype),))
    gt.run_passes(joint, gt.PassConfig(bitwise=not merged, pipeline_parallel=True))
    return joint


@pytest.mark.parametrize(
    ("mode", "sizes", "options"),
    [
        ("fully_shard", 2, {}),
        ("fully_shard", 4, {}),
        ("fully_shard", 4, {"merged": False}),
        ("fully_shard", 4, {"alone": True}),
        ("hybrid_shard", (2, 2), {}),
        ("hybrid_shard", (2, 3), {"merged": False}),
        ("replicate", 2, {}),
    ],
)
def test_the_sum_is_that_of_gradients_reduced_in_each_microbatch(
    mode: Mode, sizes: int | tuple[int, int], options: dict[str, bool]
) -> None:
    joint = captured(mode, sizes, **options)
    backward = cut(joint).backward
    code = backward.graph_module.code
    split = reduce_once(backward)
    assert split is not None and backward.graph_module.code == code
    sums = split.zeros(torch.device("cpu"))
    assert {value.dtype for value in sums} == {torch.float32}
    expected: Counter[str] = Counter()
    for _ in range(3):
        values = values_for(backward)
        with same_random_numbers(), torch.no_grad():
            whole = named(backward, values)
            of_microbatch = named(split.backward, [*values, *sums])
        # what no ranks reduce is as before, above all the gradient of the input
        assert_same([whole[name] for name in of_microbatch], list(of_microbatch.values()))
        assert len(of_microbatch) == (2 if options.get("alone") else 1)
        expected.update(whole)
    with same_random_numbers(), torch.no_grad():
        gradients = named(split.reduce_grad, sums)
    assert len(gradients) + len(of_microbatch) == len(expected) == 7
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])
        assert gradient.stride() == expected[name].stride()


def named(joint: JointGraph, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a graph, and return its gradients by name."""
    results = OneProcess(joint.graph_module).run(*values)
    names = [output.name for output in joint.signature.outputs]
    return dict(zip(names, results, strict=True))


def test_all_collectives_are_in_the_reduction_and_no_node_is_in_both() -> None:
    joint = captured()
    backward = cut(joint).backward
    split = reduce_once(backward)
    assert split is not None
    of_backward, of_ranks = (
        {node.name for node in compute_nodes(graph.graph)}
        for graph in (split.backward, split.reduce_grad)
    )
    assert not of_backward & of_ranks
    collectives = {node.name for node in compute_nodes(backward.graph) if is_collective(node)}
    assert collectives and collectives <= of_ranks
    assert unreduced_bytes(joint) == sum(value.nbytes for value in split.zeros(torch.device("cpu")))


def test_where_no_ranks_reduce_nothing_is_summed() -> None:
    joint = captured("fully_shard", 1)
    assert reduce_once(cut(joint).backward) is None and unreduced_bytes(joint) == 0
