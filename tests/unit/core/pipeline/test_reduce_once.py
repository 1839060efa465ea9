"""Gradients that are added up over microbatches and reduced once, beside a reduction in each."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_trainer as gt
from graph_trainer.core.analysis.one_process import OneProcess, same_random_numbers
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.partition.cut import cut
from graph_trainer.core.pipeline.reduce_once import reduce_once, unreduced_bytes
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
    ranks: int, *, merged: bool = True, mp_policy: MixedPrecisionPolicy = BF16
) -> JointGraph:
    module = gt.simple_fsdp(Layers(), fake_mesh(ranks), mp_policy=mp_policy)
    joint = gt.capture_stage(module, (torch.randn(4, WIDTH, dtype=torch.bfloat16),))
    gt.run_passes(joint, gt.PassConfig(bitwise=not merged, pipeline_parallel=True))
    return joint


@pytest.mark.parametrize(("ranks", "merged"), [(2, True), (4, True), (4, False)])
def test_the_sum_is_that_of_gradients_reduced_in_each_microbatch(ranks: int, merged: bool) -> None:
    joint = captured(ranks, merged=merged)
    backward = cut(joint).backward
    code = backward.graph_module.code
    split = reduce_once(backward)
    assert split is not None and backward.graph_module.code == code
    sums = split.zeros(torch.device("cpu"))
    assert {value.dtype for value in sums} == {torch.float32}
    expected: list[torch.Tensor] = []
    for _ in range(3):
        values = values_for(backward)
        with same_random_numbers(), torch.no_grad():
            of_input, *whole = OneProcess(backward.graph_module).run(*values)
            assert_same([of_input], OneProcess(split.backward.graph_module).run(*values, *sums))
        expected = [a + b for a, b in zip(expected, whole, strict=True)] if expected else whole
    with same_random_numbers(), torch.no_grad():
        gradients = OneProcess(split.reduce_grad.graph_module).run(*sums)
    assert len(gradients) == 6
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()


def test_all_collectives_are_in_the_reduction_and_no_node_is_in_both() -> None:
    joint = captured(4)
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
