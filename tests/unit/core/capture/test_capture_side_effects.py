"""gt.capture allocates no tensor storage and leaves the model and the random state as they were."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graph_trainer as gt
from tests.unit.core.capture.steps import mean


def allocated_during(action: Callable[[], Any]) -> int:
    """The most bytes of CPU memory that torch allocated above where it began."""
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        marker = torch.empty(1)  # so that there is an event to begin with
        action()
        del marker
    totals = [
        e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    peak = current = 0
    for change in totals:
        current += change
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_storage_is_allocated(device: str) -> None:
    """For a model of 100 MB, which any copy of a tensor of it would show."""
    with torch.device(device):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 4096))
        x = torch.empty(512, 1024)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert size > 80 << 20
    assert allocated_during(lambda: gt.capture(model, mean, (x,))) < 100_000
    assert allocated_during(lambda: torch.zeros(1 << 20)) >= 4 << 20, "the measure measures"


class Restless(nn.Module):
    """Assigns everything that a forward can assign."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.dropout(self.norm(self.linear(x)))
        self.average = 0.5 * self.average + self.last.detach().mean(0)
        self.cache = x
        return self.lstm(self.last)[0].mean()


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_state_are_left_as_they_were(fails: bool) -> None:
    model = Restless()
    model.linear.weight.grad = torch.ones(4, 4)
    model.linear.register_forward_hook(lambda *_: None)
    random = torch.get_rng_state()
    tensors = dict(model.state_dict(keep_vars=True))
    values = {n: t.detach().clone() for n, t in tensors.items()}
    attributes = [(m, type(m), dict(vars(m))) for m in model.modules()]
    hooks = [
        {k: list(v) for k, v in vars(m).items() if "hooks" in k and v} for m in model.modules()
    ]
    grads = {n: p.grad for n, p in model.named_parameters()}

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result = model(x)
        if fails:
            raise RuntimeError("on purpose")
        return result

    if fails:
        with pytest.raises(gt.CaptureError, match="on purpose"):
            gt.capture(model, loss, (torch.randn(3, 4),))
        torch.set_rng_state(random)  # the batch above was drawn
    else:
        x = torch.randn(3, 4)
        torch.set_rng_state(random)
        gt.capture(model, loss, (x,))
        assert torch.equal(torch.get_rng_state(), random)

    assert {n: id(t) for n, t in model.state_dict(keep_vars=True).items()} == {
        n: id(t) for n, t in tensors.items()
    }
    for name, value in values.items():
        assert torch.equal(tensors[name], value), name
    for module, cls, before in attributes:
        assert type(module) is cls
        assert vars(module).keys() == before.keys()
        assert all(vars(module)[k] is v for k, v in before.items())
    assert [
        {k: list(v) for k, v in vars(m).items() if "hooks" in k and v} for m in model.modules()
    ] == hooks
    assert {n: p.grad for n, p in model.named_parameters()} == grads
    assert all(type(w) is nn.Parameter for w in model.lstm._flat_weights)
