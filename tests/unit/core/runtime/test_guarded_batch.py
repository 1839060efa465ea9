"""The batch of a captured step: structure, constants, strides and names."""

import pytest
import torch
import torch.nn.functional as F

import graph_trainer as gt
from graph_trainer.core.graph.signature import InputKind
from tests.unit.core.capture.steps import batch, check_against_eager, check_step, mean, net

X, Y = batch()
GOOD = {"labels": Y, "scale": 0.5, "mode": None}


@pytest.fixture(scope="module")
def structured():
    """A step whose batch is a structure with keywords and constants."""

    def loss(model, pair, *, labels, scale, mode):
        result = F.mse_loss(model(pair["x"][0]), labels) * scale
        return result if mode is None else -result

    joint = check_against_eager(net(), loss, {"x": [X]}, **GOOD)
    names = [s.name for s, _ in joint.inputs_of(InputKind.BATCH)]
    assert names == ["args[0]['x'][0]", "labels"]
    return gt.compile(joint)


@pytest.mark.parametrize(
    ("pair", "other", "message"),
    [
        ({"x": [X]}, {"scale": 0.25}, r"'scale' was 0\.5 .* is 0\.25 now"),
        ({"x": [X]}, {"mode": "neg"}, "'mode' was None"),
        ({"x": [X]}, {"mode": Y}, "'mode' was None .* a tensor of"),
        ({"x": [X]}, {"labels": 3}, "'labels' was a tensor .* is 3 now"),
        ({"x": [X, X]}, {}, r"new: 'args\[0\]\['x'\]\[1\]'"),
        ({"z": [X]}, {}, r"missing: 'args\[0\]\['x'\]\[0\]'; new: 'args\[0\]\['z'\]\[0\]'"),
        ({"x": (X,)}, {}, "another structure"),
        ({"x": [X[:2]]}, {}, r"args\[0\]\['x'\]\[0\]' is Tensor \(2, 4\)"),
        ({"x": [X.double()]}, {}, r"args\[0\].*float64"),
        ({"x": [X.to("meta")]}, {}, r"args\[0\].*on meta"),
        ({"x": [torch.randn(4, 3).t()]}, {}, r"args\[0\].*stride \(1, 3\)"),
    ],
)
def test_structures_keywords_and_constants(structured, pair, other, message):
    with pytest.raises(gt.CaptureError, match=message):
        structured(net(), pair, **GOOD | other)


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
def test_a_constant_is_the_same_only_if_the_graph_is(captured, called, fits):
    step = gt.compile(gt.capture(net(), lambda m, x, c: m(x).mean(), (X, captured)))
    if fits:
        step(net(), X, called)
    else:
        with pytest.raises(gt.CaptureError, match=r"args\[1\]"):
            step(net(), X, called)


class Holder:
    def __init__(self, x):
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
def test_constants_that_cannot_be_checked_later_are_refused(value, message):
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(net(), lambda m, x, c: m(x).mean(), (X, value))


def test_one_tensor_given_twice_is_two_inputs():
    def loss(model, x, z):
        return (model(x) - 2 * model(z)).mean()

    model = net()
    step = gt.compile(gt.capture(model, loss, (X, X)))
    check_step(step, model, loss, X, torch.randn(3, 4))


def test_expanded_and_transposed_batches_keep_their_strides():
    check_against_eager(net(), mean, X[:1].expand(3, 4))
    check_against_eager(net(), mean, torch.randn(4, 3).t())


@pytest.mark.parametrize("name", ["boxed", "device", "torch", "inf", "mean", "len", "lambda_"])
def test_a_batch_value_may_have_any_name(name):
    def loss(model, **kwargs):
        return model(kwargs[name]).mean() + torch.ones(3).to(torch.float64).sum()

    check_against_eager(net(), loss, **{name: X})
