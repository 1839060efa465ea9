"""Gathers start early, what follows a reduction runs late, and nothing else changes."""

import pytest

import graph_trainer as gt
from graph_trainer.core.graph.annotations import (
    Role,
    copy_annotations,
    is_backward,
    parameters_of,
    role_of,
)
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.passes.overlap.overlap_fsdp import OverlapFsdpOptions, overlap_fsdp
from graph_trainer.testing import Builder, check_pass
from tests.unit.graphs import aten, captured_decoder


def prepared(policy="always", **decoder):
    joint = captured_decoder(**decoder)
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward=policy, passes=BEFORE))
    return joint


BEFORE = [
    "normalize_views",
    "functionalize_writes",
    "eliminate_dead_code",
    "deduplicate_unshards",
    "tag_fsdp_unshards",
    "rematerialize",
]


def in_flight(joint, role):
    """The most collectives of one role that are started and not yet waited for."""
    open_, most = set(), 0
    for node in joint.graph.nodes:
        if role_of(node) is role and is_collective(node):
            open_.add(node)
        elif is_wait(node):
            open_.discard(node.args[0])
        most = max(most, len(open_))
    assert not open_
    return most


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_as_many_are_in_flight_as_asked_for(limit):
    joint = prepared()
    assert in_flight(joint, Role.UNSHARD) == in_flight(joint, Role.REDUCE_GRAD) == 1
    check_pass(overlap_fsdp, joint, OverlapFsdpOptions(in_flight=limit))
    for role in (Role.UNSHARD, Role.REDUCE_GRAD):
        assert in_flight(joint, role) == limit


@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["transformer_block", "size"])
def test_buckets_overlap_too(strategy, limit):
    """A bucket's gather has several parameters before it, its reduction several after it."""
    joint = captured_decoder(layers=4)
    caps = {"cap_mib": 0.0008} if strategy == "size" else {}
    bucketing = BucketCollectivesOptions(strategy=strategy, **caps)
    passes = gt.PassConfig(
        reshard_after_forward="always",
        options={"bucket_collectives": bucketing},
        disable_passes=["schedule_overlap"],
    )
    gt.run_passes(joint, passes)
    assert any(len(parameters_of(n)) > 1 for n in joint.graph.nodes)
    before = [n.name for n in joint.graph.nodes if is_collective(n)]
    check_pass(overlap_fsdp, joint, OverlapFsdpOptions(in_flight=limit))
    assert sorted(before) == sorted(n.name for n in joint.graph.nodes if is_collective(n))
    for role in (Role.UNSHARD, Role.REDUCE_GRAD):
        assert in_flight(joint, role) == limit


def collectives(joint, role, backward):
    return [
        n
        for n in joint.graph.nodes
        if role_of(n) is role and is_collective(n) and is_backward(n) is backward
    ]


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_waits_may_come_in_another_order_than_gathers(limit):
    """Each pair of gathers starts together, and the second is waited for first."""
    joint = prepared()
    for backward in (False, True):
        gathers = collectives(joint, Role.UNSHARD, backward)
        for first, second in zip(gathers[::2], gathers[1::2], strict=False):
            (wait,) = second.users
            first.append(second)
            second.append(wait)
    joint.validate()
    before = [collectives(joint, Role.UNSHARD, b) for b in (False, True)]
    check_pass(overlap_fsdp, joint, OverlapFsdpOptions(in_flight=limit))
    assert [collectives(joint, Role.UNSHARD, b) for b in (False, True)] == before
    assert in_flight(joint, Role.UNSHARD) == max(limit, 2)


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_reductions_may_start_in_another_order_than_they_are_prepared_in(limit):
    """What comes before the first reduction belongs to it; its collective comes after the second
    one's, or even after the second one is done."""
    for after in (0, 2):
        joint = prepared()
        first, second, *_ = collectives(joint, Role.REDUCE_GRAD, True)
        rest = [first, first.next, first.next.next]
        with joint.graph.inserting_before(first):
            cast = joint.graph.call_function(aten.clone.default, first.args[:1])
        cast.meta = dict(first.args[0].meta)
        copy_annotations(first, cast)
        first.update_arg(0, cast)
        place = second
        for _ in range(after):
            place = place.next
        for node in reversed(rest):
            place.append(node)
        joint.validate()
        before = collectives(joint, Role.REDUCE_GRAD, True)
        most = max(in_flight(joint, Role.REDUCE_GRAD), limit)
        check_pass(overlap_fsdp, joint, OverlapFsdpOptions(in_flight=limit))
        assert collectives(joint, Role.REDUCE_GRAD, True) == before
        assert in_flight(joint, Role.REDUCE_GRAD) == most


def test_nothing_moves_from_backward_into_forward():
    joint = prepared()
    check_pass(overlap_fsdp, joint, OverlapFsdpOptions(in_flight=100))
    phases = [is_backward(n) for n in joint.graph.nodes if n.op == "call_function"]
    assert phases == sorted(phases)


def test_a_gather_of_what_is_written_stays_where_it_is():
    joint = prepared("never")
    gathers = [n for n in joint.graph.nodes if role_of(n) is Role.UNSHARD and is_collective(n)]
    last = gathers[-1]
    shard = last.args[0]
    with joint.graph.inserting_before(last):
        joint.graph.call_function(aten.add_.Tensor, (shard, 1))
    position = list(joint.graph.nodes).index(last)
    overlap_fsdp(joint, OverlapFsdpOptions(in_flight=100))
    assert list(joint.graph.nodes).index(last) == position


def test_a_graph_without_collectives_is_left_alone():
    b = Builder()
    x = b.input("x", 4)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, x, 2)))
    assert not check_pass(overlap_fsdp, joint)


def test_at_least_one_must_be_in_flight():
    with pytest.raises(gt.PassError, match="in_flight is 0"):
        OverlapFsdpOptions(in_flight=0)
