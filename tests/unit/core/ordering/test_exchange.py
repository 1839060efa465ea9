"""The exchange among the ranks of a run, and what a second batch shape may change."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.distributed import group as world_group

import graph_trainer as gt
from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.ordering import exchange
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.ordering.exchange import (
    check_order_across_ranks,
    check_same_collectives,
    summary_of,
)
from graph_trainer.core.ordering.members import disagreeing_members
from graph_trainer.errors import CollectiveError
from graph_trainer.testing import Builder
from tests.unit.core.ordering.front_ends import GATHER, at_once, exchanged
from tests.unit.fake_ranks import in_threads
from tests.unit.graphs import aten, c10d, captured_decoder, collective, fake_world


def test_each_disagreeing_group_gives_one_pair_however_many_differ():
    ranks = tuple(range(256))
    issued = {rank: collective(ranks=ranks, numel=rank) for rank in ranks}
    found = disagreeing_members({ranks: ranks}, lambda rank, group: issued[rank].entry())
    assert found == {ranks: (0, 1)}


def test_what_every_rank_hands_out_does_not_grow_with_the_group():
    issued = [at_once(collective(ranks=tuple(range(size)))) for size in (2, 4096)]
    small, large = (repr(summary_of(sequence)) for sequence in issued)
    assert len(large) <= len(small) + 3


def test_a_single_process_has_no_one_to_ask():
    joint = captured_decoder()
    check_order_across_ranks(joint)  # the fake group would answer nonsense
    torch.distributed.destroy_process_group()
    check_order_across_ranks(joint)


@pytest.mark.parametrize("another", [at_once(GATHER), RuntimeError("of rank 0")])
def test_an_error_instead_of_a_graph_is_raised_on_all_ranks(another):
    error = gt.CaptureError("my own")
    found = exchanged([another, error])
    assert found[1] is error
    if isinstance(another, Exception):
        assert found[0] is another
    else:
        message = "rank 1 could not capture the step: CaptureError: my own"
        assert isinstance(found[0], gt.VerificationError) and str(found[0]) == message


def test_what_a_rank_cannot_say_of_its_graph_is_raised_on_all_ranks():
    fake_world(2)
    b = Builder()
    reduced = b.call(c10d.all_reduce.default, b.input("x", 4), "sum", "no such group")
    joint = b.joint(b.call(aten.sum.default, b.call(c10d.wait_tensor.default, reduced)))
    found = in_threads(2, lambda rank: exchange.check_order_across_ranks(joint))
    assert all("no such group" in str(error) for error in found), found


def test_a_rank_that_agrees_on_a_number_while_another_hands_out_its_order():
    """One has a decision to take that the other one has not: both are told, and none waits."""
    agreements = [Agreement() for _ in range(2)]

    def work(rank):
        if rank == 0:
            return agreements[0].all_reduce_max(7)
        with mock.patch.object(exchange, "issued_by", lambda sequence, world_size: sequence):
            return exchange.check_order_across_ranks(at_once(GATHER), agreements[1])

    for error in in_threads(2, work):
        assert "rank 0 exchanges its int, and rank 1 its dict" in str(error)
    error = ValueError("the next one")

    def fail(rank):
        if rank == 0:
            with agreements[0].errors_sent():
                raise error

    found = in_threads(2, fail)
    assert found == [error, None], "no rank waits for this one any more"


def test_an_error_is_raised_where_other_ranks_cannot_receive_it():
    """They are in a collective of their graph and not in the exchange."""
    lost = CollectiveError("the exchange", "timed out")
    error = ValueError("its own")
    agreement = Agreement()
    with (
        mock.patch.object(agreement, "_exchange", side_effect=lost),
        pytest.raises(ValueError, match="its own"),
        agreement.errors_sent(),
    ):
        raise error


def test_the_largest_number_of_all_ranks():
    numbers = [4, -7, 9]
    assert in_threads(3, lambda rank: Agreement().all_reduce_max(numbers[rank])) == [9, 9, 9]


def test_whether_all_ranks_have_the_same():
    assert in_threads(3, lambda rank: Agreement().same(("a", 1))) == [True] * 3
    assert in_threads(3, lambda rank: Agreement().same(("a", rank // 2))) == [False] * 3


# --- a second batch shape ------------------------------------------------------------------


def add(b, total, op, *args, **tags):
    """A collective that is waited for, and the total with its sum."""
    waited = b.call(c10d.wait_tensor.default, b.call(op, *args, **tags))
    return b.call(aten.add.Tensor, total, b.call(aten.sum.default, waited))


def step(*, ops=("sum",), numel=4, role=None, dtype=torch.float32, group=None, sharded_over=None):
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
        total = add(b, total, c10d.all_gather_into_tensor.default, *args, role=Role.UNSHARD)
    for op in ops:
        total = add(b, total, c10d.all_reduce.default, x, op, name(group), role=role)
    return b.joint(total)


OTHER_SIZE = "8 x .*instead of .*4 x "


@pytest.mark.parametrize(
    "mesh, later, words",
    [
        # tensor parallelism beside FSDP: the whole group captures again together
        ({"group": [0, 1], "sharded_over": [0, 2]}, {"numel": 8}, None),
        # ranks of other data may keep the old size; without FSDP no one knows who they are
        ({"group": [0, 2], "sharded_over": [0, 2]}, {"numel": 8}, OTHER_SIZE),
        ({"group": [0, 1, 2], "sharded_over": [0, 2]}, {"numel": 8}, OTHER_SIZE),
        ({"sharded_over": [0, 1]}, {"numel": 8}, OTHER_SIZE),
        ({"group": [0, 1]}, {"numel": 8}, OTHER_SIZE),
        # a parameter is of one size
        ({"role": Role.REDUCE_GRAD}, {"numel": 8}, OTHER_SIZE),
        ({}, {"ops": ["max"]}, r"\(max\).*instead of.*\(sum\)"),
        ({}, {"dtype": torch.bfloat16}, "bfloat16.*instead of.*float32"),
        ({}, {"ops": ["sum", "sum"]}, "issues 2 collectives and the first graph 1"),
    ],
)
def test_another_batch_size_may_change_only_what_ranks_with_the_same_batch_send(mesh, later, words):
    check_same_collectives(step(**mesh), step(**mesh))
    with pytest.raises(gt.VerificationError, match=words) if words else contextlib.nullcontext():
        check_same_collectives(step(**mesh), step(**mesh | later))


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
            total = add(b, total, c10d.all_reduce.default, sent, "sum", group, **tags)
        return b.joint(total)

    if every:
        with pytest.raises(gt.VerificationError, match=OTHER_SIZE):
            check_same_collectives(graph(4), graph(8))
    else:
        check_same_collectives(graph(4), graph(8))
