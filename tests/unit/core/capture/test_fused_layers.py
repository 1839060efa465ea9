"""Kernels that torch chooses otherwise under a trace."""

import pytest
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


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_in_validation_takes_its_fused_kernel(norm_first):
    model = encoder(norm_first).eval()
    x = torch.randn(3, 5, 16)
    joint = check_against_eager(model, scored, x, backward=False)
    assert count(joint, "_transformer_encoder_layer_fwd") == 2
    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
    check_against_eager(model, scored, x, mask=mask, is_causal=False, backward=False)
    # in training, with gradients, and where a module has a hook, eager has no such kernel either
    assert count(check_against_eager(model, scored, x), "encoder_layer_fwd") == 0
    model.layers[0].linear1.register_forward_hook(lambda *_: None)
    assert count(check_against_eager(model, scored, x, backward=False), "encoder_layer_fwd") == 1
    model.train()
    assert count(check_against_eager(model, scored, x, backward=False), "encoder_layer_fwd") == 0


def test_attention_in_validation_takes_its_fused_kernel():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(3, 5, 16)

    def loss_fn(model, x):
        return (model(x, x, x, need_weights=False)[0] * torch.linspace(-1, 1, 16)).sum()

    joint = check_against_eager(model, loss_fn, x, backward=False)
    assert count(joint, "_native_multi_head_attention") == 1


def test_a_frozen_encoder_in_training_takes_its_fused_kernel():
    torch.manual_seed(0)
    model = nn.Sequential(encoder().eval().requires_grad_(False), nn.Linear(16, 16))
    joint = check_against_eager(model, scored, torch.randn(3, 5, 16))
    assert count(joint, "_transformer_encoder_layer_fwd") == 2


def test_torch_is_left_as_it_was():
    asked, tracing = torch.overrides.has_torch_function, nn.modules.activation._is_make_fx_tracing
    gt.capture(encoder().eval(), scored, (torch.randn(3, 5, 16),), backward=False)
    assert torch.overrides.has_torch_function is asked
    assert nn.modules.activation._is_make_fx_tracing is tracing
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_gradients_have_the_parameters_strides_where_a_kernel_gives_others():
    """Where one factor is expanded, the fake kernel of mul in bfloat16 gives the rows' strides, and
    the real one those of the other factor."""
    torch.manual_seed(0)
    rows, columns = torch.randn(2, 2, 2, dtype=torch.bfloat16)
    model = nn.ParameterDict({"a": rows, "b": columns.t()})

    def loss_fn(model):
        return (model["a"] * model["b"]).sum()

    check_against_eager(model, loss_fn)
