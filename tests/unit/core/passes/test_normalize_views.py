"""Views that show exactly what they read go; every other view stays."""

import pytest
import torch

from graph_trainer.core.passes.normalize_views import normalize_views
from graph_trainer.testing import Builder, check_pass, run, targets
from tests.unit.graphs import aten

V = aten.view.default
T = aten.t.default
TRANSPOSE = aten.transpose.int
PERMUTE = aten.permute.default
EXPAND = aten.expand.default
SLICE = aten.slice.Tensor


def graph_of(shape, *views):
    """sum(2 * view(...view(x))), and the views."""
    b = Builder()
    node = b.input("x", *shape)
    for op, *args in views:
        node = b.call(op, node, *args)
    return b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, node, 2)))


def read_by_mul(joint):
    (mul,) = joint.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    return mul.args[0]


REMOVED = {
    "detach": ((3, 4), (aten.detach.default,)),
    "alias": ((3, 4), (aten.alias.default,)),
    "lift_fresh": ((3, 4), (aten.lift_fresh.default,)),
    "view to its own shape": ((3, 4), (V, [3, 4])),
    "view there and back": ((3, 4), (V, [12]), (V, [3, 4])),
    "unsafe view to its own shape": ((3, 4), (aten._unsafe_view.default, [3, 4])),
    "expand to its own shape": ((3, 4), (EXPAND, [3, 4])),
    "slice of everything": ((3, 4), (SLICE, 0, 0, 9223372036854775807)),
    "squeeze of a dimension that is larger": ((3, 4), (aten.squeeze.dim, 0)),
    "permutation that permutes nothing": ((3, 3), (PERMUTE, [0, -1])),
    "t of t": ((3, 3), (T,), (T,)),
    "t of a vector": ((3,), (T,)),
    "transpose back": ((3, 4), (TRANSPOSE, 0, 1), (TRANSPOSE, 0, 1)),
    "transpose back with the pair turned": ((3, 4), (TRANSPOSE, 0, 1), (TRANSPOSE, 1, 0)),
    "transpose back counted from the end": ((2, 3, 4), (TRANSPOSE, 1, 2), (TRANSPOSE, -1, -2)),
    "transpose of t": ((3, 3), (T,), (TRANSPOSE, -1, 0)),
    "permute back": ((2, 3, 4), (PERMUTE, [2, 0, 1]), (PERMUTE, [1, 2, 0])),
    "four in a row": ((3, 4), (T,), (T,), (T,), (T,)),
}


@pytest.mark.parametrize("name", REMOVED)
def test_fires(name):
    joint = graph_of(REMOVED[name][0], *REMOVED[name][1:])
    assert check_pass(normalize_views, joint)
    assert read_by_mul(joint).op == "placeholder"


KEPT = {
    "t": ((3, 4), (T,)),
    "t of equal dimensions": ((3, 3), (T,)),
    "transpose of equal dimensions": ((2, 3, 3), (TRANSPOSE, 1, 2)),
    "permutation of equal dimensions": ((3, 3), (PERMUTE, [1, 0])),
    "two transposes of other pairs": ((3, 3, 3), (TRANSPOSE, 0, 1), (TRANSPOSE, 1, 2)),
    "the same permutation twice": ((3, 3, 3), (PERMUTE, [1, 2, 0]), (PERMUTE, [1, 2, 0])),
    "expand that repeats": ((1, 4), (EXPAND, [3, 4])),
    "slice off the end": ((3, 4), (SLICE, 0, 0, 2)),
    "slice off the front": ((4, 4), (SLICE, 0, 2, 4)),
    "every other row": ((4, 4), (SLICE, 0, 0, 4, 2)),
    "squeeze": ((1, 4), (aten.squeeze.dim, 0)),
    "view to another shape": ((3, 4), (V, [4, 3])),
    "two slices that meet in shape": ((4, 2), (SLICE, 0, 0, 2), (T,)),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_near_miss_stays(name):
    assert not check_pass(normalize_views, graph_of(KEPT[name][0], *KEPT[name][1:]))


def test_two_slices_of_one_size_are_not_the_same():
    b = Builder()
    whole = b.input("x", 4)
    first = b.call(SLICE, whole, 0, 0, 2)
    second = b.call(SLICE, whole, 0, 2, 4)
    difference = b.call(aten.sub.Tensor, first, b.call(aten.detach.default, second))
    joint = b.joint(b.call(aten.sum.default, difference))
    assert check_pass(normalize_views, joint)
    assert difference.args == (first, second)


@pytest.mark.parametrize("view", [(aten.alias.default,), (aten.detach.default,), (V, [4])])
def test_a_write_through_a_removed_view_hits_the_same_storage(view):
    b = Builder()
    x, buffer = b.input("x", 4), b.buffer("steps", 4)
    op, *args = view
    b.call(aten.add_.Tensor, b.call(op, buffer, *args), x)
    joint = b.joint(b.call(aten.sum.default, buffer))
    *_, before = run(joint)
    assert check_pass(normalize_views, joint)
    assert torch.equal(run(joint)[-1], before)
    assert targets(joint) == [aten.add_.Tensor, aten.sum.default]


def test_a_view_whose_input_has_other_strides_now_becomes_a_reshape():
    b = Builder()
    x = b.input("x", 3, 4)
    computed = b.call(aten.mul.Tensor, x, 2)
    viewed = b.call(V, computed, [12])
    joint = b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, viewed, viewed)))
    # what a layout pass would do: the same values, stored by columns
    with joint.graph.inserting_before(viewed):
        turned = b.call(aten.t.default, computed)
        stored = b.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        back = b.call(aten.t.default, stored)
    viewed.replace_input_with(computed, back)
    with pytest.raises(RuntimeError, match="view"):
        run(joint)
    normalize_views(joint)
    assert viewed.target is aten.reshape.default
    assert viewed.meta["val"].is_contiguous()
    assert not check_pass(normalize_views, joint)


def test_a_view_that_layout_allows_stays_a_view():
    joint = graph_of((3, 4), (T,), (V, [4, 3, 1]))
    assert not check_pass(normalize_views, joint)
