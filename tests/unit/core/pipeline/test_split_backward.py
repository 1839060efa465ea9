"""The two parts of a stage's backward: what is in which, and the numbers of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.analysis.one_process import OneProcess, same_random_numbers
from graph_trainer.core.graph.annotations import is_backward
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import collective_kind
from graph_trainer.core.graph.signature import OutputKind
from graph_trainer.core.partition.cut import cut
from graph_trainer.core.pipeline.split_backward import SplitBackward, split_backward
from graph_trainer.testing import assert_same, fake_mesh, values_for

WIDTH = 6


class Layers(nn.Module):
    """A projection, a norm, and a projection that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, WIDTH)
        self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)).tanh())


class Scaled(torch.autograd.Function):
    """A product whose backward writes in place what the gradient of the weight has read."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].clone()
        of_weight = (gradient * x).sum(0)
        return gradient.mul_(weight), of_weight


class InPlace(nn.Module):
    """A projection, and a product by Scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(self.up(x), self.weight)


def backward_of(module: nn.Module, *, is_first: bool = False) -> JointGraph:
    batch = torch.randn(4, WIDTH)
    if is_first:  # takes tokens, which have no gradient
        module = nn.Sequential(nn.Embedding(9, WIDTH), module)
        batch = torch.randint(9, (4,))
    gt.simple_fsdp(module, fake_mesh(2))
    joint = gt.capture_stage(module, (batch,))
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
    return cut(joint, reads_numbers=True).backward


def run_parts(split: SplitBackward, values: list[torch.Tensor]) -> list[torch.Tensor]:
    with same_random_numbers(), torch.no_grad():
        of_weights = [values[place] for place in split.reads]
        results = OneProcess(split.of_input.graph_module).run(*values)
        kinds = [output.kind for output in split.of_input.signature.outputs]
        count = kinds.count(OutputKind.INPUT_GRADIENT)
        kept = results[count:]
        gradients = OneProcess(split.of_weights.graph_module).run(*of_weights, *kept)
    return [*results[:count], *gradients]


@pytest.mark.parametrize(
    ("module", "is_first"), [(Layers, False), (Layers, True), (InPlace, False)]
)
def test_both_parts_compute_what_the_whole_does_and_no_node_twice(
    module: type[nn.Module], is_first: bool
) -> None:
    backward = backward_of(module(), is_first=is_first)
    code = backward.graph_module.code
    split = split_backward(backward)
    assert backward.graph_module.code == code
    values = values_for(backward)
    with same_random_numbers(), torch.no_grad():
        whole = OneProcess(backward.graph_module).run(*values)
    assert_same(list(whole), run_parts(split, values))
    of_input, of_weights, all_nodes = (
        [node.name for node in compute_nodes(graph.graph)]
        for graph in (split.of_input, split.of_weights, backward)
    )
    assert sorted(of_input + of_weights) == sorted(all_nodes)
    assert all(is_backward(node) for node in compute_nodes(split.of_input.graph))
    assert bool(of_input) is not is_first


def test_the_first_part_gathers_and_the_second_reduces() -> None:
    split = split_backward(backward_of(Layers()))

    def kinds(joint: JointGraph) -> set[str]:
        found = (collective_kind(node) for node in compute_nodes(joint.graph))
        return {kind.ops[0] for kind in found if kind is not None and kind.ops}

    assert kinds(split.of_input) == {"all_gather_into_tensor", "wait_tensor"}
    assert kinds(split.of_weights) == {"reduce_scatter_tensor", "wait_tensor"}
