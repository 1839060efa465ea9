"""What nothing reads goes; what has an effect stays."""

import operator

import pytest

from graph_trainer.core.passes.eliminate_dead_code import eliminate_dead_code
from graph_trainer.testing import Builder, check_pass, targets
from tests.unit.graphs import ALL_REDUCE, aten, c10d


def unread_chain(b, x):
    b.call(aten.relu.default, b.call(aten.neg.default, x))
    return x


def unread_collective(b, x):
    b.waited(ALL_REDUCE, x, "sum", "0")
    return x


def unread_part(b, x):
    parts = b.call(aten.split.Tensor, x, 2)
    read = b.call(operator.getitem, parts, 0)
    b.call(operator.getitem, parts, 1)
    return read


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (unread_chain, []),
        (unread_collective, []),
        (unread_part, [aten.split.Tensor, operator.getitem]),
    ],
)
def test_what_nothing_reads_goes(make, left):
    b = Builder()
    joint = b.joint(b.total(make(b, b.input("x", 4))))
    assert check_pass(eliminate_dead_code, joint)
    assert targets(joint) == [*left, aten.sum.default]


def a_wait_whose_collective_is_read_without_it(b, x):
    """The reader of the collective's result relies on the wait before it."""
    reduced = b.call(ALL_REDUCE, x, "sum", "0")
    b.call(c10d.wait_tensor.default, reduced)
    return reduced


def the_wait_of_an_in_place_collective(b, x):
    copy = b.call(aten.clone.default, x)
    b.waited(c10d.all_reduce_.default, copy, "sum", "0")
    return copy


def a_buffer_mutation(b, x):
    b.call(aten.add_.Tensor, b.call(aten.view.default, b.buffer("steps", 4), [2, 2]), 1)
    return x


def a_random_op_whose_stream_later_ones_read(b, x):
    b.call(aten.rand_like.default, x)
    return b.call(aten.mul.Tensor, x, b.call(aten.rand_like.default, x))


def an_assertion(b, x):
    b.call(aten._assert_async.msg, b.call(aten.eq.Tensor, b.total(x), b.total(x)), "is itself")
    return x


@pytest.mark.parametrize(
    "make",
    [
        a_wait_whose_collective_is_read_without_it,
        the_wait_of_an_in_place_collective,
        a_buffer_mutation,
        a_random_op_whose_stream_later_ones_read,
        an_assertion,
    ],
)
def test_what_has_an_effect_stays(make):
    b = Builder()
    joint = b.joint(b.total(make(b, b.input("x", 4))))
    assert not check_pass(eliminate_dead_code, joint)


def test_a_send_stays_whose_receiver_is_another_rank():
    b = Builder()
    x = b.input("x", 4)
    node = b.graph.call_function(c10d.isend.default, (x, 1, 0, "0"))
    node.meta.update(val=x.meta["val"], custom={"phase": "forward"})
    joint = b.joint(b.total(x))
    eliminate_dead_code(joint)
    assert node in joint.graph.nodes


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
