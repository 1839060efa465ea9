"""Tensors compared bit by bit, and how far they are apart."""

import copy
import math

import pytest
import torch

from graph_trainer.core.tensor_diff import Difference, compare, digest, distance

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
        ((torch.ones(1), None), [torch.ones(1), None], True),
        ((torch.ones(1), 2), (torch.ones(1), 3), False),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
    ],
)
def test_values_are_the_same_when_their_bits_are(a, b, same):
    assert (digest(a) == digest(b)) is same
    assert (distance("x", a, b) is None) is same


def test_how_far_two_values_are_apart():
    wanted = torch.tensor([1.0, 2.0, 0.0, -4.0])
    assert distance("x", wanted, torch.tensor([1.0, 2.5, 0.0, -4.0])) == Difference("x", 0.5, 0.2)
    assert distance("x", wanted, torch.tensor([1.0, 2.0, 0.5, -5.0])) == Difference("x", 1.0, 1.0)
    difference = distance("x", wanted, torch.tensor([NAN, 2.0, 0.0, -4.0]))
    assert math.isnan(difference.max_abs) and math.isnan(difference.max_rel)
    assert distance("x", torch.tensor([INF, 1.0]), torch.tensor([INF, 2.0])).max_abs == 1.0
    assert distance("x", wanted, -wanted).max_abs == 8.0
    assert distance("x", torch.tensor(0.0), torch.tensor(-0.0)) == Difference("x", 0.0, 0.0)
    parts = distance("x", [wanted, wanted], [wanted + 1, wanted + 3])
    assert parts.max_abs == 3.0


def test_another_shape_or_dtype_is_said():
    difference = distance("x", torch.ones(2, 3), torch.ones(3))
    assert difference.note == "(3,) float32 instead of (2, 3) float32" and math.isnan(
        difference.max_abs
    )
    difference = distance("x", torch.ones(3), torch.full((3,), 2.0, dtype=torch.float64))
    assert difference.note == "(3,) float64 instead of (3,) float32" and difference.max_abs == 1.0
    assert "1 tensors instead of 2" in distance("x", [torch.ones(1)] * 2, [torch.ones(1)]).note


def test_results_are_compared_in_their_order_and_none_is_left_out():
    one = torch.ones(1)
    wanted = {"loss": [one], "gradient of a": [one], "gradient of b": [one], "buffer c": [one]}
    assert compare(wanted, copy.deepcopy(wanted)) == []
    actual = {"extra": [one], "buffer c": [one * 3], "gradient of b": [one], "loss": [one * 2]}
    differences = compare(wanted, actual)
    assert [d.name for d in differences] == ["loss", "gradient of a", "buffer c", "extra"]
    assert [d.note for d in differences] == ["", "missing", "", "not expected"]
    assert [d.max_abs for d in differences[::2]] == [1.0, 2.0]
