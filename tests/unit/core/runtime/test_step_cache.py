"""TrainStep: a graph for every kind of call, a bounded number, and never another call's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.core.runtime.step_cache import TrainStep
from tests.unit.fake_ranks import become


class Net(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 1)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.body(x)))) * self.factor


def loss_fn(model: nn.Module, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
    return (model(x) * (1.0 if scale is None else float(scale))).square().mean()


class Recorded:
    """A TrainStep, the lines it said, and how often it captured."""

    def __init__(self, **options: Any) -> None:
        self.lines: list[str] = []
        self.captures = 0
        self.step = TrainStep(loss_fn, on_event=self.lines.append, on_report=self._count, **options)

    def _count(self, *_: Any) -> None:
        self.captures += 1

    def check(self, model: nn.Module, *args: Any) -> None:
        """The step gives what eager gives."""
        torch.manual_seed(1)
        loss, gradients = self.step(model, *args)
        torch.manual_seed(1)
        model.zero_grad()
        expected = loss_fn(model, *args)
        expected.backward()
        assert torch.equal(loss, expected)
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == found.keys()
        assert all(torch.equal(gradients[n], g) for n, g in found.items())


def test_one_capture_serves_all_calls_alike() -> None:
    recorded, model = Recorded(), Net()
    for _ in range(3):
        recorded.check(model, torch.randn(2, 4))
    assert recorded.captures == 1
    assert len(recorded.lines) == 2
    assert recorded.lines[0] == "Capturing the train step"
    assert "captured in" in recorded.lines[1]


def change(name: str) -> tuple[nn.Module, Any, nn.Module, Any]:
    """(model, args) before and after one thing changes that makes another graph."""
    model, x = Net(), torch.randn(2, 4)
    before: tuple[Any, ...] = (x,)
    if name == "shape":
        return model, before, model, (torch.randn(3, 4),)
    if name == "stride":
        return model, before, model, (torch.randn(4, 2).t(),)
    if name == "constant":
        return model, (x, 1), model, (x, 2)
    if name == "constant's type":
        return model, (x, 1), model, (x, True)
    if name == "none":
        return model, (x, None), model, (x, 0.5)
    assert name == "another model"
    return model, before, Net(factor=3.0), before


@pytest.mark.parametrize(
    "name", ["shape", "stride", "constant", "constant's type", "none", "another model"]
)
def test_another_call_gets_another_graph_and_the_first_keeps_its_own(name: str) -> None:
    recorded = Recorded()
    model, args, other, other_args = change(name)
    recorded.check(model, *args)
    recorded.check(other, *other_args)
    assert recorded.captures == 2
    assert len(recorded.lines) == 3, "one line for a graph more"
    assert recorded.lines[2].startswith("Captured again for batch [(")
    recorded.check(model, *args)
    recorded.check(other, *other_args)
    assert recorded.captures == 2


def test_training_mode_and_trainable_parameters() -> None:
    recorded, model, x = Recorded(), Net(), torch.randn(2, 4)
    recorded.check(model, x)
    recorded.check(model.eval(), x)
    assert recorded.captures == 2
    recorded.check(model.train(), x)
    assert recorded.captures == 2
    model.dropout.eval()
    recorded.check(model, x)
    assert recorded.captures == 3
    model.body.weight.requires_grad_(False)
    recorded.check(model, x)
    assert recorded.captures == 4
    _, gradients = recorded.step(model, x)
    assert "body.weight" not in gradients


def test_autocast_around_the_step() -> None:
    recorded, model, x = Recorded(), Net(), torch.randn(2, 4)
    recorded.check(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = recorded.step(model, x)
        assert recorded.captures == 2
        torch.manual_seed(1)
        loss, _ = recorded.step(model, x)
        torch.manual_seed(1)
        assert torch.equal(loss, loss_fn(model, x))
    recorded.check(model, x)
    assert recorded.captures == 2


def test_the_least_recently_used_graph_goes() -> None:
    recorded, model = Recorded(max_graphs=2), Net()
    one, two, three = (torch.randn(rows, 4) for rows in (1, 2, 3))
    recorded.check(model, one)
    recorded.check(model, two)
    recorded.check(model, one)
    recorded.check(model, three)
    assert recorded.captures == 3
    assert len(recorded.step.joint_graphs()) == 2
    recorded.check(model, one)
    assert recorded.captures == 3, "the one used last was kept"
    recorded.check(model, two)
    assert recorded.captures == 4
    assert len(recorded.step.joint_graphs()) == 2


def test_a_failed_capture_leaves_no_graph_behind() -> None:
    recorded, model = Recorded(), Net()
    for _ in range(2):
        with pytest.raises(gt.CaptureError):
            recorded.step(model, torch.randn(2, 5))
    assert recorded.step.joint_graphs() == []
    recorded.check(model, torch.randn(2, 4))


def test_a_failed_compilation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, one, other, x = Recorded(max_graphs=1), Net(), Net(), torch.randn(2, 4)
    recorded.check(one, x)

    def fail(*_: Any) -> None:
        raise gt.CaptureError("no compiler here")

    with monkeypatch.context() as patched:
        patched.setattr("graph_trainer.core.runtime.step_cache.compile", fail)
        with pytest.raises(gt.CaptureError, match="no compiler here"):
            recorded.step(other, x)
    recorded.check(one, x)
    assert recorded.captures == 1, "the graph from before was kept"
    recorded.check(other, x)
    assert recorded.lines[-1].startswith("Captured again")


def test_a_constant_that_can_change_unseen_is_refused() -> None:
    recorded, model = Recorded(), Net()
    with pytest.raises(gt.CaptureError, match=r"'args\[1\]' is a set"):
        recorded.step(model, torch.randn(2, 4), {1})


def test_the_model_is_not_kept_alive() -> None:
    recorded, model = Recorded(), Net()
    recorded.check(model, torch.randn(2, 4))
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_passes_and_backend_are_those_asked_for() -> None:
    become(0, 2)
    model = gt.simple_fsdp(Net(), init_device_mesh("cpu", (2,)))
    for policy in ("always", "never"):
        step = TrainStep(loss_fn, passes=gt.PassConfig(reshard_after_forward=policy))  # type: ignore[arg-type]
        step(model, torch.randn(2, 4))
        (joint,) = step.joint_graphs()
        gathers = [n for n in joint.graph.nodes if "all_gather" in str(n.target)]
        assert len(gathers) == (5 if policy == "always" else 4)
    with pytest.raises(gt.ConfigError, match="'egaer'"):
        TrainStep(loss_fn, backend="egaer")(model, torch.randn(2, 4))


def test_a_batch_that_changes_what_is_communicated_is_refused() -> None:
    """Other ranks may not capture again at the same moment, or at all."""
    become(0, 2)
    model = gt.simple_fsdp(Net(), init_device_mesh("cpu", (2,)))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            return F.linear(x, model.body.weight).mean()
        return model(x).mean()

    step = TrainStep(loss)
    step(model, torch.randn(2, 4))
    step(model, torch.randn(5, 4))
    with pytest.raises(gt.VerificationError, match="this batch's shape"):
        step(model, torch.randn(3, 4))


def test_freezing_in_a_sharded_run_is_captured_again() -> None:
    """The gradient's reduction is gone, which no other batch may bring about."""
    become(0, 2)
    model = gt.simple_fsdp(Net(), init_device_mesh("cpu", (2,)))
    step = TrainStep(loss_fn, max_graphs=2)
    step(model, torch.randn(2, 4))
    model.head._parameters["weight"].requires_grad_(False)
    _, gradients = step(model, torch.randn(2, 4))
    assert "head.weight" not in gradients
    step(model, torch.randn(3, 4))
    model.head._parameters["weight"].requires_grad_(True)
    _, gradients = step(model, torch.randn(5, 4))
    assert "head.weight" in gradients
