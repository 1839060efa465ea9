"""Two nodes have one number exactly if they compute the same value."""

import pytest
import torch

from graph_trainer.core.graph.value_numbers import ValueNumbers
from graph_trainer.testing import Builder
from tests.unit.graphs import aten


def numbered(graph):
    numbers = ValueNumbers()
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers.number_alone(node)
        else:
            numbers.number(node, numbers.call(node))
    return numbers


ADD, FULL = aten.add.Tensor, aten.full_like.default


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (lambda b, x, y: b.call(ADD, x, y), lambda b, x, y: b.call(ADD, x, y), True),
        (lambda b, x, y: b.call(ADD, x, y), lambda b, x, y: b.call(ADD, y, x), False),
        # the number of y is 1
        (lambda b, x, y: b.call(ADD, x, y), lambda b, x, y: b.call(ADD, x, 1), False),
        (lambda b, x, y: b.call(FULL, x, 1), lambda b, x, y: b.call(FULL, x, True), False),
        (lambda b, x, y: b.call(FULL, x, 1), lambda b, x, y: b.call(FULL, x, 1.0), False),
        (
            lambda b, x, y: b.call(FULL, x, 1, dtype=torch.int64, device="cpu"),
            lambda b, x, y: b.call(FULL, x, 1, device="cpu", dtype=torch.int64),
            True,
        ),
        (
            lambda b, x, y: b.call(aten.neg.default, b.call(ADD, x, y)),
            lambda b, x, y: b.call(aten.neg.default, b.call(ADD, x, y)),
            True,
        ),
    ],
)
def test_equal_calls_on_equal_values_have_one_number(one, other, same):
    b = Builder()
    x, y = b.input("x", 4), b.input("y", 4)
    a, c = one(b, x, y), other(b, x, y)
    numbers = numbered(b.graph)
    assert numbers[y] == 1
    assert (numbers[a] == numbers[c]) is same


def test_a_node_takes_the_number_that_it_is_given():
    b = Builder()
    x = b.input("x", 4)
    one, other = b.call(aten.detach.default, x), b.call(aten.neg.default, x)
    numbers = numbered(b.graph)
    numbers.number_alike(one, x)
    numbers.number_alone(other)
    assert numbers[one] == numbers[x] != numbers[other]
    assert len({numbers[n] for n in (x, other)}) == 2
