"""Bits compared, nodes matched, and the first pass and node that differ."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import graph_trainer as gt
from graph_trainer.core.bisect.replay import Runs
from graph_trainer.core.bisect.search import bisect_passes
from graph_trainer.core.passes.base import Pass, Stage
from graph_trainer.core.passes.catalogue import resolve_passes
from graph_trainer.core.tensor_diff import Difference, compare, digest, distance
from tests.unit.graphs import aten

NAN, INF = math.nan, math.inf

# --- bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
        ((torch.ones(1), None), [torch.ones(1), None], True),
        ((torch.ones(1), 2), (torch.ones(1), 3), False),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
    ],
)
def test_values_are_the_same_when_their_bits_are(a, b, same):
    assert (digest(a) == digest(b)) is same
    assert (distance("x", a, b) is None) is same


def test_how_far_two_values_are_apart():
    wanted = torch.tensor([1.0, 2.0, 0.0, -4.0])
    assert distance("x", wanted, torch.tensor([1.0, 2.5, 0.0, -4.0])) == Difference("x", 0.5, 0.2)
    assert distance("x", wanted, torch.tensor([1.0, 2.0, 0.5, -5.0])) == Difference("x", 1.0, 1.0)
    difference = distance("x", wanted, torch.tensor([NAN, 2.0, 0.0, -4.0]))
    assert math.isnan(difference.max_abs) and math.isnan(difference.max_rel)
    assert distance("x", torch.tensor([INF, 1.0]), torch.tensor([INF, 2.0])).max_abs == 1.0
    assert distance("x", wanted, -wanted).max_abs == 8.0
    assert distance("x", torch.tensor(0.0), torch.tensor(-0.0)) == Difference("x", 0.0, 0.0)
    parts = distance("x", [wanted, wanted], [wanted + 1, wanted + 3])
    assert parts.max_abs == 3.0


def test_another_shape_or_dtype_is_said():
    difference = distance("x", torch.ones(2, 3), torch.ones(3))
    assert difference.note == "(3,) float32 instead of (2, 3) float32" and math.isnan(
        difference.max_abs
    )
    difference = distance("x", torch.ones(3), torch.full((3,), 2.0, dtype=torch.float64))
    assert difference.note == "(3,) float64 instead of (3,) float32" and difference.max_abs == 1.0
    assert "1 tensors instead of 2" in distance("x", [torch.ones(1)] * 2, [torch.ones(1)]).note


def test_results_are_compared_in_their_order_and_none_is_left_out():
    one = torch.ones(1)
    wanted = {"loss": [one], "gradient of a": [one], "gradient of b": [one], "buffer c": [one]}
    assert compare(wanted, copy.deepcopy(wanted)) == []
    actual = {"extra": [one], "buffer c": [one * 3], "gradient of b": [one], "loss": [one * 2]}
    differences = compare(wanted, actual)
    assert [d.name for d in differences] == ["loss", "gradient of a", "buffer c", "extra"]
    assert [d.note for d in differences] == ["", "missing", "", "not there in eager"]
    assert [d.max_abs for d in differences[::2]] == [1.0, 2.0]


# --- the whole search ----------------------------------------------------------------------


class Net(nn.Module):
    """Draws random numbers, keeps statistics and counts its calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.dropout, self.calls = nn.Dropout(0.5), 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.dropout(torch.tanh(self.norm(self.body(x)) * 3.0) * 5.0))


def loss_fn(model, x):
    return model(x).square().mean()


def examined(loss=loss_fn, passes=("default",), model=None):
    model, lines = model or Net(), []
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    verdict = bisect_passes(
        model, loss, (x,), passes=gt.PassConfig(passes=passes), on_event=lines.append
    )
    return verdict, lines


def own(function, name="own", stage=Stage.CLEANUP):
    return Pass(name, stage, "for a test", function)


def wrong(joint, options, context):
    """The multiplication by 5 becomes one by a little more."""
    products = joint.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    (node,) = [n for n in products if n.args[1] == 5.0 and n.name == "mul_1"]
    node.args = (node.args[0], 5.00001)


def test_right_passes_are_found_right_and_the_model_stays_as_it_was():
    model = Net()
    model.body.weight.grad = torch.ones(6, 4)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    idle = own(lambda joint, options, context: None, stage=Stage.SCHEDULE)
    verdict, lines = examined(passes=["default", idle], model=model)
    assert verdict.culprit is None and verdict.nodes == []
    listed = [p.name for p in resolve_passes(["default"])]
    assert [row.name for row in verdict.prefixes] == ["capture", *listed, idle.name]
    assert all(row.differences == [[]] for row in verdict.prefixes)
    assert verdict.compared == 1 + 6 + 3, "loss, gradients, buffers"
    assert f"{len(listed) + 1} of {len(listed) + 1}" in lines[-1]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), random) and model.calls == 0
    assert torch.equal(model.body.weight.grad, torch.ones(6, 4)) and model.head.bias.grad is None


def test_a_wrong_pass_and_its_node_are_found():
    after = own(lambda joint, options, context: pytest.fail("the search goes on"), "after")
    verdict, _ = examined(passes=["normalize_views", own(wrong), after])
    assert verdict.culprit == "own"
    assert [bool(row.ranks) for row in verdict.prefixes] == [False, False, True]
    node = verdict.first_node
    assert (node.name, node.kept) == ("mul_1", True) and "5.00001" in node.after
    assert node.difference.max_rel == pytest.approx(2e-6, rel=0.1)
    differences = verdict.prefixes[-1].differences[0]
    assert differences[0].name == "loss" and 0 < differences[0].max_rel < 1e-4


def test_a_pass_that_changes_only_a_buffer_is_found():
    def forget(joint, options, context):
        sums = joint.graph.find_nodes(op="call_function", target=aten.add_.Tensor)
        (node,) = [n for n in sums if n.args[1] == 1]
        node.args = (node.args[0], 2)

    verdict, _ = examined(passes=[own(forget)])
    assert [d.name for d in verdict.prefixes[-1].differences[0]] == [
        "buffer norm.num_batches_tracked"
    ]
    assert verdict.first_node.op == "aten.add_.Tensor"


def test_a_capture_that_differs_is_at_fault_itself():
    def two_faced(model, x):
        return loss_fn(model, x) * (1.0 if get_proxy_mode() is None else 1.5)

    verdict, lines = examined(two_faced)
    assert verdict.culprit == "capture" and len(verdict.prefixes) == 1 and verdict.nodes == []
    assert "capture" in lines[-1] and "differs on 1 of 1 ranks" in lines[-1]


def test_a_model_that_does_not_repeat_itself_accuses_no_pass():
    steps = itertools.count()

    def another(model, x):
        return loss_fn(model, x) + (next(steps) if get_proxy_mode() is None else 0)

    with pytest.raises(gt.VerificationError, match="another loss.*debug.deterministic"):
        examined(another)


def test_every_run_begins_with_the_same_random_numbers():
    model = Net()
    runs = Runs(model, loss_fn, (torch.ones(8, 4),), {})
    first = runs.eager()
    torch.rand(3)
    assert compare(first, runs.eager()) == []
    assert compare(first, runs.graph(runs.capture())) == []
    model.train(False)
    assert compare(first, runs.eager()) != [], "the comparison sees a difference where there is one"


def test_a_failing_pass_is_an_error_not_a_verdict():
    def failing(joint, options, context):
        raise ValueError("lost")

    with pytest.raises(gt.PassError, match="lost .*\nRaised by pass 'own'"):
        examined(passes=[own(failing)])
