"""What nothing reads goes; what has an effect stays."""

import operator

import pytest

from graph_trainer.core.passes.eliminate_dead_code import eliminate_dead_code
from tests.unit.graphs import Builder, aten, c10d, check_pass, targets


def test_an_unread_chain_goes_whole():
    b = Builder()
    x = b.input("x", 4)
    b.call(aten.relu.default, b.call(aten.neg.default, x))
    joint = b.joint(b.call(aten.sum.default, x))
    assert check_pass(eliminate_dead_code, joint)
    assert targets(joint) == [aten.sum.default]


def test_an_unread_collective_goes_with_its_wait():
    b = Builder()
    x = b.input("x", 4)
    b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, x, "sum", "0"))
    joint = b.joint(b.call(aten.sum.default, x))
    assert check_pass(eliminate_dead_code, joint)
    assert targets(joint) == [aten.sum.default]


def test_a_wait_stays_whose_collective_is_read_without_it():
    """The reader of the collective's result relies on the wait before it."""
    b = Builder()
    x = b.input("x", 4)
    reduced = b.call(c10d.all_reduce.default, x, "sum", "0")
    b.call(c10d.wait_tensor.default, reduced)
    joint = b.joint(b.call(aten.sum.default, reduced))
    assert not check_pass(eliminate_dead_code, joint)


def test_the_wait_of_an_in_place_collective_stays():
    b = Builder()
    buffer = b.call(aten.clone.default, b.input("x", 4))
    b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce_.default, buffer, "sum", "0"))
    joint = b.joint(b.call(aten.sum.default, buffer))
    assert not check_pass(eliminate_dead_code, joint)


def test_a_send_stays_whose_receiver_is_another_rank():
    b = Builder()
    x = b.input("x", 4)
    node = b.graph.call_function(c10d.isend.default, (x, 1, 0, "0"))
    node.meta.update(val=x.meta["val"], custom={"phase": "forward"})
    joint = b.joint(b.call(aten.sum.default, x))
    eliminate_dead_code(joint)
    assert node in joint.graph.nodes


def test_a_buffer_mutation_stays():
    b = Builder()
    x, buffer = b.input("x", 4), b.buffer("steps", 4)
    b.call(aten.add_.Tensor, b.call(aten.view.default, buffer, [2, 2]), 1)
    joint = b.joint(b.call(aten.sum.default, x))
    assert not check_pass(eliminate_dead_code, joint)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_stays_while_it_writes_its_statistics(training):
    b = Builder()
    x, weight = b.input("x", 3, 2), b.input("weight", 2)
    mean, var = b.buffer("running_mean", 2), b.buffer("running_var", 2)
    norm = aten.native_batch_norm.default
    b.call(norm, x, weight, weight, mean, var, training, 0.1, 1e-5)
    joint = b.joint(b.call(aten.sum.default, x))
    assert check_pass(eliminate_dead_code, joint) is not training
    assert (norm in targets(joint)) is training


def test_a_random_op_stays_because_later_ones_read_its_stream():
    b = Builder()
    x = b.input("x", 4)
    b.call(aten.rand_like.default, x)
    noise = b.call(aten.rand_like.default, x)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, x, noise)))
    assert not check_pass(eliminate_dead_code, joint)


def test_an_assertion_stays():
    b = Builder()
    x = b.input("x", 4)
    total = b.call(aten.sum.default, x)
    b.call(aten._assert_async.msg, b.call(aten.eq.Tensor, total, total), "sums to itself")
    assert not check_pass(eliminate_dead_code, b.joint(total))


def test_every_unread_output_of_a_multi_output_op_goes():
    b = Builder()
    x = b.input("x", 4)
    parts = b.call(aten.split.Tensor, x, 2)
    kept = b.call(operator.getitem, parts, 0)
    b.call(operator.getitem, parts, 1)
    joint = b.joint(b.call(aten.sum.default, kept))
    assert check_pass(eliminate_dead_code, joint)
    assert targets(joint) == [aten.split.Tensor, operator.getitem, aten.sum.default]
