"""Higher-order ops and random draws in a captured step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt

Function = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, function: Function, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.function = function
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.checkpointed:
            return checkpoint(self.function, x, use_reentrant=False)
        return self.function(x)


def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def step(function: Function, x: torch.Tensor, **options: bool) -> list[torch.Tensor]:
    """Loss and gradients of a captured step; no mark of capture is left on any node."""
    model = Model(function, **options)
    joint = gt.capture(model, total, (x,))
    for module in joint.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            assert {"random_draw", "run_again"}.isdisjoint(node.meta.get("custom") or {})
    torch.manual_seed(1)
    loss, gradients = gt.compile(joint)(model, x)
    return [loss, *gradients.values()]


def eager(function: Function, x: torch.Tensor, **options: bool) -> list[torch.Tensor]:
    model = Model(function, **options)
    torch.manual_seed(1)
    loss = total(model, x)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def branches(x: torch.Tensor) -> torch.Tensor:
    # tuples, since torch cannot differentiate a branch that gives a tensor under make_fx
    return torch.cond(x.sum() > 0, lambda a: (a.sin(),), lambda a: (a.cos() * 2,), (x,))[0]


def chosen(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.sum() > 0 else x.cos() * 2


def without_gradient(function: Function) -> Function:
    return lambda x: x * function(x.detach())


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("wrap", [lambda f: f, without_gradient], ids=["gradient", "none"])
def test_a_condition_on_data(
    wrap: Callable[[Function], Function], sign: float, checkpointed: bool
) -> None:
    x = sign * torch.arange(12.0).view(3, 4) @ Model(chosen).linear.weight.detach()
    expected = eager(wrap(chosen), x, checkpointed=checkpointed)
    found = step(wrap(branches), x, checkpointed=checkpointed)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_region_that_is_compiled_once() -> None:
    region = torch.compiler.nested_compile_region(lambda a: a.sin())
    x = torch.ones(3, 4)
    for a, b in zip(step(region, x), eager(torch.sin, x), strict=True):
        assert torch.equal(a, b)


def random_branches(x: torch.Tensor) -> torch.Tensor:
    def drop(a: torch.Tensor) -> tuple[torch.Tensor]:
        return (a * torch.rand_like(a),)

    return torch.cond(x.sum() > 0, drop, drop, (x,))[0]


def test_draws_within_a_higher_order_op_are_captured_but_not_recomputed() -> None:
    x = torch.ones(3, 4)
    step(without_gradient(lambda y: random_branches(random_branches(y))), x)
    with pytest.raises(gt.CaptureError, match=r"runs cond again .*draws random numbers"):
        step(random_branches, x, checkpointed=True)


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    "noise",
    [
        lambda x: torch.rand(x.shape, generator=GENERATOR),
        lambda x: torch.ones_like(x).bernoulli_(0.5, generator=GENERATOR),
        lambda x: torch.ones_like(x).bernoulli_(0.5, generator=GENERATOR) * torch.rand_like(x),
    ],
    ids=["functional", "in place", "beside a shared one"],
)
def test_a_generator_of_the_users_own_draws_anew_in_a_recomputation(noise: Function) -> None:
    x = torch.ones(3, 4)

    def noisy(y: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * noise(y))

    GENERATOR.manual_seed(2)
    expected = eager(noisy, x, checkpointed=True)
    GENERATOR.manual_seed(2)
    for a, b in zip(step(noisy, x, checkpointed=True), expected, strict=True):
        assert torch.equal(a, b)


def test_the_default_generator_given_by_name_is_shared() -> None:
    x = torch.ones(3, 4)

    def noisy(y: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * torch.rand(y.shape, generator=torch.default_generator))

    expected = eager(noisy, x, checkpointed=True)
    for a, b in zip(step(noisy, x, checkpointed=True), expected, strict=True):
        assert torch.equal(a, b)
