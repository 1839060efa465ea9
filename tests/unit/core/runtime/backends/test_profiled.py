"""A profile of the eager backend's step names the modules; another step enters no range."""

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.runtime.backends import eager
from graph_trainer.testing import mean_square


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def ranges(monkeypatch):
    """The names of the ranges that were entered."""
    entered = []

    class Recorded(torch.profiler.record_function):
        def __enter__(self):
            entered.append(self.name)
            return super().__enter__()

    monkeypatch.setattr(eager, "record_function", Recorded)
    return entered


def profiled(step, *args):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        result = step(*args)
    return result, profile.events()


def test_ops_are_inside_ranges_that_name_their_modules(ranges):
    model, x = Blocks(), torch.randn(3, 8)
    joint = gt.capture(model, mean_square, (x,), {})
    gt.run_passes(joint, gt.PassConfig())
    step = gt.compile(joint)
    loss, gradients = step(model, x)
    assert not ranges

    (again, same), events = profiled(step, model, x)
    assert torch.equal(again, loss)
    assert all(torch.equal(same[name], each) for name, each in gradients.items())
    parents = {"aten::addmm": [], "aten::mm": [], "aten::pow": []}
    for event in events:
        if event.name in parents and event.cpu_parent is not None:
            parents[event.name].append(event.cpu_parent.name)
    forward = ["forward layers.0.0", "forward layers.1.0", "forward head"]
    assert parents["aten::addmm"] == forward and "loss" in parents["aten::pow"]
    assert set(parents["aten::mm"]) == {each.replace("forward", "backward") for each in forward}
    assert ranges[0] == "make the step's ranges"

    # the ranges are made once, and no other step enters them
    entered = len(ranges)
    step(model, x)
    assert len(ranges) == entered
    profiled(step, model, x)
    assert len(ranges) == 2 * entered - 1
