"""Runs compared node by node: the node that is named is the one that made the difference."""

import pytest
import torch

from graph_trainer.core.analysis.node_digests import first_differing_node, partners_of, run_graph
from graph_trainer.core.analysis.one_process import OneProcess
from graph_trainer.core.graph.annotations import Phase, copy_annotations
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.testing import Builder, values_for
from tests.unit.graphs import aten, c10d


class Garbage(OneProcess):
    """Memory that is not written yet holds other numbers in each run."""

    def call_function(self, target, args, kwargs):
        if "empty" in str(target):
            return torch.rand(args[0])
        return super().call_function(target, args, kwargs)


def find(joint, *changes, differing=("loss",)):
    """The first node that differs after these changes of a copy of the graph."""
    after = copy_graph(joint)
    for change in changes:
        change(after)
    after.validate()
    values = values_for(joint)
    first, second, repeated = (
        run_graph(graph, values, interpreter=Garbage) for graph in (joint, after, after)
    )
    return first_differing_node((joint, first), (after, second), repeated, differing)


def nodes(joint, op):
    return joint.graph.find_nodes(op="call_function", target=op)


def factor(value, place=0):
    """A change: the multiplication at that place is one by another number."""

    def change(joint):
        node = nodes(joint, aten.mul.Tensor)[place]
        node.args = (node.args[0], value)

    return change


def becomes(old, new, place=0):
    """A change: a node keeps its inputs and name, and calls another op."""

    def change(joint):
        nodes(joint, old)[place].target = new

    return change


OTHER_RELU = becomes(aten.relu.default, aten.abs.default)


def insert(joint, before, op, *args, like, **kwargs):
    """A new node in front of another, with the value and annotations of `like`."""
    with joint.graph.inserting_before(before):
        new = joint.graph.call_function(op, args, kwargs)
    new.meta["val"] = like.meta["val"]
    copy_annotations(like, new)
    return new


def replace(joint, node, op, *args, **kwargs):
    """Let a new node take the place of another, as a pass does."""
    new = insert(joint, node, op, *args, like=node, **kwargs)
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
    gradient = b.call(aten.sum.dim_IntList, doubled, [0], phase=Phase.BACKWARD)
    return b.joint(total, w=gradient)


def test_a_node_that_is_kept_and_changed():
    node = find(chain(), factor(1.5, place=1))
    assert node.name == "mul_tensor_1" and node.args[1] == 1.5


def test_a_node_that_takes_the_place_of_another():
    def change(joint):
        old = nodes(joint, aten.mul.Tensor)[0]
        replace(joint, old, aten.mul.Tensor, old.args[0], 2.25)

    assert find(chain(), change).args[1] == 2.25


def test_a_node_put_between_two():
    def change(joint):
        (relu,) = nodes(joint, aten.relu.default)
        relu.args = (insert(joint, relu, aten.neg.default, relu.args[0], like=relu),)

    assert find(chain(), change).target is aten.neg.default


def test_a_sum_in_another_order():
    def change(joint):
        (total,) = nodes(joint, aten.sum.default)
        source, sums = total.args[0], []
        for place in range(4):
            row = insert(joint, total, aten.select.int, source, 0, place, like=total)
            with torch.no_grad():
                row.meta["val"] = source.meta["val"][0]
            sums.append(insert(joint, total, aten.sum.default, row, like=total))
        first = insert(joint, total, aten.add.Tensor, sums[3], sums[0], like=total)
        second = insert(joint, total, aten.add.Tensor, first, sums[2], like=total)
        replace(joint, total, aten.add.Tensor, second, sums[1])

    assert find(chain(), change).target is aten.add.Tensor


@pytest.mark.parametrize(("op", "sources"), [(aten.neg.default, 2), (aten.clone.default, 1)])
def test_a_new_node_without_a_counterpart_is_named_where_its_value_is_new(op, sources):
    """Else the kept node that reads it is named: a copy of a value that there was is right."""
    b = Builder()
    x = b.input("x", 4)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.cat.default, [x] * sources)))

    def change(joint):
        (cat,) = nodes(joint, aten.cat.default)
        (source, *_) = cat.args[0]
        new = insert(joint, cat, op, source, like=cat)
        new.meta["val"] = source.meta["val"]
        cat.args = ([*cat.args[0], new],)
        cat.meta["val"] = cat.meta["val"].new_empty(4 * sources + 4)

    expected = aten.neg.default if op is aten.neg.default else aten.cat.default
    assert find(joint, change).target is expected


def test_what_leads_to_nothing_that_differs_is_not_blamed():
    def other_sum(joint):
        (summed,) = nodes(joint, aten.sum.dim_IntList)
        replace(joint, summed, aten.mean.dim, summed.args[0], [0])

    for differing, blamed in (("gradient of w", aten.mean.dim), ("loss", aten.abs.default)):
        assert find(chain(), OTHER_RELU, other_sum, differing=[differing]).target is blamed


@pytest.mark.parametrize("unrelated", [[], [OTHER_RELU]])
def test_gradients_that_are_returned_in_each_others_place(unrelated):
    b = Builder()
    x, _, _ = b.input("x", 3), b.parameter("v", 3), b.parameter("w", 3)
    b.call(aten.relu.default, x)
    one, two = b.call(aten.mul.Tensor, x, 2.0), b.call(aten.mul.Tensor, x, 3.0)
    joint = b.joint(b.call(aten.sum.default, x), v=one, w=two)

    def swap(joint):
        loss, first, second = joint.output_values()
        joint.output_node().args = ((loss, second, first),)

    node = find(joint, *unrelated, swap, differing=["gradient of v", "gradient of w"])
    assert node.name == "output"


@pytest.mark.parametrize(
    "write",
    [
        lambda b, count, x: b.call(aten.add_.Tensor, count, x),
        lambda b, count, x: b.call(aten.add_.Tensor, b.call(aten.slice.Tensor, count, 0, 0, 3), x),
        lambda b, count, x: b.call(aten._foreach_add_.List, [count], [x]),
    ],
    ids=["in place", "through a view", "by an op that returns nothing"],
)
def test_a_buffers_writer_is_blamed_and_no_unrelated_change(write):
    b = Builder()
    x, count = b.input("x", 3), b.buffer("norm.count", 3)
    b.call(aten.relu.default, x)
    write(b, count, b.call(aten.mul.Tensor, x, 2.0))
    joint = b.joint(b.call(aten.sum.default, x))
    buffer = ["buffer norm.count"]
    assert find(joint, OTHER_RELU, factor(2.5), differing=buffer).name == "mul_tensor"
    assert find(joint, OTHER_RELU, factor(2.5)) is None
    if writer := nodes(joint, aten.add_.Tensor):
        other_write = becomes(aten.add_.Tensor, aten.sub_.Tensor)
        assert find(joint, OTHER_RELU, other_write, differing=buffer).name == writer[0].name


def test_memory_written_through_another_node_is_followed():
    b = Builder()
    x = b.input("x", 3)
    scratch, scaled = b.call(aten.mul.Tensor, x, 0.0), b.call(aten.mul.Tensor, x, 2.0)
    b.call(aten.copy_.default, scratch, scaled)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.exp.default, scratch)))
    assert find(joint, factor(2.5, place=1)).name == "mul_tensor_1"


def test_what_a_kept_reader_makes_up_for_is_not_blamed():
    """Both factors negated give the same product."""
    b = Builder()
    x, y = b.input("x", 16), b.input("y", 16)
    product = b.call(aten.mul.Tensor, x, y)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.relu.default, product)))

    def negated(joint):
        (product,) = nodes(joint, aten.mul.Tensor)
        for source in product.args:
            new = insert(joint, product, aten.neg.default, source, like=product)
            product.replace_input_with(source, new)

    assert find(joint, negated) is None
    assert find(joint, negated, OTHER_RELU).name == "relu_default"


@pytest.mark.parametrize("in_between", [False, True])
def test_what_an_inserted_node_makes_up_for_is_not_blamed(in_between):
    joint = chain()

    def change(joint):
        scaled = nodes(joint, aten.mul.Tensor)[1]
        (relu,) = nodes(joint, aten.relu.default)
        twice = insert(joint, scaled, aten.mul.Tensor, scaled.args[0], 2.0, like=scaled)
        last = insert(joint, relu, aten.mul.Tensor, scaled, 0.5, like=scaled)
        if in_between:
            last = insert(joint, relu, aten.neg.default, last, like=scaled)
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
    assert find(joint, factor(1.0)) is None
    assert find(joint, becomes(aten.add.Tensor, aten.mul.Tensor)).name == "add_tensor"


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

    assert find(joint) is None
    assert find(joint, becomes(aten.add.Tensor, aten.mul.Tensor)).name == "add_tensor"

    def other_input(joint):
        (reduced,) = nodes(joint, reduce)
        (copied,) = nodes(joint, aten.copy_.default)
        reduced.replace_input_with(reduced.args[0], copied)

    assert find(joint, other_input).target is c10d.wait_tensor.default


def test_counterparts_are_found_through_chains_of_new_nodes():
    joint = chain()
    before = copy_graph(joint)
    for old in reversed(list(nodes(joint, aten.mul.Tensor))):
        replace(joint, old, aten.mul.Tensor, *old.args)
    kept = {new.name: old.name for new, old in partners_of(before, joint).items()}
    changed = {new: old for new, old in kept.items() if new != old}
    assert sorted(changed.values()) == ["mul_tensor", "mul_tensor_1"]
