"""Ranks that would hang are refused, with what differs; ranks that would not are let through."""

import dataclasses

import pytest
import torch
from torch.distributed import group as world_group

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.ordering.exchange import (
    LargestOfAllRanks,
    all_agree,
    check_order_across_ranks,
    check_same_collectives,
    check_sequences,
    digests_of,
    disagreeing_pairs,
    handed_out,
    raise_first_failure,
)
from graph_trainer.core.ordering.sequences import issued_by, sequence_of
from tests.unit.graphs import Builder, aten, c10d, captured_decoder, collective, fake_world


def sequences(*ranks):
    return [sequence_of(issued) for issued in ranks]


def agree(*ranks):
    return all_agree([handed_out(s, rank) for rank, s in enumerate(sequences(*ranks))])


def accepted(*ranks):
    check_sequences(sequences(*ranks))
    assert agree(*ranks)


def refused(*ranks, words):
    assert not agree(*ranks)
    with pytest.raises(gt.VerificationError) as caught:
        check_sequences(sequences(*ranks))
    for word in ("would hang", *words):
        assert word in str(caught.value)


GATHER = collective()
REDUCE = collective("reduce_scatter_tensor", reduction="sum")


def test_equal_sequences_are_let_through():
    accepted([GATHER, REDUCE], [GATHER, REDUCE])
    accepted([], [])


def test_groups_may_differ_from_each_other_while_their_members_agree():
    """Stages of a pipeline, or experts: other sizes on each of two groups."""
    small = [collective(ranks=(0, 1), numel=4), collective(ranks=(0, 2))]
    small_too = [collective(ranks=(0, 1), numel=4), collective(ranks=(1, 3))]
    large = [collective(ranks=(2, 3), numel=9), collective(ranks=(0, 2))]
    large_too = [collective(ranks=(2, 3), numel=9), collective(ranks=(1, 3))]
    accepted(small, small_too, large, large_too)


def test_disjoint_groups_may_issue_different_numbers():
    low, high = collective(ranks=(0, 1)), collective(ranks=(2, 3), kind="all_reduce")
    accepted([low], [low], [high, high, high], [high, high, high])


DIFFERING = {
    "order": ([GATHER, REDUCE], [REDUCE, GATHER], 0),
    "dtype": ([GATHER], [collective(dtype=torch.bfloat16)], 0),
    "numel": ([GATHER], [collective(numel=9)], 0),
    "reduction": ([REDUCE], [dataclasses.replace(REDUCE, reduction="avg")], 0),
    "kind": ([GATHER, GATHER], [GATHER, collective("all_reduce")], 1),
    "one less at the end": ([GATHER, REDUCE], [GATHER], 1),
    "one more at the end": ([GATHER], [GATHER, GATHER], 1),
    "wait": ([GATHER], [dataclasses.replace(GATHER, waited_after=3)], 0),
    "nothing at all": ([GATHER], [], 0),
    "the group's order": ([GATHER], [collective(ranks=(1, 0))], 0),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_a_difference_names_both_ranks_and_both_entries(name):
    one, two, place = DIFFERING[name]
    at = [r[place].describe() if place < len(r) else "nothing more" for r in (one, two)]
    words = [f"collective {place}:", f"rank 0 issues {at[0]}", f"rank 1 issues {at[1]}"]
    refused(one, two, words=words)


def test_a_group_that_only_some_of_its_members_know_of():
    everyone, pair = collective(ranks=(0, 1, 2)), collective(ranks=(0, 1))
    refused([everyone], [everyone], [pair], words=["rank 2", "[0, 1, 2]", "[0, 1]"])


def test_two_groups_waiting_for_each_other_in_a_circle():
    """Each pair agrees with itself on what it issues, and yet no one could begin."""
    a, b, c = (collective(ranks=r) for r in ((0, 1), (1, 2), (0, 2)))
    refused([a, c], [b, a], [c, b], words=["rank 0", "collective 0"])


def test_the_odd_one_out_is_named_among_many():
    ranks = tuple(range(64))
    same = [collective(ranks=ranks)] * 3
    odd = [*same[:2], collective(ranks=ranks, numel=7)]
    everyone = [odd if rank == 41 else same for rank in ranks]
    refused(*everyone, words=["collective 2", "rank 0", "rank 41", "of 7 x"])


def test_each_disagreeing_group_gives_one_pair_however_many_differ():
    ranks = tuple(range(256))
    everyone = sequences(*[[collective(ranks=ranks, numel=rank)] for rank in ranks])
    assert disagreeing_pairs([digests_of(s) for s in everyone]) == [(0, 1)]


def test_what_every_rank_hands_out_does_not_grow_with_the_group():
    small, large = (
        repr(handed_out(sequences([collective(ranks=tuple(range(n)))])[0], 0)) for n in (2, 4096)
    )
    assert len(large) <= len(small) + 3


def test_a_single_process_has_no_one_to_ask():
    joint = captured_decoder()
    check_order_across_ranks(joint)  # the fake group would answer nonsense
    torch.distributed.destroy_process_group()
    check_order_across_ranks(joint)


def test_a_rank_that_fails_is_named_with_its_error():
    raise_first_failure(["", ""], "capture the step")
    with pytest.raises(gt.VerificationError, match="rank 1 could not capture the step: odd"):
        raise_first_failure(["", "odd", "even"], "capture the step")


def test_an_error_instead_of_a_graph_is_raised_by_the_rank_that_has_it():
    fake_world(2)
    with pytest.raises(gt.CaptureError, match="my own"):
        check_order_across_ranks(gt.CaptureError("my own"))


def test_an_op_that_nobody_knows_must_be_on_every_rank(monkeypatch):
    """Rank 1 has the same graph, but for the op."""
    fake_world(2)
    b = Builder()
    x = b.input("x", 4)
    total = b.call(aten.sum.default, x)
    plain = []

    def answer(theirs, mine):
        theirs[:] = [mine, others.pop(0)]

    monkeypatch.setattr("graph_trainer.core.ordering.exchange._alone", lambda: False)
    monkeypatch.setattr("torch.distributed.all_gather_object", answer)
    with torch.library._scoped_library("order_check_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        mystery = b.call(torch.ops.order_check_test.mystery.default, x)
        joint = b.joint(b.call(aten.add.Tensor, total, b.call(aten.sum.default, mystery)))
        sequence = issued_by(joint, 2)
        others = [("", handed_out(sequence, 1))]
        check_order_across_ranks(joint)
        others = [("", handed_out(plain, 1)), digests_of(plain), plain]
        with pytest.raises(gt.VerificationError, match="rank 0 issues .*mystery.* nobody here"):
            check_order_across_ranks(joint)


def test_all_ranks_of_a_captured_step_agree():
    issued = []
    for rank in range(4):
        joint = captured_decoder(rank=rank, dim=6)
        gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
        issued.append(collectives(joint))
    accepted(*issued)
    refused(*issued[:3], issued[3][:-1], words=["rank 0", "rank 3", "nothing more"])


# --- a second batch shape ------------------------------------------------------------------


def step(*reduced, numel=4, role=None, dtype=torch.float32, group=None, sharded_over=None):
    """Reductions of a batch's tensor over `group` and, with FSDP, a gather of a parameter."""
    if not torch.distributed.is_initialized():
        fake_world(4)

    def name(ranks):
        return (torch.distributed.new_group(ranks) if ranks else world_group.WORLD).group_name

    b = Builder()
    x, w = b.input("x", numel, dtype=dtype), b.input("w", 4)
    total = b.call(aten.sum.default, x)
    if sharded_over:
        args = (w, len(sharded_over), name(sharded_over))
        gathered = b.call(c10d.all_gather_into_tensor.default, *args, role=Role.UNSHARD)
        gathered = b.call(c10d.wait_tensor.default, gathered)
        total = b.call(aten.add.Tensor, total, b.call(aten.sum.default, gathered))
    for op in reduced or ("sum",):
        issued = b.call(c10d.all_reduce.default, x, op, name(group), role=role)
        waited = b.call(c10d.wait_tensor.default, issued)
        total = b.call(aten.add.Tensor, total, b.call(aten.sum.default, waited))
    return b.joint(total)


def test_another_batch_size_may_change_what_ranks_with_the_same_batch_send():
    """Tensor parallelism beside FSDP: the whole group captures again together."""
    mesh = {"group": [0, 1], "sharded_over": [0, 2]}
    check_same_collectives(step(numel=4, **mesh), step(numel=8, **mesh))


@pytest.mark.parametrize("every", [False, True], ids=["some", "all"])
def test_a_group_that_sums_some_gradients_shares_a_batch(every):
    """Norms are whole on its ranks, and their gradients are summed there beside FSDP's sum of
    all. A group that sums them all has a batch on each rank."""
    fake_world(4)
    tensor, data = (torch.distributed.new_group(r).group_name for r in ([0, 1], [0, 2]))

    def graph(numel):
        b = Builder()
        x, grad = b.input("x", numel), b.input("grad", 4)
        total = b.call(aten.sum.default, x)
        issued = [(x, tensor, None, None), (grad, tensor, "norm", Role.REDUCE_GRAD)]
        issued += [(grad, data, n, Role.REDUCE_GRAD) for n in ("norm", "linear")[: 2 - every]]
        for sent, group, parameter, role in issued:
            tags = {"role": role, "parameter": parameter}
            reduced = b.call(c10d.all_reduce.default, sent, "sum", group, **tags)
            waited = b.call(c10d.wait_tensor.default, reduced)
            total = b.call(aten.add.Tensor, total, b.call(aten.sum.default, waited))
        return b.joint(total)

    if every:
        with pytest.raises(gt.VerificationError, match="8 x .*instead of .*4 x "):
            check_same_collectives(graph(4), graph(8))
    else:
        check_same_collectives(graph(4), graph(8))


@pytest.mark.parametrize(
    "group, sharded_over", [([0, 2], [0, 2]), ([0, 1, 2], [0, 2]), (None, [0, 1]), ([0, 1], None)]
)
def test_another_batch_size_may_not_change_what_other_batches_meet(group, sharded_over):
    """Ranks of other data may keep the old size; without FSDP no one knows who they are."""
    mesh = {"group": group, "sharded_over": sharded_over}
    check_same_collectives(step(**mesh), step(**mesh))
    with pytest.raises(gt.VerificationError, match="8 x .*instead of .*4 x "):
        check_same_collectives(step(numel=4, **mesh), step(numel=8, **mesh))


def test_another_batch_size_may_not_change_what_parameters_send():
    tagged = {"role": Role.REDUCE_GRAD}
    check_same_collectives(step(**tagged), step(**tagged))
    with pytest.raises(gt.VerificationError, match="8 x .*instead of .*4 x "):
        check_same_collectives(step(**tagged), step(numel=8, **tagged))


@pytest.mark.parametrize(
    "later, words",
    [
        (lambda: step("max"), r"\(max\).*instead of.*\(sum\)"),
        (lambda: step(dtype=torch.bfloat16), "bfloat16.*instead of.*float32"),
        (lambda: step("sum", "sum"), "issues 2 collectives and the first graph 1"),
    ],
)
def test_another_batch_size_may_not_change_which_collectives_run(later, words):
    with pytest.raises(gt.VerificationError, match=words):
        check_same_collectives(step(), later())


def test_a_rank_that_agrees_on_a_number_while_another_hands_out_its_order(monkeypatch):
    """One has a decision to take that the other one has not: both are told, and none waits."""
    fake_world(2)
    order = ("", handed_out(sequence_of([GATHER]), 1))

    def answer(everyone, mine):
        everyone[:] = [mine, order]

    monkeypatch.setattr("graph_trainer.core.ordering.exchange._alone", lambda: False)
    monkeypatch.setattr("torch.distributed.all_gather_object", answer)
    largest = LargestOfAllRanks()
    with pytest.raises(gt.VerificationError, match="rank 0 hands out its int and rank 1 its dict"):
        largest(7)
    assert largest.heard_of_failure
