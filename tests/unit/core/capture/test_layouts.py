"""Gradients have eager's strides and bits, for parameters and batches of any layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from tests.unit.core.capture.steps import check_step

X = torch.randn(3, 4)
COMPLEX = torch.randn(4, 4, dtype=torch.complex64)
WEIGHTS = {
    "transposed": torch.randn(4, 4).t(),
    "every second": torch.randn(8, 8)[::2, ::2],
    "expanded": torch.randn(4, 1).expand(4, 4),
    "conjugate": COMPLEX.conj(),
    "conjugate and transposed": COMPLEX.mH,
    "negative": COMPLEX.conj().imag,
}
USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": lambda w, x: x.to(w.dtype) @ w,
    "matmul of the transposed": lambda w, x: x.to(w.dtype) @ w.t(),
    "elementwise": lambda w, x: (w * 2).sin() * x.sum(),
    "sum": lambda w, x: w.sum(),
    "twice": lambda w, x: x.to(w.dtype) @ w + w.conj().sum(0),
}
BATCHES = {
    "conjugate": COMPLEX.conj(),
    "negative": COMPLEX.conj().imag,
    "transposed": COMPLEX.real.t(),
}


class Weight(nn.Module):
    def __init__(
        self, weight: torch.Tensor, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach())
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.weight, x)


def energy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).abs().square().sum()


def check(model: nn.Module, x: torch.Tensor) -> None:
    gt.run_passes(joint := gt.capture(model, energy, (x,)))
    check_step(step := gt.compile(joint), model, energy, x)
    (found,) = step(model, x)[1].values()
    energy(model, x).backward()
    (wanted,) = (p.grad for p in model.parameters())
    assert wanted is not None
    bits = [(g.stride(), g.is_conj(), g.is_neg()) for g in (found, wanted)]
    assert bits[0] == bits[1]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_a_gradient_has_the_layout_of_eagers(
    weight: torch.Tensor, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    check(Weight(weight, use), X)


@pytest.mark.parametrize("x", BATCHES.values(), ids=BATCHES)
def test_a_batch_may_have_any_bits(x: torch.Tensor) -> None:
    check(Weight(COMPLEX, lambda w, x: x.to(w.dtype) @ w), x)


def into_temporary(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y, found = x @ w, torch.empty(3, 4)
    with torch.no_grad():
        torch.mul(y, 2, out=found)
        torch.add(found, 1, out=found)
    return (y * found).sin()


def into_column(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y, found = x @ w, torch.zeros(4, 3)
    with torch.no_grad():
        torch.sum(y, 0, out=found[:, 1])
    return (y.sum(0) * found[:, 1]).sin()


def into_resized(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y, found = x @ w, torch.empty(0)
    with torch.no_grad():
        torch.mul(y, 2, out=found)
    return (y * found).sin()


@pytest.mark.parametrize("use", [into_temporary, into_column, into_resized])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_out_variants_are_captured(
    use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], checkpointed: bool
) -> None:
    def again(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(use, w, x, use_reentrant=False)

    check(Weight(torch.randn(4, 4), again if checkpointed else use), X)
