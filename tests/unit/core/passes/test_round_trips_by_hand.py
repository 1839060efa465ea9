"""Local slices of gathers in graphs by hand: which of them are what this rank sent."""

import functools

import pytest
import torch

from graph_trainer.core.graph.annotations import (
    annotate_node,
    annotation,
    is_saved_for_backward,
    set_saved_for_backward,
)
from graph_trainer.core.passes.eliminate_round_trips import eliminate_round_trips
from graph_trainer.testing import Builder
from tests.unit.core.passes.test_eliminate_round_trips import communication, fires
from tests.unit.graphs import ALL_REDUCE, GATHER, aten, fake_world


def gathered(b, source):
    return b.waited(GATHER, source, 2, "0")


def cut(b, whole, start, stop, dim=0, group="0"):
    """A slice that capture marked."""
    node = b.call(aten.slice.Tensor, whole, dim, start, stop)
    annotate_node(node, annotation(local_slice=group))
    return node


def copied(b, node):
    return b.call(aten.clone.default, node)


def computed(b, *shape):
    """A tensor of this graph, which ranks gather."""
    return b.call(aten.sin.default, b.input("x", *shape))


def parts_of(b, full, rows=2):
    return [b.call(aten.slice.Tensor, full, 0, rows * i, rows * i + rows) for i in range(2)]


def total(b, *nodes):
    """A scalar that depends on every element and its place."""
    terms = []
    for node in nodes:
        flat = b.call(aten.reshape.default, node, [node.meta["val"].numel()])
        terms.append(b.call(aten.sum.default, b.call(aten.cumsum.default, flat, 0)))
    return functools.reduce(lambda x, y: b.call(aten.add.Tensor, x, y), terms)


@pytest.fixture(params=[0, 1])
def rank(request):
    fake_world(2, request.param)
    return request.param


def test_another_view_of_the_same_elements(rank):
    b = Builder()
    x = computed(b, 2, 6)
    whole = b.call(aten.view.default, b.call(aten.alias.default, gathered(b, x)), [8, 3])
    back = copied(b, cut(b, whole, 4 * rank, 4 * rank + 4))
    joint = b.joint(total(b, back))
    assert fires(joint)
    assert communication(joint) == []
    (view,) = joint.graph.find_nodes(op="call_function", target=aten.view.default)
    assert view.args == (x, [4, 3])


def test_views_of_a_slice_without_a_copy_know_where_they_begin(rank):
    b = Builder()
    x = computed(b, 4, 6)
    mine = cut(b, gathered(b, x), 4 * rank, 4 * rank + 4)
    part = b.call(aten.slice.Tensor, mine, 0, 1, 3)
    joint = b.joint(total(b, part, b.call(aten.t.default, part)))
    assert part.meta["val"].storage_offset() == 24 * rank + 6
    assert fires(joint)
    assert part.args[0] is x and part.meta["val"].storage_offset() == 6


def test_what_backward_saved_is_saved_now_too(rank):
    b = Builder()
    x = computed(b, 2, 6)
    back = copied(b, cut(b, gathered(b, x), 2 * rank, 2 * rank + 2))
    set_saved_for_backward(back)
    assert fires(b.joint(total(b, back)))
    assert is_saved_for_backward(x)


# --- near misses: not changed, on every rank ---------------------------------------------------


def whole(b):
    return gathered(b, computed(b, 2, 6))


def columns(b, parts, rank, size=6):
    """A rank's columns of parts that are put side by side."""
    full = b.call(aten.cat.default, parts, 1)
    return cut(b, full, size * rank, size * rank + size, dim=1)


def viewed(b, rank, size, source, op, *args, dim=0):
    return cut(b, b.call(op, gathered(b, source), *args), size * rank, size * rank + size, dim)


def of_two_gathers(b):
    sent = [b.input(name, 2, 6) for name in "xy"]
    return [parts_of(b, gathered(b, x))[i] for i, x in enumerate(sent)]


def transposed(b):
    return [b.call(aten.t.default, p) for p in parts_of(b, gathered(b, computed(b, 3, 3)), 3)]


def reduced(b, x):
    return b.waited(ALL_REDUCE, x, "sum", "0")


NEAR_MISSES = {
    "a smaller slice": lambda b, r: cut(b, whole(b), 2 * r, 2 * r + 1),
    "another rank's slice": lambda b, r: cut(b, whole(b), 2 - 2 * r, 4 - 2 * r),
    "a slice of an unmarked slice": lambda b, r: cut(b, parts_of(b, whole(b))[r], 0, 2),
    "parts in another order": lambda b, r: columns(b, parts_of(b, whole(b))[::-1], r),
    "one part twice": lambda b, r: columns(b, parts_of(b, whole(b))[:1] * 2, r),
    "one part missing": lambda b, r: columns(b, parts_of(b, whole(b))[:1], 0),
    "parts of two gathers": lambda b, r: columns(b, of_two_gathers(b), r),
    "transposed parts": lambda b, r: columns(b, transposed(b), r, 3),
    "other numbers": lambda b, r: viewed(b, r, 2, computed(b, 2, 6), aten.view.dtype, torch.int32),
    # the local slice on rank 0, and half of rank 0's on rank 1
    "repeated elements": lambda b, r: viewed(
        b, r, 6, computed(b, 2, 6), aten.as_strided.default, [2, 12], [6, 1], dim=1
    ),
    "other strides": lambda b, r: viewed(
        b, r, 4, b.call(aten.t.default, computed(b, 6, 2)), aten.view.default, [8, 3]
    ),
    "a slice of a sum": lambda b, r: cut(b, reduced(b, computed(b, 4, 6)), 2 * r, 2 * r + 2),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_not_exactly_what_this_rank_sent_stays(name, rank):
    b = Builder()
    assert not fires(b.joint(total(b, copied(b, NEAR_MISSES[name](b, rank)))))


def test_a_reader_that_depends_on_the_strides_of_a_slice_stays(rank):
    """Columns of a whole are not contiguous, what was sent is: readers would change strides."""
    b = Builder()
    x = computed(b, 2, 6)
    full = gathered(b, x)
    parts = [b.call(aten.slice.Tensor, full, 0, 2 * i, 2 * i + 2) for i in range(2)]
    mine = cut(b, b.call(aten.cat.default, parts, 1), 6 * rank, 6 * rank + 6, dim=1)
    joint = b.joint(total(b, b.call(aten.cos.default, mine), copied(b, mine)))
    assert fires(joint), "the copy is what was sent"
    (cosine,) = joint.graph.find_nodes(op="call_function", target=aten.cos.default)
    assert cosine.args == (mine,)


def test_what_draws_random_numbers_still_draws_them(rank):
    b = Builder()
    x = b.input("x", 2, 6)
    drawn = b.call(aten.rand_like.default, x)
    copied(b, cut(b, gathered(b, drawn), 2 * rank, 2 * rank + 2))
    joint = b.joint(total(b, x))
    eliminate_round_trips(joint)
    joint.validate()
    assert communication(joint) == [] and drawn in joint.graph.nodes


@pytest.mark.parametrize("written", ["sent", "gathered", "copy"])
def test_what_is_written_in_place_stays(written, rank):
    b = Builder()
    nodes = {"sent": computed(b, 2, 6)}
    nodes["gathered"] = gathered(b, nodes["sent"])
    mine = cut(b, nodes["gathered"], 2 * rank, 2 * rank + 2)
    nodes["copy"] = copied(b, mine)
    early = b.call(aten.mul_.Tensor, nodes[written], 2) if written != "copy" else nodes["copy"]
    late = b.call(aten.mul_.Tensor, nodes["copy"], 3) if written == "copy" else nodes["copy"]
    assert not fires(b.joint(total(b, early, late, nodes["sent"])))


def test_what_is_returned_keeps_its_own_storage(rank):
    """A gradient in the parameter's own storage would change with it."""
    b = Builder()
    w = b.parameter("w", 2, 6)
    back = copied(b, cut(b, gathered(b, w), 2 * rank, 2 * rank + 2))
    joint = b.joint(total(b, w), w=back)
    assert fires(joint)
    assert communication(joint) == []
    assert joint.output_values()[1] is back and back.args == (w,)


def test_a_returned_slice_stays(rank):
    b = Builder()
    w = b.parameter("w", 2, 6)
    back = cut(b, gathered(b, w), 2 * rank, 2 * rank + 2)
    assert not fires(b.joint(total(b, w), w=back))


def test_a_graph_without_local_slices_needs_no_process_group():
    b = Builder()
    joint = b.joint(total(b, gathered(b, b.input("x", 2, 6))))
    eliminate_round_trips(joint)
