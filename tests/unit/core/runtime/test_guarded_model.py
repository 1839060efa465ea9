"""A step runs on what it was captured for: what has changed since is noticed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graph_trainer as gt


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    layers[0].sizes, layers[0].factors, layers[0].deep = [1, "a"], {"a": 0.5}, {"a": [0.5]}
    return layers


def loss_fn(model: nn.Module, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
    return model(x).square().mean()


def tied(model: nn.Module) -> None:
    model[2].weight = model[0].weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tied, "'2.weight' and '0.weight' were two tensors"),
        (nn.Module.eval, "module '' was in train.. mode"),
        (lambda m: m[1].eval(), "module '1' was in train.. mode"),
        (lambda m: m.append(nn.Identity()), "the model has 5 modules and had 4"),
        (lambda m: m[0].register_forward_hook(lambda *_: None), "hooks"),
        (lambda m: m[0].register_forward_pre_hook(lambda *_: None), "hooks"),
        (lambda m: m[0].register_full_backward_hook(lambda *_: None), "hooks"),
        (lambda m: m[0].register_full_backward_pre_hook(lambda *_: None), "hooks"),
        (lambda m: setattr(m[1], "p", 0.1), r"'1.p' was 0.5 .* and is 0.1 now"),
        (lambda m: setattr(m[1], "p", True), r"'1.p' was 0.5 .* and is True now"),
        (lambda m: m[0].sizes.append(2), r"'0.sizes' was \[1, .* and is \[1, .*, 2\] now"),
        (lambda m: m[0].factors.update(a=0.1), r"'0.factors' was .*0.5.* is .*0.1.* now"),
        (lambda m: setattr(m[0], "sizes", (1, "a")), "'0.sizes' was"),
        (lambda m: m[0].sizes.__setitem__(0, True), r"'0.sizes' was \[1, .* is \[True, .* now"),
        (lambda m: m[0].factors.update(a=-0.0), "'0.factors' was"),
        (lambda m: m.__setitem__(1, nn.ReLU()), "module '1' was a Dropout .* is a ReLU now"),
        (lambda m: setattr(m[0], "bias", None), "parameter '0.bias' was a tensor"),
        (lambda m: setattr(m[0], "forward", lambda x: x), "replaced forwards"),
        (lambda m: m[0].weight.register_hook(lambda g: 2 * g), "hooks"),
        (lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: None), "hooks"),
    ],
)
def test_a_changed_model_is_refused(change: Any, message: str) -> None:
    changed, x = model(), torch.ones(2, 4)
    step = gt.compile(gt.capture(changed, loss_fn, (x,)))
    step(changed, x)
    step(copy.deepcopy(changed), x)
    change(changed)
    with pytest.raises(gt.CaptureError, match=f"{message}.*capture again"):
        step(changed, x)


def test_what_is_deeper_in_an_attribute_is_a_constant() -> None:
    network, x = model(), torch.ones(2, 4)
    step = gt.compile(gt.capture(network, loss_fn, (x,)))
    network[0].deep["a"][0] = 0.1
    step(network, x)


def test_hooks_of_all_modules_are_seen() -> None:
    network, x = model(), torch.ones(2, 4)
    step = gt.compile(gt.capture(network, loss_fn, (x,)))
    with (
        torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
        pytest.raises(gt.CaptureError, match="hooks.*capture again"),
    ):
        step(network, x)
    step(network, x)


def test_other_defaults_of_torch_are_refused() -> None:
    network, x = model().eval(), torch.ones(2, 4)
    step = gt.compile(gt.capture(network, loss_fn, (x,)))
    cast = torch.autocast("cpu", torch.bfloat16)
    with cast, pytest.raises(gt.CaptureError, match="autocast"):
        step(network, x)
    with cast:
        lower = gt.compile(gt.capture(network, loss_fn, (x,)))
        assert torch.equal(lower(network, x)[0], loss_fn(network, x))
    with pytest.raises(gt.CaptureError, match="autocast"):
        lower(network, x)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(gt.CaptureError, match="default dtype"):
            step(network, x)
    finally:
        torch.set_default_dtype(torch.float32)


def written(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    return model(x).square().mean()


def test_a_batch_may_hold_a_buffer_but_nothing_that_changes_or_takes_a_gradient() -> None:
    network, x = model().eval(), torch.ones(4, 4)
    network.register_buffer("constant", torch.full((4, 4), 2.0))
    step = gt.compile(gt.capture(network, loss_fn, (network.constant,)))
    assert torch.equal(step(network, network.constant)[0], loss_fn(network, network.constant))
    for function, given, message in [
        (loss_fn, network[0].weight, "is a parameter"),
        (written, network[0].weight.detach(), "memory of '0.weight', which the step writes"),
    ]:
        step = gt.compile(gt.capture(copy.deepcopy(network), function, (x,)))
        for call in (
            lambda f=function, t=given: gt.capture(network, f, (t,)),
            lambda s=step, t=given: s(network, t),
        ):
            with pytest.raises(gt.CaptureError, match=f"of the batch .*{message}"):
                call()


def test_keyword_arguments_come_in_any_order() -> None:
    def loss(model: nn.Module, *, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - 2 * y).square().mean()

    network, x, y = model().eval(), torch.ones(2, 4), torch.zeros(2, 4)
    step = gt.compile(gt.capture(network, loss, kwargs={"y": y, "x": x}))
    assert torch.equal(step(network, x=x, y=y)[0], loss(network, x=x, y=y))
    assert torch.equal(step(network, y=y, x=x)[0], loss(network, x=x, y=y))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, True),
        (0.0, -0.0),
        (np.float64(0.0), np.float64(-0.0)),
        ((1, "a"), (1, "b")),
        (frozenset({1}), frozenset({2})),
        (loss_fn, tied),
    ],
)
def test_another_constant_is_refused(before: Any, after: Any) -> None:
    network, x = model(), torch.ones(2, 4)
    step = gt.compile(gt.capture(network, loss_fn, (x, before)))
    step(network, x, copy.deepcopy(before))
    with pytest.raises(gt.CaptureError, match="capture"):
        step(network, x, after)


class Constant(torch.autograd.Function):
    """Hands out one tensor as the gradient, in every step."""

    gradient = torch.full((4, 4), 3.0)

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return Constant.gradient


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_clipped_in_place_does_not_change_the_next_step(
    transposed: bool,
) -> None:
    network, x = model(), torch.ones(2, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = model[0].weight.t() if transposed else model[0].weight
        return (x @ Constant.apply(weight)).sum() + (model[2].weight * Constant.gradient).sum()

    joint = gt.capture(network, loss, (x,))
    gt.run_passes(joint)
    step = gt.compile(joint)
    for _ in range(2):
        _, gradients = step(network, x)
        assert all(torch.all(gradients[f"{i}.weight"] == 3.0) for i in (0, 2))
        for gradient in gradients.values():
            gradient.mul_(0.0)
    assert torch.all(Constant.gradient == 3.0)
