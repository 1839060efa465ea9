"""Higher-order ops and random draws in a captured step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from tests.unit.core.capture import side_effects
from tests.unit.core.capture.steps import check_against_eager, check_step, mean


class Model(nn.Module):
    def __init__(self, function, checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.function = function
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.linear(x)
        if self.checkpointed:
            return checkpoint(self.function, x, use_reentrant=False)
        return self.function(x)


def no_mark_is_left(joint):
    for module in joint.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            assert {"random_draw", "run_again"}.isdisjoint(node.meta.get("custom") or {})


def check(function, x, like=None, *, checkpointed=False):
    """Capture a model of `function`, and compare the step with a model of `like` run eagerly."""
    model = Model(function, checkpointed)
    joint = gt.capture(model, mean, (x,))
    no_mark_is_left(joint)
    model.function = like or function
    check_step(gt.compile(joint), model, mean, x)


def branches(x):
    # tuples, since torch cannot differentiate a branch that gives a tensor under make_fx
    return torch.cond(x.sum() > 0, lambda a: (a.sin(),), lambda a: (a.cos() * 2,), (x,))[0]


def chosen(x):
    return x.sin() if x.sum() > 0 else x.cos() * 2


def without_gradient(function):
    return lambda x: x * function(x.detach())


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("wrap", [lambda f: f, without_gradient], ids=["gradient", "none"])
def test_a_condition_on_data(wrap, sign, checkpointed):
    weight = Model(chosen, False).linear.weight.detach()
    x = sign * torch.arange(12.0).view(3, 4) @ weight
    check(wrap(branches), x, wrap(chosen), checkpointed=checkpointed)


def test_a_region_that_is_compiled_once():
    region = torch.compiler.nested_compile_region(lambda a: a.sin())
    check(region, torch.ones(3, 4), torch.sin)


def random_branches(x):
    def drop(a):
        return (a * torch.rand_like(a),)

    return torch.cond(x.sum() > 0, drop, drop, (x,))[0]


def test_draws_within_a_higher_order_op_are_captured_but_not_recomputed():
    x = torch.ones(3, 4)
    twice = without_gradient(lambda y: random_branches(random_branches(y)))
    no_mark_is_left(gt.capture(Model(twice, False), mean, (x,)))
    with pytest.raises(gt.CaptureError, match=r"runs cond again .*draws random numbers"):
        gt.capture(Model(random_branches, True), mean, (x,))


def test_the_default_generator_may_be_named():
    function = lambda y: y * torch.rand(y.shape, generator=torch.default_generator)  # noqa: E731
    check(function, torch.ones(3, 4), checkpointed=True)


class Recomputed(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = dropout

    def forward(self, x):
        for layer in self.layers:
            block = lambda x, f=layer: torch.tanh(self.dropout(f(x)))  # noqa: E731
            x = F.dropout(checkpoint(block, x, use_reentrant=False), 0.1)
        return x


@pytest.mark.parametrize(
    "dropout",
    [
        lambda x: x,
        lambda x: F.dropout(x, 0.5),
        lambda x: x * torch.rand_like(x).add_(1),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: F.dropout(x, 0.5) * torch.randn(3, 4),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        lambda x: x * torch.bernoulli(torch.rand(3, 4)),
    ],
    ids=["none", "dropout", "written after", "functional", "two draws", "mask", "of a draw"],
)
def test_checkpointed_blocks_draw_the_same_numbers_again(dropout):
    joint = check_against_eager(Recomputed(dropout), mean, torch.randn(3, 4))
    no_mark_is_left(joint)
    assert not joint.graph.find_nodes(op="get_attr"), "parameters are inputs of the graph"


def test_a_mask_that_is_drawn_again_for_another_layout_is_refused():
    """Kernels draw in the order of memory: a transposed gradient drops other elements."""

    def dropped(model, x):
        y = side_effects.dropout_of_a_gradient(model, model(x))
        return (y.t() * torch.ones(4, 3)).sum()

    with pytest.raises(gt.CaptureError, match=r"strides \(1, 3\)"):
        gt.capture(nn.Linear(4, 4), dropped, (torch.randn(3, 4),))
