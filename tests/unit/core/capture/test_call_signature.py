"""The batch of a captured step: structure, constants, strides and names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graph_trainer as gt
from graph_trainer.core.graph.joint_graph import InputKind
from tests.unit.core.capture.steps import batch, check_against_eager, mean, net


def test_structures_keywords_and_constants() -> None:
    def loss(model: nn.Module, pair: Any, *, labels: Any, scale: float, mode: Any) -> torch.Tensor:
        result = F.mse_loss(model(pair["x"][0]), labels) * scale
        return result if mode is None else -result

    x, y = batch()
    joint = check_against_eager(net(), loss, {"x": [x]}, labels=y, scale=0.5, mode=None)
    names = [s.name for s, _ in joint.inputs_of(InputKind.BATCH)]
    assert names == ["args[0]['x'][0]", "labels"]
    step, model = gt.compile(joint), net()
    good = {"labels": y, "scale": 0.5, "mode": None}
    for args, kwargs, message in [
        (({"x": [x]},), good | {"scale": 0.25}, r"'scale' was 0\.5 .* is 0\.25 now"),
        (({"x": [x]},), good | {"mode": "neg"}, "'mode' was None"),
        (({"x": [x]},), good | {"mode": y}, "'mode' was None .* a tensor of"),
        (({"x": [x]},), good | {"labels": 3}, "'labels' was a tensor .* is 3 now"),
        (({"x": [x, x]},), good, r"new: 'args\[0\]\['x'\]\[1\]'"),
        (({"z": [x]},), good, r"missing: 'args\[0\]\['x'\]\[0\]'; new: 'args\[0\]\['z'\]\[0\]'"),
        (({"x": (x,)},), good, "another structure"),
        (({"x": [x[:2]]},), good, r"args\[0\]\['x'\]\[0\]' is Tensor \(2, 4\)"),
        (({"x": [x.double()]},), good, r"args\[0\].*float64"),
        (({"x": [x.to("meta")]},), good, r"args\[0\].*on meta"),
        (({"x": [torch.randn(4, 3).t()]},), good, r"args\[0\].*stride \(1, 3\)"),
    ]:
        with pytest.raises(gt.CaptureError, match=message):
            step(model, *args, **kwargs)


@pytest.mark.parametrize(
    ("captured", "called", "fits"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ("a", "a", True),
        (None, 0, False),
    ],
)
def test_a_constant_is_the_same_only_if_the_graph_is(
    captured: Any, called: Any, fits: bool
) -> None:
    joint = gt.capture(net(), lambda m, x, c: m(x).mean(), (batch()[0], captured))
    step, model = gt.compile(joint), net()
    if fits:
        step(model, batch()[0], called)
    else:
        with pytest.raises(gt.CaptureError, match=r"args\[1\]"):
            step(model, batch()[0], called)


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"'args\[1\]' is a set.*frozenset"),
        (bytearray(b"x"), r"'args\[1\]' is a bytearray"),
        (Holder(torch.ones(1)), r"'args\[1\]' is a Holder that holds tensors.*pytree"),
        (frozenset([torch.ones(1)]), r"'args\[1\]' is a frozenset that holds tensors"),
    ],
)
def test_constants_that_cannot_be_checked_later_are_refused(value: Any, message: str) -> None:
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(net(), lambda m, x, c: m(x).mean(), (batch()[0], value))


def test_one_tensor_given_twice_is_two_inputs() -> None:
    def loss(model: nn.Module, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (model(x) - 2 * model(z)).mean()

    model, x, z = net(), torch.randn(3, 4), torch.randn(3, 4)
    step = gt.compile(gt.capture(model, loss, (x, x)))
    assert torch.equal(step(model, x, z)[0], loss(model, x, z))


def test_expanded_and_transposed_batches_keep_their_strides() -> None:
    x = torch.randn(1, 4).expand(3, 4)
    check_against_eager(net(), mean, x)
    y = torch.randn(4, 3).t()
    joint = check_against_eager(net(), mean, y)
    with pytest.raises(gt.CaptureError, match="stride"):
        gt.compile(joint)(net(), x)


@pytest.mark.parametrize("name", ["boxed", "device", "torch", "inf", "mean", "len", "lambda_"])
def test_a_batch_value_may_have_any_name(name: str) -> None:
    def loss(model: nn.Module, **kwargs: torch.Tensor) -> torch.Tensor:
        return model(kwargs[name]).mean() + torch.ones(3).to(torch.float64).sum()

    check_against_eager(net(), loss, **{name: batch()[0]})
