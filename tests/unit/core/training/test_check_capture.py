"""gt.check_capture finds what capture cannot see, and says where."""

import copy
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.torch_private import FakeTensor


class Model(nn.Module):
    def __init__(self, what):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.BatchNorm1d(4))
        self.what = what
        self.calls = 0

    def forward(self, x):
        return self.what(self, self.inner(x))


def square(model, x):
    return model(x).square().mean()


BATCHES = [(torch.randn(3, 4),), (torch.randn(3, 4),), (torch.randn(5, 4),)]


def test_a_model_that_capture_sees_whole_passes_and_is_left_as_it_was():
    model = Model(lambda m, x: x)
    model.inner[0].weight.grad = torch.ones(4, 4)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gt.check_capture(model, square, BATCHES)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.inner[0].weight.grad, torch.ones(4, 4))
    assert model.inner[0].bias.grad is None


def test_copies_of_layers_are_compared_where_they_are_asked_for():
    """The model knows its layer by what capture does not see; the middle one, 3, is traced."""
    place = ContextVar("place")

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if place.get() == 4 else 1.0)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList(Layer(4, 4) for _ in range(7))

        def forward(self, x):
            x = self.first(x)
            for i, layer in enumerate(self.layers):
                token = place.set(i)
                x = layer(x)
                place.reset(token)
            return x

    batches = [(torch.randn(3, 4),), (torch.randn(3, 4),)]
    gt.check_capture(Stack(), square, batches)
    with pytest.raises(gt.VerificationError, match="step 1: .*differs"):
        gt.check_capture(Stack(), square, batches, full_capture=False)


def fake_otherwise(model, x):
    return x.exp() if isinstance(x, FakeTensor) else x.sin()


def test_a_model_that_computes_otherwise_while_captured_is_found_with_step_and_op():
    where = r"nowhere: aten.sin.default in the model \(forward\)"
    with pytest.raises(gt.VerificationError, match=f"step 1: .*loss by at most .*{where}"):
        gt.check_capture(Model(fake_otherwise), square, BATCHES)


def test_state_that_capture_cannot_see_is_found():
    steps = np.zeros(())

    def scaled(model, x):
        steps[...] += 1
        return x if steps < 3 else 2 * x

    with pytest.raises(gt.VerificationError, match=r"step \d: .*loss by at most"):
        gt.check_capture(Model(scaled), square, BATCHES)


def counts(model, x):
    model.calls += 1
    return x


def test_an_attribute_that_only_eager_sets_is_found():
    with pytest.raises(gt.VerificationError, match="step 1: .*attribute calls"):
        gt.check_capture(Model(counts), square, BATCHES)
    gt.check_capture(Model(counts), square, BATCHES, attributes=False)


@gt.graph_pass(stage=gt.Stage.CLEANUP, summary="Wrong on purpose")
def sum_for_mean(joint, options, context):
    loss = next(n for n in joint.graph.nodes if n.target is torch.ops.aten.mean.default)
    loss.target = torch.ops.aten.sum.default


def test_a_wrong_pass_is_found():
    passes = gt.PassConfig(passes=(sum_for_mean,))
    with pytest.raises(gt.VerificationError, match="step 1: .*loss by.*aten.mean.default in the l"):
        gt.check_capture(Model(lambda m, x: x), square, BATCHES, passes=passes)


@gt.graph_pass(stage=gt.Stage.CLEANUP, summary="Read what is copied")
def no_copies(joint, options, context):
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)


def test_a_copy_of_the_batch_that_the_graph_does_without_is_not_blamed():
    passes = gt.PassConfig(passes=(no_copies, sum_for_mean))
    with pytest.raises(gt.VerificationError, match="nowhere: aten.mean.default in the loss"):
        gt.check_capture(
            Model(lambda m, x: x), lambda m, x: square(m, x.clone()), BATCHES, passes=passes
        )


def test_one_batch_is_refused():
    with pytest.raises(gt.VerificationError, match="given 1 batches: give two or more"):
        gt.check_capture(Model(counts), square, BATCHES[:1])
