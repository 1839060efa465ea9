"""Kernels that torch chooses otherwise under a trace."""

import torch
from torch import nn

import graph_trainer as gt
from tests.unit.core.capture.steps import check_against_eager


def encoder(norm_first=False):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def count(joint, name):
    return sum(name in str(node.target) for node in joint.graph.nodes)


def scored(model, *args, **kwargs):
    return (model(*args, **kwargs) * torch.linspace(-1, 1, 16)).sum()


def test_an_encoder_in_validation_and_a_frozen_one_in_training_run_op_by_op():
    x, y = torch.randn(3, 5, 16), torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
    model = encoder().eval()
    joint = check_against_eager(model, scored, x, backward=False)
    assert count(joint, "_transformer_encoder_layer_fwd") == 0
    check_against_eager(model, scored, x, mask=y, is_causal=False, backward=False)
    frozen = nn.Sequential(encoder(True).eval().requires_grad_(False), nn.Linear(16, 16))
    check_against_eager(frozen, scored, x)
    gt.check_capture(frozen, scored, [(x,), (2 * x,)])
    assert torch.backends.mha.get_fastpath_enabled(), "restored after a trace and a step"


def test_attention_in_validation_runs_op_by_op():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()

    def loss_fn(model, x):
        return (model(x, x, x, need_weights=False)[0] * torch.linspace(-1, 1, 16)).sum()

    check_against_eager(model, loss_fn, torch.randn(3, 5, 16), backward=False)
