"""Bits compared, nodes matched, and the first pass and node that differ."""

import copy
import json
import math
import re

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import graph_trainer as gt
from graph_trainer import cli
from graph_trainer.bisect import command
from graph_trainer.bisect.bits import Difference, compare, digest, distance
from graph_trainer.bisect.nodes import NodeDifference, first_difference, partners_of
from graph_trainer.bisect.runs import Runs
from graph_trainer.bisect.search import bisect_passes
from graph_trainer.bisect.table import verdict_table
from graph_trainer.bisect.verdict import Row, Verdict
from graph_trainer.graph_copy import copy_graph
from graph_trainer.joint_graph import copy_annotations
from graph_trainer.passes import Pass, Stage
from tests.unit.graphs import Builder, _Simulated, aten, c10d, values_for

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
        (torch.arange(6).view(2, 3), torch.arange(6).view(2, 3).flip(0), False),
        (torch.ones(0, 3), torch.ones(0, 3), True),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0]).bfloat16(), True),
        ((torch.ones(1), None), [torch.ones(1), None], True),
        ((torch.ones(1), 2), (torch.ones(1), 3), False),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
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
    found = distance("x", wanted, torch.tensor([NAN, 2.0, 0.0, -4.0]))
    assert math.isnan(found.max_abs) and math.isnan(found.max_rel)
    assert distance("x", torch.tensor([INF, 1.0]), torch.tensor([INF, 2.0])).max_abs == 1.0
    assert distance("x", wanted, -wanted).max_abs == 8.0
    assert distance("x", torch.tensor(0.0), torch.tensor(-0.0)) == Difference("x", 0.0, 0.0)
    parts = distance("x", [wanted, wanted], [wanted + 1, wanted + 3])
    assert parts.max_abs == 3.0


def test_another_shape_or_dtype_is_said():
    found = distance("x", torch.ones(2, 3), torch.ones(3))
    assert found.note == "(3,) float32 instead of (2, 3) float32" and math.isnan(found.max_abs)
    found = distance("x", torch.ones(3), torch.full((3,), 2.0, dtype=torch.float64))
    assert found.note == "(3,) float64 instead of (3,) float32" and found.max_abs == 1.0
    assert "1 tensors instead of 2" in distance("x", [torch.ones(1)] * 2, [torch.ones(1)]).note


def test_results_are_compared_in_their_order_and_none_is_left_out():
    one = torch.ones(1)
    wanted = {"loss": [one], "gradient of a": [one], "gradient of b": [one], "buffer c": [one]}
    assert compare(wanted, copy.deepcopy(wanted)) == []
    found = {"extra": [one], "buffer c": [one * 3], "gradient of b": [one], "loss": [one * 2]}
    differences = compare(wanted, found)
    assert [d.name for d in differences] == ["loss", "gradient of a", "buffer c", "extra"]
    assert [d.note for d in differences] == ["", "missing", "", "not there in eager"]
    assert [d.max_abs for d in differences[::2]] == [1.0, 2.0]


# --- nodes ---------------------------------------------------------------------------------


class ByHand:
    """What `first_difference` needs of `Runs`, for a graph without a model.

    Memory that is not written yet holds the same in the first two runs, and then something else.
    """

    def __init__(self):
        self.count = 0

    def node_by_node(self, joint, observe):
        garbage = float(self.count // 2)
        self.count += 1

        class Watched(_Simulated):
            def call_function(self, target, args, kwargs):
                if "empty" in str(target):
                    return torch.full(args[0], garbage)
                return super().call_function(target, args, kwargs)

            def run_node(self, n):
                value = super().run_node(n)
                observe(n, value)
                return value

        with torch.no_grad():
            Watched(joint.graph_module).run(*values_for(joint))


def find(joint, change, differing=("loss",)):
    """The first node that differs after `change`."""
    before = copy_graph(joint)
    change(joint)
    joint.validate()
    return first_difference(ByHand(), before, joint, differing)


def replace(joint, node, op, *args, **kwargs):
    """Let a new node take the place of another, as a pass does."""
    with joint.graph.inserting_before(node):
        new = joint.graph.call_function(op, args, kwargs)
    new.meta["val"] = node.meta["val"]
    copy_annotations(node, new)
    node.replace_all_uses_with(new)
    joint.graph.erase_node(node)
    return new


def chain():
    """x * 2 -> * w -> relu -> sum."""
    b = Builder()
    x, w = b.input("x", 4, 3), b.parameter("w", 3)
    doubled = b.call(aten.mul.Tensor, x, 2.0, module="layers.0")
    scaled = b.call(aten.mul.Tensor, doubled, w, module="layers.1")
    total = b.call(aten.sum.default, b.call(aten.relu.default, scaled))
    gradient = b.call(aten.sum.dim_IntList, doubled, [0], phase=gt.joint_graph.Phase.BACKWARD)
    return b.joint(total, w=gradient)


def nodes(joint, op):
    return joint.graph.find_nodes(op="call_function", target=op)


def test_a_node_that_is_kept_and_changed():
    def change(joint):
        second = nodes(joint, aten.mul.Tensor)[1]
        second.args = (second.args[0], 1.5)

    found = find(chain(), change)
    assert (found.name, found.kept, found.seen_at) == ("mul_tensor_1", True, "mul_tensor_1")
    assert (found.module, found.phase, found.op) == ("layers.1", "forward", "aten.mul.Tensor")
    assert "1.5" in found.after and "%w" in found.before and "1.5" not in found.before
    assert found.difference.max_abs > 0


def test_a_node_that_takes_the_place_of_another():
    def change(joint):
        old = nodes(joint, aten.mul.Tensor)[0]
        replace(joint, old, aten.mul.Tensor, old.args[0], 2.25)

    found = find(chain(), change)
    # x is standard normal: its largest element is read back from the amounts
    largest = values_for(chain())[0].abs().max()
    assert not found.kept and "2.25" in found.after and "2.0" in found.before
    assert found.difference.max_abs == pytest.approx(0.25 * float(largest), rel=1e-6)
    assert found.difference.max_rel == pytest.approx(0.25 / 2.25, rel=1e-6)


def test_a_node_put_between_two():
    def change(joint):
        (relu,) = nodes(joint, aten.relu.default)
        with joint.graph.inserting_before(relu):
            new = joint.graph.call_function(aten.neg.default, (relu.args[0],))
        new.meta["val"] = relu.meta["val"]
        copy_annotations(relu, new)
        relu.args = (new,)

    found = find(chain(), change)
    assert found.op == "aten.neg.default" and not found.kept and "mul.Tensor" in found.before


def test_a_sum_in_another_order():
    def change(joint):
        (total,) = nodes(joint, aten.sum.default)
        source = total.args[0]
        with joint.graph.inserting_before(total):
            rows = [joint.graph.call_function(aten.select.int, (source, 0, i)) for i in range(4)]
            sums = [joint.graph.call_function(aten.sum.default, (row,)) for row in rows]
        with torch.no_grad():
            for node in rows:
                node.meta["val"] = source.meta["val"][0]
            for node in sums:
                node.meta["val"] = total.meta["val"]
        for node in (*rows, *sums):
            copy_annotations(total, node)
        with joint.graph.inserting_before(total):
            first = joint.graph.call_function(aten.add.Tensor, (sums[3], sums[0]))
            second = joint.graph.call_function(aten.add.Tensor, (first, sums[2]))
        for node in (first, second):
            node.meta["val"] = total.meta["val"]
            copy_annotations(total, node)
        replace(joint, total, aten.add.Tensor, second, sums[1])

    found = find(chain(), change)
    assert (
        found.op == "aten.add.Tensor" and found.before.startswith("%sum_default") and not found.kept
    )
    assert 0 < found.difference.max_rel < 1e-5


def test_a_new_node_without_a_counterpart_is_named_for_the_kept_one_that_reads_it():
    b = Builder()
    x = b.input("x", 4)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.cat.default, [x, x])))

    def change(joint):
        (cat,) = nodes(joint, aten.cat.default)
        with joint.graph.inserting_before(cat):
            new = joint.graph.call_function(aten.neg.default, (cat.args[0][0],))
        new.meta["val"] = cat.args[0][0].meta["val"]
        copy_annotations(cat, new)
        cat.args = ([*cat.args[0], new],)
        cat.meta["val"] = cat.meta["val"].new_empty(12)

    found = find(joint, change)
    assert (found.op, found.kept, found.before) == ("aten.neg.default", False, "")
    assert (
        found.seen_at == "cat_default" and "(12,) float32 instead of (8,)" in found.difference.note
    )


def test_a_new_node_with_a_value_that_there_was_is_not_named_for_its_reader():
    b = Builder()
    x = b.input("x", 4)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.cat.default, [x])))

    def change(joint):
        (cat,) = nodes(joint, aten.cat.default)
        with joint.graph.inserting_before(cat):
            new = joint.graph.call_function(aten.clone.default, (cat.args[0][0],))
        new.meta["val"] = cat.args[0][0].meta["val"]
        copy_annotations(cat, new)
        cat.args = ([*cat.args[0], new],)
        cat.meta["val"] = cat.meta["val"].new_empty(8)

    assert find(joint, change).name == "cat_default"


def test_what_leads_to_nothing_that_differs_is_not_blamed():
    def change(joint):
        relu = nodes(joint, aten.relu.default)[0]
        summed = nodes(joint, aten.sum.dim_IntList)[0]
        relu.target = aten.abs.default  # changes the loss
        summed.args = (summed.args[0], [0], False)
        first = nodes(joint, aten.mul.Tensor)[0]
        replace(joint, relu, aten.abs.default, relu.args[0])
        assert first in summed.all_input_nodes

    assert find(chain(), change, ["loss"]).op == "aten.abs.default"

    def only_gradient(joint):
        relu = nodes(joint, aten.relu.default)[0]
        relu.target = aten.abs.default
        summed = nodes(joint, aten.sum.dim_IntList)[0]
        replace(joint, summed, aten.mean.dim, summed.args[0], [0])

    assert find(chain(), only_gradient, ["gradient of w"]).op == "aten.mean.dim"
    assert find(chain(), only_gradient, ["loss"]).op == "aten.abs.default"


def test_gradients_that_are_returned_in_each_others_place():
    b = Builder()
    x, _, _ = b.input("x", 3), b.parameter("v", 3), b.parameter("w", 3)
    one, two = b.call(aten.mul.Tensor, x, 2.0), b.call(aten.mul.Tensor, x, 3.0)
    joint = b.joint(b.call(aten.sum.default, x), v=one, w=two)

    def change(joint):
        loss, first, second = joint.output_values()
        joint.output_node().args = ((loss, second, first),)

    found = find(joint, change, ["gradient of v", "gradient of w"])
    assert found.name == "output" and found.difference.max_rel == pytest.approx(1 / 3)


def test_an_unrelated_change_is_not_blamed_for_gradients_in_each_others_place():
    b = Builder()
    x, _, _ = b.input("x", 3), b.parameter("v", 3), b.parameter("w", 3)
    b.call(aten.relu.default, x)
    one, two = b.call(aten.mul.Tensor, x, 2.0), b.call(aten.mul.Tensor, x, 3.0)
    joint = b.joint(b.call(aten.sum.default, x), v=one, w=two)

    def change(joint):
        nodes(joint, aten.relu.default)[0].target = aten.abs.default
        loss, first, second = joint.output_values()
        joint.output_node().args = ((loss, second, first),)

    assert find(joint, change, ["gradient of v", "gradient of w"]).name == "output"


@pytest.mark.parametrize("through_a_view", [False, True])
def test_a_buffers_writer_is_blamed_and_no_unrelated_change(through_a_view):
    b = Builder()
    x, count = b.input("x", 3), b.buffer("norm.count", 3)
    b.call(aten.relu.default, x)
    scaled = b.call(aten.mul.Tensor, x, 2.0)
    written = b.call(aten.slice.Tensor, count, 0, 0, 3) if through_a_view else count
    b.call(aten.add_.Tensor, written, scaled)
    joint = b.joint(b.call(aten.sum.default, x))

    def change(joint):
        nodes(joint, aten.relu.default)[0].target = aten.abs.default
        nodes(joint, aten.add_.Tensor)[0].target = aten.sub_.Tensor

    assert find(copy_graph(joint), change, ["buffer norm.count"]).name == "add__tensor"

    def earlier(joint):
        nodes(joint, aten.relu.default)[0].target = aten.abs.default
        (scaled,) = nodes(joint, aten.mul.Tensor)
        scaled.args = (scaled.args[0], 2.5)

    assert find(copy_graph(joint), earlier, ["buffer norm.count"]).name == "mul_tensor"
    assert find(copy_graph(joint), earlier, ["loss"]) is None


def test_what_is_written_by_an_op_that_returns_nothing_is_followed():
    b = Builder()
    x, count = b.input("x", 3), b.buffer("norm.count", 3)
    scaled = b.call(aten.mul.Tensor, x, 2.0)
    b.call(aten._foreach_add_.List, [count], [scaled])
    joint = b.joint(b.call(aten.sum.default, x))

    def change(joint):
        (scaled,) = nodes(joint, aten.mul.Tensor)
        scaled.args = (scaled.args[0], 2.5)

    assert find(joint, change, ["buffer norm.count"]).name == "mul_tensor"


def test_memory_written_through_another_node_is_followed():
    b = Builder()
    x = b.input("x", 3)
    scratch, scaled = b.call(aten.mul.Tensor, x, 0.0), b.call(aten.mul.Tensor, x, 2.0)
    b.call(aten.copy_.default, scratch, scaled)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.exp.default, scratch)))

    def change(joint):
        scaled = nodes(joint, aten.mul.Tensor)[1]
        scaled.args = (scaled.args[0], 2.5)

    assert find(joint, change).name == "mul_tensor_1"


def test_what_a_kept_reader_makes_up_for_is_not_blamed():
    """Both factors negated give the same product."""
    b = Builder()
    x, y = b.input("x", 16), b.input("y", 16)
    product = b.call(aten.mul.Tensor, x, y)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.relu.default, product)))

    def negated(joint):
        (product,) = nodes(joint, aten.mul.Tensor)
        for source in product.args:
            with joint.graph.inserting_before(product):
                new = joint.graph.call_function(aten.neg.default, (source,))
            new.meta["val"] = source.meta["val"]
            copy_annotations(product, new)
            product.replace_input_with(source, new)

    def change(joint):
        negated(joint)
        nodes(joint, aten.relu.default)[0].target = aten.abs.default

    assert find(copy_graph(joint), negated) is None
    assert find(copy_graph(joint), change).name == "relu_default"


@pytest.mark.parametrize("in_between", [False, True])
def test_what_an_inserted_node_makes_up_for_is_not_blamed(in_between):
    joint = chain()

    def change(joint):
        scaled = nodes(joint, aten.mul.Tensor)[1]
        (relu,) = nodes(joint, aten.relu.default)
        with joint.graph.inserting_before(scaled):
            twice = joint.graph.call_function(aten.mul.Tensor, (scaled.args[0], 2.0))
        with joint.graph.inserting_before(relu):
            half = joint.graph.call_function(aten.mul.Tensor, (scaled, 0.5))
            last = joint.graph.call_function(aten.neg.default, (half,)) if in_between else half
        for node in (twice, half, last):
            node.meta["val"] = scaled.meta["val"]
            copy_annotations(scaled, node)
        scaled.args = (twice, scaled.args[1])
        relu.target, relu.args = aten.abs.default, (last,)

    # the reader is another op now, so nothing says what its new input should be compared with
    assert find(joint, change).name == "relu_default"


def test_what_is_random_in_itself_is_not_compared():
    b = Builder()
    x = b.input("x", 64)
    noise = b.call(aten.rand.default, [64])
    scaled = b.call(aten.mul.Tensor, noise, 0.0)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.add.Tensor, x, scaled)))

    def change(joint):
        (scaled,) = nodes(joint, aten.mul.Tensor)
        scaled.args = (scaled.args[0], 1.0)

    assert find(joint, change).name == "mul_tensor"


@pytest.mark.parametrize("reduce", [c10d.all_reduce.default, c10d.all_reduce_.default])
def test_what_is_not_there_yet_is_not_compared(reduce):
    """Memory before it is written, and a collective before it is waited for."""
    b = Builder()
    x = b.input("x", 4)
    empty = b.call(aten.empty.memory_format, [4], dtype=torch.float32)
    b.call(aten.slice.Tensor, empty, 0, 0, 2)
    filled = b.call(aten.copy_.default, empty, x)
    reduced = b.call(reduce, b.call(aten.add.Tensor, filled, x), "sum", "0")
    waited = b.call(c10d.wait_tensor.default, reduced)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.relu.default, waited)))

    def change(joint):
        nodes(joint, aten.add.Tensor)[0].target = aten.mul.Tensor

    assert find(copy_graph(joint), lambda joint: None) is None
    assert find(copy_graph(joint), change).name == "add_tensor"

    def other_input(joint):
        (reduced,) = nodes(joint, reduce)
        (copied,) = nodes(joint, aten.copy_.default)
        reduced.replace_input_with(reduced.args[0], copied)

    assert find(copy_graph(joint), other_input).op.startswith("_c10d_functional.wait_tensor")


def test_a_difference_that_does_not_come_again_is_said():
    class Once(ByHand):
        """The first run of the graph after, and only that one, gives another loss."""

        def node_by_node(self, joint, observe):
            another = 1.0 if self.count == 2 else 0.0

            def changed(node, value):
                if node.name == "sum_default":
                    value = value + another
                observe(node, (value[0] + another, *value[1:]) if node.op == "output" else value)

            super().node_by_node(joint, changed)

    joint = chain()
    found = first_difference(Once(), copy_graph(joint), joint, ["loss"])
    assert (found.name, found.difference.note) == ("sum_default", "different in one run of two")
    assert found.difference.max_abs == 0.0


def test_a_rank_without_a_difference_names_none():
    def change(joint):
        nodes(joint, aten.mul.Tensor)[1].target = aten.add.Tensor

    assert find(chain(), change, ()) is None


def test_counterparts_are_found_through_chains_of_new_nodes():
    joint = chain()
    before = copy_graph(joint)
    for old in reversed(list(nodes(joint, aten.mul.Tensor))):
        replace(joint, old, aten.mul.Tensor, *old.args)
    kept = {new.name: old.name for new, old in partners_of(before, joint).items()}
    changed = {new: old for new, old in kept.items() if new != old}
    assert sorted(changed.values()) == ["mul_tensor", "mul_tensor_1"]


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


def wrong(joint, options):
    """The multiplication by 5 becomes one by a little more."""
    (node,) = [n for n in nodes(joint, aten.mul.Tensor) if n.args[1] == 5.0 and n.name == "mul_1"]
    node.args = (node.args[0], 5.00001)


def test_right_passes_are_found_right_and_the_model_stays_as_it_was():
    model = Net()
    model.body.weight.grad = torch.ones(6, 4)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    idle = own(lambda joint, options: None, stage=Stage.SCHEDULE)
    verdict, lines = examined(passes=["default", idle], model=model)
    assert verdict.culprit is None and verdict.nodes == []
    assert [row.name for row in verdict.rows][:2] == ["capture", "normalize_views"]
    assert len(verdict.rows) == 8 and all(row.found == [[]] for row in verdict.rows)
    assert verdict.compared == 1 + 6 + 3, "loss, gradients, buffers"
    assert "7 of 7" in lines[-1]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), random) and model.calls == 0
    assert torch.equal(model.body.weight.grad, torch.ones(6, 4)) and model.head.bias.grad is None


def test_a_wrong_pass_and_its_node_are_found():
    after = own(lambda joint, options: pytest.fail("the search goes on"), "after")
    verdict, _ = examined(passes=["normalize_views", own(wrong), after])
    assert verdict.culprit == "own"
    assert [bool(row.ranks) for row in verdict.rows] == [False, False, True]
    node = verdict.first_node
    assert (node.name, node.kept) == ("mul_1", True) and "5.00001" in node.after
    assert node.difference.max_rel == pytest.approx(2e-6, rel=0.1)
    differences = verdict.rows[-1].found[0]
    assert differences[0].name == "loss" and 0 < differences[0].max_rel < 1e-4


def test_a_pass_that_changes_only_a_buffer_is_found():
    def forget(joint, options):
        (node,) = [n for n in nodes(joint, aten.add_.Tensor) if n.args[1] == 1]
        node.args = (node.args[0], 2)

    verdict, _ = examined(passes=[own(forget)])
    assert [d.name for d in verdict.rows[-1].found[0]] == ["buffer norm.num_batches_tracked"]
    assert verdict.first_node.op == "aten.add_.Tensor"


def test_a_capture_that_differs_is_at_fault_itself():
    def two_faced(model, x):
        return loss_fn(model, x) * (1.0 if get_proxy_mode() is None else 1.5)

    verdict, lines = examined(two_faced)
    assert verdict.culprit == "capture" and len(verdict.rows) == 1 and verdict.nodes == []
    assert "capture is at fault" in shown(verdict)
    assert "capture" in lines[-1] and "differs on 1 of 1 ranks" in lines[-1]


def test_a_model_that_does_not_repeat_itself_accuses_no_pass():
    generator = torch.Generator()

    def another(model, x):
        return loss_fn(model, x) + torch.rand((), generator=generator)

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
    def failing(joint, options):
        raise ValueError("lost")

    with pytest.raises(gt.PassError, match="'own'.*lost"):
        examined(passes=[own(failing)])


# --- what is shown and returned ------------------------------------------------------------


def shown(verdict):
    console = Console(width=100, file=None)
    with console.capture() as captured:
        console.print(verdict_table(verdict))
    return captured.get()


def found_node(**changes):
    entries = {
        "position": 7,
        "name": "mul_1",
        "op": "aten.mul.Tensor",
        "module": "layers.1.attention",
        "phase": "forward",
        "after": "%mul_1 : [num_users=1] = " + "call_function[...]" * 12,
        "before": "",
        "kept": False,
        "seen_at": "relu",
        "difference": Difference("relu", 0.25, NAN, "(3,) float32 instead of (4,) float32"),
    }
    return NodeDifference(**(entries | changes))


def long_verdict():
    name = "gradient of layers.100.feed_forward.a_module_with_a_long_name.[0].weight"
    bad = [Difference(name, 1.5e-7, INF), Difference("loss", NAN, 0.0, "missing")]
    rows = [
        Row("capture", 12_345, [[] for _ in range(64)]),
        Row("functionalize_index_put", 12_345, [[], *([bad] * 63)]),
    ]
    return Verdict(rows, 900, [None, *([found_node()] * 63)])


def test_the_table_fits_and_says_what_where_and_how_much():
    text = shown(long_verdict())
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    for part in ("12,345", "1.5e-07", "inf", "0, 1"[3:], "(63)", "none of 900", "mul_1"):
        assert part in words
    assert "inserted by the pass" in words and "at relu, which reads it" in words
    assert "'functionalize_index_put' is the first pass that changes the numbers" in words
    joined = re.sub(r"\s", "", text)
    assert "[0]" in joined and "(3,)float32insteadof(4,)float32" in joined


def test_the_earliest_node_of_any_rank_is_named():
    late, early = found_node(), found_node(position=2, name="add")
    verdict = Verdict(long_verdict().rows, 3, [None, late, early])
    assert verdict.first_node is early
    assert "ranks 1, 2" in shown(verdict)


def test_a_verdict_survives_its_file():
    verdict = long_verdict()
    again = Verdict.from_dict(json.loads(json.dumps(verdict.to_dict())))
    assert repr(again) == repr(verdict)  # NaN is not equal to itself


@pytest.fixture
def launched(monkeypatch):
    """Runs the command with ranks that leave this verdict, or none."""

    def launch(verdict, *argv):
        started = []

        def run(words, environment):
            started.append((words, environment))
            if verdict is not None:
                with open(environment["GRAPH_TRAINER_VERDICT_FILE"], "w") as file:
                    json.dump(verdict.to_dict(), file)
            return 1  # torchrun's own status says nothing of the verdict

        monkeypatch.setattr(command, "_run", run)
        for name in ("RANK", "WORLD_SIZE", "NGPU", "NNODES"):
            monkeypatch.delenv(name, raising=False)
        return cli.main(["bisect-passes", *argv]), started

    return launch


def test_the_exit_code_says_what_was_found(launched, capsys):
    equal = Verdict(long_verdict().rows[:1], 3, [])
    assert launched(equal)[0] == 0
    assert "bitwise equal" in capsys.readouterr().out
    code, ((words, environment),) = launched(long_verdict(), "--training.seq_len", "32")
    assert code == 1 and "first pass that changes" in capsys.readouterr().out
    assert words[-4:] == ["-m", "graph_trainer.bisect.worker", "--training.seq_len", "32"]
    assert "--nproc_per_node=2" in words and environment["CUDA_VISIBLE_DEVICES"] == ""
    assert launched(None)[0] == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--training.stepz", "3"], ["--training.steps"]),
        (["--compile.mode", "eager"], ["compile.mode is 'eager'", "aot_fx_trace"]),
        (["--compile.passes", "nothing"], ["compile.passes", "nothing"]),
    ],
)
def test_bad_input_starts_no_ranks(flags, words, launched, capsys):
    code, started = launched(None, *flags)
    assert code == 2 and not started
    err = capsys.readouterr().err
    assert all(word in err for word in words) and "Traceback" not in err


def test_help_teaches(launched, capsys):
    code, started = launched(None, "--help")
    out = capsys.readouterr().out
    assert code == 0 and not started and max(map(len, out.splitlines())) <= 100
    for word in ("Exit code", "NGPU", "--config", "bit by bit"):
        assert word in out
