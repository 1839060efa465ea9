"""Opaque objects: what a custom op makes or takes that is no tensor."""

import pytest
import torch
from torch import nn
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

import graph_trainer as gt
from graph_trainer.testing import become, mean_square
from tests.unit.core.partition.test_backend import Seen, fresh_dynamo  # noqa: F401
from tests.unit.core.partition.test_partitioned_step import gradients


class Factor(OpaqueBase):
    """A number that torch does not see."""

    def __init__(self, value):
        self.value = value


register_opaque_type(Factor, typ="reference")


@torch.library.custom_op("graph_trainer_opaque::make", mutates_args=())
def make(x: torch.Tensor) -> Factor:
    return Factor(2.0)


@torch.library.custom_op("graph_trainer_opaque::scale", mutates_args=())
def scale(x: torch.Tensor, factor: Factor) -> torch.Tensor:
    return x * factor.value


make.register_fake(lambda x: Factor(2.0))
scale.register_fake(lambda x, factor: torch.empty_like(x))


class Scaled(torch.autograd.Function):
    """Multiplies by a factor in forward and in backward; without one, forward makes it."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = make(x) if factor is None else factor
        return scale(x, ctx.factor)

    @staticmethod
    def backward(ctx, gradient):
        return scale(gradient, ctx.factor), None


class Model(nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x):
        return Scaled.apply(self.linear(x), self.factor)


X = torch.arange(8.0).view(2, 4)
MAKE = torch.ops.graph_trainer_opaque.make.default


@pytest.mark.parametrize("partition", ["tags", "min_cut"])
def test_objects_in_the_step_and_around_it_give_eagers_bits(partition):
    """One is made around the step in forward, saved, and read in backward."""
    become(0, 1)
    model, other = Model(Factor(3.0)), Model(Factor(3.0))
    step = gt.partition(gt.capture(model, mean_square, (X,)))
    seen = Seen()
    compiler = gt.backend("eager", partition=partition, on_partition=seen)

    def around(loss, x):
        return Scaled.apply(loss(x), None) * 5

    compiled = torch.compile(lambda x: around(step, x), backend=compiler, fullgraph=True)
    losses = [compiled(X), around(lambda x: mean_square(other, x), X)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*[loss.detach() for loss in losses], rtol=0, atol=0)
    torch.testing.assert_close(gradients(model), gradients(other), rtol=0, atol=0)
    ((forward, backward),) = seen.graphs
    makes = [len(half.graph.find_nodes(op="call_function", target=MAKE)) for half in seen.graphs[0]]
    assert makes == [1, 0]
    (made,) = forward.graph.find_nodes(op="call_function", target=MAKE)
    assert made.name in {n.name for n in backward.graph.find_nodes(op="placeholder")}


def test_an_object_that_the_step_makes_for_its_backward_is_refused_where_it_is_cut():
    """Autograd saves tensors alone; in one graph nothing is saved."""
    become(0, 1)
    model = Model(None)
    joint = gt.capture(model, mean_square, (X,))
    _, found = gt.compile(joint)(model, X)
    mean_square(model, X).backward()
    torch.testing.assert_close(found, gradients(model), rtol=0, atol=0)
    with pytest.raises(gt.PassError, match="whose result is a Factor and cannot be saved"):
        gt.partition(joint)
