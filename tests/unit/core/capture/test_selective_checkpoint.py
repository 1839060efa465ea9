"""Selective activation checkpointing: the capture records what eager saves and recomputes."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import graph_trainer as gt
from graph_trainer.core.graph.annotations import is_backward
from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.testing import mean_square
from tests.unit.core.capture.steps import check_step
from tests.unit.graphs import aten


def policy_for(saved):
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Checkpointed(nn.Module):
    """Blocks with a norm, whose meta function works in place, each checkpointed selectively."""

    def __init__(self, saved):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.SiLU()) for _ in range(3)
        )
        self.contexts = functools.partial(create_selective_checkpoint_contexts, policy_for(saved))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
        return x


@pytest.mark.parametrize(("saved", "recomputed"), [(set(), 3), ({aten.addmm.default}, 0)])
def test_what_is_saved_is_not_computed_again(saved, recomputed):
    torch.manual_seed(0)
    model = Checkpointed(saved)
    x = torch.randn(4, 8)
    joint = gt.capture(model, mean_square, (x,))
    products = [n for n in compute_nodes(joint.graph) if n.target is aten.addmm.default]
    assert len([n for n in products if not is_backward(n)]) == 3
    assert len([n for n in products if is_backward(n)]) == recomputed
    gt.run_passes(joint)
    check_step(gt.compile(joint), model, mean_square, x)
