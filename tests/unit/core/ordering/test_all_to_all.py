"""Two programs that differ in what they send together, or whom, are no one program."""

import operator

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.analysis.rank_classes import RankClasses
from graph_trainer.core.ordering.exchange import (
    all_agree,
    check_order_across_ranks,
    check_same_collectives,
    check_sequences,
    handed_out,
)
from graph_trainer.core.ordering.proof import prove_order
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.planner.fingerprint import fingerprint_of
from tests.unit.graphs import Builder, aten, c10d, fake_world

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


def refused(joints, words):
    """By the proof and by what ranks do at run time."""
    sequences = [issued_by(joint, len(joints)) for joint in joints]
    assert not all_agree([handed_out(s, rank) for rank, s in enumerate(sequences)])
    for check in (
        lambda: prove_order(dict(enumerate(sequences))),
        lambda: check_sequences(sequences),
    ):
        with pytest.raises(gt.VerificationError) as caught:
            check()
        for word in words:
            assert word in str(caught.value)


def accepted(joints):
    sequences = [issued_by(joint, len(joints)) for joint in joints]
    assert all_agree([handed_out(s, rank) for rank, s in enumerate(sequences)])
    check_sequences(sequences)
    prove_order(dict(enumerate(sequences)))


FLOAT, DOUBLE, LONG = torch.float32, torch.float64, torch.int64


@pytest.mark.parametrize(
    "one, two",
    [
        ([(4, FLOAT), (8, FLOAT)], [(8, FLOAT), (4, FLOAT)]),
        ([(4, FLOAT), (4, LONG)], [(4, FLOAT), (4, DOUBLE)]),
        ([(8, FLOAT)], [(4, FLOAT), (4, FLOAT)]),
    ],
    ids=["order", "dtype", "number"],
)
def test_every_tensor_of_a_coalesced_collective_counts(one, two):
    fake_world(2)
    accepted([coalesced(*one), coalesced(*one)])
    refused([coalesced(*one), coalesced(*two)], [f"{two[-1][0]} x {two[-1][1]}"])
    classes = RankClasses(("fsdp",), ((0, 1),))
    prints = [fingerprint_of(coalesced(*each), 0, classes).digest for each in (one, one, two)]
    assert prints[0] == prints[1] != prints[2]


SENT = [[1, 2, 3], [0, 2, 5], [4, 0, 1]]
RECEIVED = [list(column) for column in zip(*SENT, strict=True)]


def test_an_all_to_all_may_send_every_member_another_number_of_rows():
    fake_world(WORLD)
    accepted([exchange(s, r) for s, r in zip(SENT, RECEIVED, strict=True)])
    accepted([exchange([], [2, 2, 2]), exchange([2, 2, 2], [2, 2, 2]), exchange([], [2, 2, 2])])


@pytest.mark.parametrize("wrong", [[1, 3, 2], [2, 2, 3], [1, 2, 2]])
def test_what_a_member_does_not_expect_is_refused(wrong):
    fake_world(WORLD)
    good = [exchange(s, r) for s, r in zip(SENT, RECEIVED, strict=True)]
    words = ["does not expect", "rank 0", f"sends {wrong} rows and receives [1, 0, 4]"]
    refused([exchange(wrong, RECEIVED[0]), *good[1:]], words)


def test_rows_are_of_one_size():
    fake_world(WORLD)
    even = [2, 2, 2]
    refused([exchange(even, even), exchange(even, even, 3), exchange(even, even)], ["of 3 x"])


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


def answers(monkeypatch, *others):
    """Let one other rank say these things, one at each exchange."""
    said = list(others)
    monkeypatch.setattr("graph_trainer.core.ordering.exchange._alone", lambda: False)

    def exchanged(theirs, mine):
        heard.append(mine)
        theirs[:] = [mine, said.pop(0)]

    heard = []
    monkeypatch.setattr("torch.distributed.all_gather_object", exchanged)
    return heard


def test_the_ranks_of_a_run_tell_each_other_of_wrong_splits(monkeypatch):
    """Two ranks, one after the other: what each says is what the other heard."""
    from graph_trainer.core.ordering.exchange import _balances

    fake_world(2, rank=1)
    joints = [exchange([4, 4], [4, 4]), exchange([6, 2], [4, 4])]
    theirs = issued_by(joints[1], 2)
    by_place = {place: number for (_, place), number in _balances(theirs, 1).items()}
    fake_world(2)
    answers(monkeypatch, ("", handed_out(theirs, 1)), {}, by_place, theirs[0])
    monkeypatch.setattr(
        "graph_trainer.core.ordering.exchange.disagreeing_pairs", lambda digests: []
    )
    with pytest.raises(gt.VerificationError, match="rank 0 does not expect .* rank 1 sends it"):
        check_order_across_ranks(joints[0])


def test_an_unknown_group_is_told_to_the_others(monkeypatch):
    fake_world(2)
    b = Builder()
    reduced = b.call(c10d.all_reduce.default, b.input("x", 4), "sum", "no such group")
    joint = b.joint(b.call(aten.sum.default, b.call(c10d.wait_tensor.default, reduced)))
    heard = answers(monkeypatch, ("", {}))
    with pytest.raises(RuntimeError, match="no such group"):
        check_order_across_ranks(joint)
    assert "no such group" in heard[0][0]


def test_a_group_of_others_is_refused(monkeypatch):
    fake_world(2)
    monkeypatch.setattr(
        "graph_trainer.core.ordering.sequences.group_ranks", lambda group: {"others": (1,)}[group]
    )
    b = Builder()
    reduced = b.call(c10d.all_reduce.default, b.input("x", 4), "sum", "others")
    joint = b.joint(b.call(aten.sum.default, b.call(c10d.wait_tensor.default, reduced)))
    heard = answers(monkeypatch, ("", {}))
    with pytest.raises(gt.VerificationError, match="rank 0 issues .* is no member of that group"):
        check_order_across_ranks(joint)
    assert "is no member" in heard[0][0]
