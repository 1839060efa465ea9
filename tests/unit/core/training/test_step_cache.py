"""TrainStep: a graph for every kind of call, a bounded number, and never another call's."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.core.runtime.step import Step
from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.testing import become
from tests.unit.core.capture.steps import check_step


class Net(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 1)
        self.factor = factor

    def forward(self, x):
        return self.head(self.dropout(torch.tanh(self.body(x)))) * self.factor


def sharded_net():
    become(0, 2)
    return gt.simple_fsdp(Net(), init_device_mesh("cpu", (2,)))


def loss_fn(model, x, scale=1.0):
    return (model(x) * (1.0 if scale is None else float(scale))).square().mean()


PARTS = [
    "Capturing the train step",
    "Running the passes",
    "Compiling for the backend 'eager'",
]


class Recorded:
    """A TrainStep, the lines it said, and how often it captured."""

    def __init__(self, **options):
        self.lines = []
        self.captures = 0
        self.step = TrainStep(loss_fn, on_event=self.lines.append, on_report=self._count, **options)

    def _count(self, *_):
        self.captures += 1

    def check(self, model, *args, captures):
        """The step gives what eager gives, after so many captures in all."""
        check_step(self.step, model, loss_fn, *args)
        assert self.captures == captures


def test_one_capture_serves_all_calls_alike():
    recorded, model = Recorded(), Net()
    for _ in range(3):
        recorded.check(model, torch.randn(2, 4), captures=1)
    *parts, summary = recorded.lines
    assert parts == PARTS
    assert "captured in" in summary


def test_what_is_prepared_is_captured_and_not_run(monkeypatch):
    recorded, model = Recorded(), Net()
    with monkeypatch.context() as patched:
        patched.setattr(Step, "run", lambda *_: pytest.fail("it ran"))
        recorded.step.prepare(model, torch.zeros(2, 4))
    assert recorded.captures == 1
    recorded.check(model, torch.randn(2, 4), captures=1)


X = torch.ones(2, 4)
OTHER_CALLS = {
    "shape": ((X,), (torch.randn(3, 4),)),
    "stride": ((X,), (torch.randn(4, 2).t(),)),
    "constant": ((X, 1), (X, 2)),
    "constant's type": ((X, 1), (X, True)),
    "none": ((X, None), (X, 0.5)),
    "another model": ((X,), (X,)),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_another_call_gets_another_graph_and_the_first_keeps_its_own(name, monkeypatch):
    published: list[str] = []
    module = "graph_trainer.core.training.step_cache"
    monkeypatch.setattr(f"{module}.publish_failure", published.append)
    monkeypatch.setattr(f"{module}.withdraw_failure", lambda: published.append("withdrawn"))
    recorded, model = Recorded(), Net()
    other = Net(factor=3.0) if name == "another model" else model
    args, other_args = OTHER_CALLS[name]
    recorded.check(model, *args, captures=1)
    recorded.check(other, *other_args, captures=2)
    *parts, summary = recorded.lines[len(PARTS) + 1 :]
    first_part = PARTS[0]
    if name == "another model":
        first_part += " again on all ranks, because it is another model"
        waiting, withdrawn = published  # for ranks on which the model is the same
        assert waiting.endswith("because it is another model") and withdrawn == "withdrawn"
    else:
        assert not published
    assert parts == [first_part, *PARTS[1:]]
    assert summary.startswith("Captured again for batch [(")
    recorded.check(model, *args, captures=2)
    recorded.check(other, *other_args, captures=2)


def test_training_mode_and_trainable_parameters():
    recorded, model = Recorded(), Net()
    recorded.check(model, X, captures=1)
    recorded.check(model.eval(), X, captures=2)
    recorded.check(model.train(), X, captures=2)
    model.dropout.eval()
    recorded.check(model, X, captures=3)
    model.body.weight.requires_grad_(False)
    recorded.check(model, X, captures=4)


def test_a_dropout_rate_that_a_schedule_changes_is_captured_again():
    recorded, model = Recorded(), Net()
    recorded.check(model, X, captures=1)
    model.dropout.p = 0.25
    recorded.check(model, X, captures=2)
    assert (
        "because 'dropout.p' was 0.5 when the graph was captured and is 0.25"
        in (recorded.lines[-1])
    )


def test_autocast_around_the_step():
    recorded, model = Recorded(), Net()
    recorded.check(model, X, captures=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorded.check(model, X, captures=2)
    recorded.check(model, X, captures=2)


def test_the_least_recently_used_graph_goes():
    recorded, model = Recorded(max_graphs=2), Net()
    one, two, three = (torch.randn(rows, 4) for rows in (1, 2, 3))
    recorded.check(model, one, captures=1)
    recorded.check(model, two, captures=2)
    recorded.check(model, one, captures=2)
    recorded.check(model, three, captures=3)
    assert len(recorded.step.joint_graphs()) == 2
    recorded.check(model, one, captures=3)  # the one used last was kept
    recorded.check(model, two, captures=4)
    assert len(recorded.step.joint_graphs()) == 2


def test_a_failed_capture_leaves_no_graph_behind():
    recorded, model = Recorded(), Net()
    for _ in range(2):
        with pytest.raises(gt.CaptureError):
            recorded.step(model, torch.randn(2, 5))
    assert recorded.step.joint_graphs() == []
    recorded.check(model, torch.randn(2, 4), captures=1)


def test_a_failed_compilation_leaves_nothing_behind(monkeypatch):
    recorded, one, other = Recorded(max_graphs=1), Net(), Net()
    recorded.check(one, X, captures=1)

    def fail(*_, compare_ranks):
        raise gt.CaptureError("no compiler here")

    with monkeypatch.context() as patched:
        patched.setattr("graph_trainer.core.training.step_cache.compile", fail)
        with pytest.raises(gt.CaptureError, match="no compiler here"):
            recorded.step(other, X)
    recorded.check(one, X, captures=1)  # the graph from before was kept
    recorded.check(other, X, captures=2)
    assert recorded.lines[-1].startswith("Captured again")


def test_a_constant_that_can_change_unseen_is_refused():
    recorded, model = Recorded(), Net()
    with pytest.raises(gt.CaptureError, match=r"'args\[1\]' is a set"):
        recorded.step(model, torch.randn(2, 4), {1})
    with pytest.raises(gt.CaptureError, match=r"'args\[1\]' is a frozenset that holds tensors"):
        recorded.step(model, torch.randn(2, 4), frozenset([torch.ones(1)]))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_batch_is_refused(layout):
    nested = torch.nested.nested_tensor([torch.randn(2, 4)], layout=layout)
    with pytest.raises(gt.CaptureError, match=r"'args\[0\]' is a nested tensor"):
        Recorded().step(Net(), nested)


def test_the_model_is_not_kept_alive():
    recorded, model = Recorded(), Net()
    recorded.check(model, torch.randn(2, 4), captures=1)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def unmerged(policy):
    return gt.PassConfig(reshard_after_forward=policy, disable_passes=["bucket_collectives"])


def test_passes_and_backend_are_those_asked_for():
    model = sharded_net()
    for policy in ("always", "never"):
        step = TrainStep(loss_fn, passes=unmerged(policy))
        step(model, torch.randn(2, 4))
        (joint,) = step.joint_graphs()
        gathers = [n for n in joint.graph.nodes if "all_gather" in str(n.target)]
        assert len(gathers) == (5 if policy == "always" else 4)
    with pytest.raises(gt.ConfigError, match="'egaer'"):
        TrainStep(loss_fn, backend="egaer")(model, torch.randn(2, 4))


def test_a_batch_that_changes_what_is_communicated_is_refused():
    """Other ranks may not capture again at the same moment, or at all."""
    model = sharded_net()

    def loss(model, x):
        if x.shape[0] == 3:
            return F.linear(x, model.body.weight).mean()
        return model(x).mean()

    step = TrainStep(loss)
    step(model, torch.randn(2, 4))
    step(model, torch.randn(5, 4))
    with pytest.raises(gt.VerificationError, match="this batch's shape"):
        step(model, torch.randn(3, 4))


def test_freezing_in_a_sharded_run_is_captured_again():
    """The gradient's reduction is gone, which no other batch may bring about."""
    model = sharded_net()
    step = TrainStep(loss_fn, max_graphs=2)
    step(model, torch.randn(2, 4))
    model.head._parameters["weight"].requires_grad_(False)
    _, gradients = step(model, torch.randn(2, 4))
    assert "head.weight" not in gradients
    step(model, torch.randn(3, 4))
    model.head._parameters["weight"].requires_grad_(True)
    _, gradients = step(model, torch.randn(5, 4))
    assert "head.weight" in gradients
