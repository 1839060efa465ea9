"""Two programs that differ in what they send together, or whom, are no one program."""

import operator

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.ordering.exchange import check_same_collectives
from graph_trainer.core.ordering.proof import prove_order
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.planner.fingerprint import fingerprint_of
from graph_trainer.testing import Builder
from tests.unit.core.ordering.front_ends import FRONT_ENDS, refused
from tests.unit.graphs import aten, c10d, fake_world

WORLD = 3


def coalesced(*tensors):
    """One reduction of tensors of these sizes and dtypes."""
    b = Builder()
    inputs = [b.input(f"x{i}", n, dtype=d) for i, (n, d) in enumerate(tensors)]
    reduced = b.call(c10d.all_reduce_coalesced.default, inputs, "sum", name_of_world())
    part = b.call(c10d.wait_tensor.default, b.call(operator.getitem, reduced, 0))
    return b.joint(b.call(aten.sum.default, part))


def exchange(sent, received, columns=2):
    """One all-to-all of rows."""
    b = Builder()
    x = b.input("x", sum(sent) if sent else 2 * WORLD, columns)
    args = (x, received, sent, name_of_world())
    waited = b.call(c10d.wait_tensor.default, b.call(c10d.all_to_all_single.default, *args))
    return b.joint(b.call(aten.sum.default, waited))


def name_of_world():
    return torch.distributed.group.WORLD.group_name


def issued(joints):
    return [issued_by(joint, len(joints)) for joint in joints]


FLOAT, DOUBLE, LONG = torch.float32, torch.float64, torch.int64


@FRONT_ENDS
@pytest.mark.parametrize(
    "one, two",
    [
        ([(4, FLOAT), (8, FLOAT)], [(8, FLOAT), (4, FLOAT)]),
        ([(4, FLOAT), (4, LONG)], [(4, FLOAT), (4, DOUBLE)]),
        ([(8, FLOAT)], [(4, FLOAT), (4, FLOAT)]),
    ],
    ids=["order", "dtype", "number"],
)
def test_every_tensor_of_a_coalesced_collective_counts(check, one, two):
    fake_world(2)
    assert check(issued([coalesced(*one), coalesced(*one)])) is None
    different = issued([coalesced(*one), coalesced(*two)])
    refused(*different, words=[f"{two[-1][0]} x {two[-1][1]}"], check=check)
    classes = RankClasses(("fsdp",), ((0, 1),))
    prints = [fingerprint_of(coalesced(*each), 0, classes).digest for each in (one, one, two)]
    assert prints[0] == prints[1] != prints[2]


SENT = [[1, 2, 3], [0, 2, 5], [4, 0, 1]]
RECEIVED = [list(column) for column in zip(*SENT, strict=True)]


@FRONT_ENDS
def test_an_all_to_all_may_send_every_member_another_number_of_rows(check):
    fake_world(WORLD)
    even = [2, 2, 2]
    rows = [exchange(s, r) for s, r in zip(SENT, RECEIVED, strict=True)]
    for joints in (rows, [exchange([], even), exchange(even, even), exchange([], even)]):
        assert check(issued(joints)) is None


@FRONT_ENDS
@pytest.mark.parametrize("wrong", [[1, 3, 2], [2, 2, 3], [1, 2, 2]])
def test_what_a_member_does_not_expect_is_refused(check, wrong):
    fake_world(WORLD)
    good = [exchange(s, r) for s, r in zip(SENT, RECEIVED, strict=True)]
    words = ["does not expect", "rank 0", f"sends {wrong} rows and receives [1, 0, 4]"]
    refused(*issued([exchange(wrong, RECEIVED[0]), *good[1:]]), words=words, check=check)


@FRONT_ENDS
def test_rows_are_of_one_size(check):
    fake_world(WORLD)
    even = [2, 2, 2]
    joints = [exchange(even, even), exchange(even, even, 3), exchange(even, even)]
    refused(*issued(joints), words=["of 3 x"], check=check)


def test_one_rank_speaks_for_its_class():
    fake_world(WORLD)
    classes = RankClasses(("fsdp",), ((0, 1, 1),))
    first, rest = exchange([1, 2, 2], [1, 3, 3]), exchange([3, 4, 4], [2, 4, 4])
    prove_order({0: issued_by(first, 3), 1: issued_by(rest, 3)}, classes)
    for wrong in (exchange([3, 4, 5], [2, 4, 4]), exchange([3, 4, 4], [2, 5, 5])):
        with pytest.raises(gt.VerificationError, match="rank 1 does not expect .* rank 1 sends"):
            prove_order({0: issued_by(first, 3), 1: issued_by(wrong, 3)}, classes)


def test_splits_are_in_the_fingerprint_and_hold_for_a_second_batch_shape():
    fake_world(2)
    classes = RankClasses(("fsdp",), ((0, 1),))
    even, odd = exchange([4, 4], [4, 4]), exchange([6, 2], [4, 4])
    assert fingerprint_of(even, 0, classes).digest != fingerprint_of(odd, 0, classes).digest
    check_same_collectives(even, exchange([4, 4], [4, 4]))
    with pytest.raises(gt.VerificationError, match=r"sends \[6, 2\] rows"):
        check_same_collectives(even, odd)


def test_there_is_one_split_for_each_member():
    fake_world(2)
    with pytest.raises(gt.VerificationError, match="has 2 members: give one size for each"):
        issued_by(exchange([3, 3, 2], [4, 4]), 2)
