"""Reductions over several axes become one that leaves every rank its part."""

import math

import pytest
import torch

from graph_trainer.core.graph.annotations import Role, is_backward, parameter_of, role_of, value_of
from graph_trainer.core.passes.catalogue import resolve_passes
from graph_trainer.core.passes.fuse_chained_collectives import fuse_chained_reduce_scatters
from tests.unit.core.passes.rank_order import inner_first, outer_first, run_world, world_of
from tests.unit.fake_ranks import become
from tests.unit.graphs import c10d, code

REDUCE = c10d.reduce_scatter_tensor.default


def reductions(joint):
    return [n for n in joint.graph.nodes if n.target is REDUCE]


@pytest.mark.parametrize(
    ("sizes", "make"),
    [
        pytest.param((2, 3, 2), inner_first, id="from the first axis to the last"),
        pytest.param((3, 2), outer_first, id="from the last axis to the first"),
        pytest.param((2, 4), outer_first, id="wide"),
    ],
)
def test_one_reduction_leaves_every_rank_what_the_chain_left(sizes, make):
    before = world_of(sizes, lambda: make(*sizes))
    after = world_of(sizes, lambda: make(*sizes), fuse_chained_reduce_scatters)
    assert {len(reductions(each.joint)) for each in before} == {len(sizes)}
    assert {len(reductions(each.joint)) for each in after} == {1}
    assert {reductions(each.joint)[0].args[2] for each in after} == {math.prod(sizes)}
    # whole numbers, since the order of summation is another
    one, other = (run_world(world, integers=True) for world in (before, after))
    for a, b in zip(one, other, strict=True):
        assert all(map(torch.equal, a, b))


def test_parts_of_other_ranks_would_be_noticed():
    """By what the test above compares."""

    def in_row_order(joint):
        fuse_chained_reduce_scatters(joint)
        (reduction,) = reductions(joint)
        reduction.args = (*reduction.args[:3], "0")

    before = world_of((3, 2), lambda: outer_first(3, 2))
    after = world_of((3, 2), lambda: outer_first(3, 2), in_row_order)
    one, other = (run_world(world, integers=True) for world in (before, after))
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))


def test_annotations_stay_and_a_second_run_changes_nothing():
    become(5, 8)
    joint = outer_first(4, 2)
    shape = value_of(reductions(joint)[-1]).shape
    fuse_chained_reduce_scatters(joint)
    joint.validate()
    (reduction,) = reductions(joint)
    assert is_backward(reduction) and role_of(reduction) is Role.REDUCE_GRAD
    assert parameter_of(reduction) == "weight" and value_of(reduction).shape == shape
    text = code(joint)
    fuse_chained_reduce_scatters(joint)
    assert code(joint) == text


def test_other_reductions_of_the_two_are_left_alone():
    become(0, 8)
    joint = outer_first(4, 2)
    first, second = reductions(joint)
    second.args = (second.args[0], "max", *second.args[2:])
    text = code(joint)
    fuse_chained_reduce_scatters(joint)
    assert code(joint) == text
    first.args = (first.args[0], "max", *first.args[2:])
    fuse_chained_reduce_scatters(joint)
    assert [r.args[1] for r in reductions(joint)] == ["max"]


def test_it_is_not_in_the_default_list():
    """The sum is the same but for its order: numbers may differ in the last bit."""
    assert fuse_chained_reduce_scatters not in resolve_passes(["default"])
