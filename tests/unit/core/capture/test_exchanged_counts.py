"""Sizes that data decide: where they come from, what is expected of them, and what is refused."""

from collections import defaultdict

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import counts_of, is_backward, tensors_of, value_of
from graph_trainer.core.graph.data_sizes import (
    bound,
    data_sizes_of,
    exact_shape,
    expected,
    has_data_sizes,
    nbytes_of,
    shape_of,
    sized,
    storage_bytes,
)
from graph_trainer.core.graph.ops import argument_nodes
from graph_trainer.core.ordering.proof import prove_order
from graph_trainer.core.ordering.sequences import issued_by
from tests.unit.core.capture.exchanging import RANKS, ROWS, exchanging

aten = torch.ops.aten


def symbols(joint):
    return [n for n in joint.graph.nodes if n.target is aten._local_scalar_dense.default]


def test_a_rank_expects_an_equal_share_of_its_rows_from_each_and_all_of_them_at_most():
    joint = exchanging(layers=2)
    splits = [value_of(n) for n in symbols(joint)]
    assert [expected(s) for s in splits] == [3, 3, 2, 2] * 4
    assert {bound(s) for s in splits} == {ROWS}
    arrays = [t for n in joint.graph.nodes for t in tensors_of(n) if has_data_sizes(t)]
    rows = [t for t in arrays if t.stride() == (4, 1)]
    assert rows and {shape_of(t) for t in rows} == {(ROWS, 4)}
    assert {bound(t.shape[0]) for t in rows} == {RANKS * ROWS}
    assert {(storage_bytes(t), nbytes_of(t)) for t in rows if t.dtype.itemsize == 4} == {
        (ROWS * 16, ROWS * 16)
    }


def test_every_analysis_counts_the_expected_sizes():
    joint = exchanging()
    sent = [c for c in collectives(joint) if counts_of(c.node) is not None]
    # the rows of the batch need no gradient, so the last way back is not taken
    assert [(c.input_bytes, c.output_bytes) for c in sent] == [(ROWS * 16, ROWS * 16)] * 3
    assert all(type(size) is int for size in lifetimes(joint).size.values())


def test_more_may_be_expected_than_an_equal_share():
    joint = exchanging()
    sizes = data_sizes_of(value_of(joint.placeholders()[0]))
    peak = lifetimes(joint).peak_bytes
    with sizes.assuming(2):
        sent, received = (
            [expected(value_of(n)) for n in symbols(joint)[i : i + 4]] for i in (0, 4)
        )
        assert (sent, received) == ([3, 3, 2, 2], [5, 5, 5, 5])
        twice = lifetimes(joint).peak_bytes
    with sizes.assuming(100):
        assert [expected(value_of(n)) for n in symbols(joint)[4:]] == [ROWS] * RANKS
        everything = lifetimes(joint).peak_bytes
    assert peak < twice < everything and lifetimes(joint).peak_bytes == peak


def test_each_exchange_may_be_given_rows_of_its_own():
    joint = exchanging(layers=2)
    sizes = data_sizes_of(value_of(joint.placeholders()[0]))
    assert sizes.received_rows() == [ROWS, ROWS]
    peaks = []
    for rows in ([0, 0], [30, 0], [0, 30], [30, 30]):
        with sizes.assuming(rows):
            assert sizes.received_rows() == rows
            peaks.append(lifetimes(joint).peak_bytes)
    assert peaks[0] < min(peaks[1:3]) and max(peaks[1:3]) < peaks[3]
    with sizes.assuming([ROWS * RANKS + 1, 0]):
        assert sizes.received_rows() == [ROWS * RANKS, 0]
    with pytest.raises(ValueError, match="zip"), sizes.assuming([1]):
        pass
    assert sizes.received_rows() == [ROWS, ROWS]


def test_a_sized_tensor_stands_for_one_of_the_expected_size():
    joint = exchanging()
    (first, *_) = [t for n in joint.graph.nodes for t in tensors_of(n) if has_data_sizes(t)]
    assert sized(first).shape == (ROWS, 4) and sized(first).dtype is first.dtype
    plain = torch.ones(3)
    assert sized(plain) is plain and sized(value_of(symbols(joint)[0])) == 3
    assert exact_shape(first) == exact_shape(first) != (ROWS, 4)


def test_a_step_that_reads_no_number_has_no_symbols():
    model = torch.nn.Linear(4, 4)
    joint = gt.capture(model, lambda m, x: m(x).sum(), (torch.ones(2, 4),))
    assert data_sizes_of(value_of(joint.placeholders()[0])) is None


def test_all_to_alls_name_the_exchange_that_decides_their_splits():
    joint = exchanging(layers=2)
    named = [counts_of(c.node) for c in collectives(joint) if c.kind == "all_to_all_single"]
    forward = [None, "0", "0 back", None, "1", "1 back"]
    # the batch needs no gradient, so that nothing returns to it
    assert named == [*forward, "1", "1 back", "0"]


@pytest.mark.parametrize(
    "of_model",
    [
        {"checkpointed": {"early_stop": False}},
        {"checkpointed": {"preserve_rng_state": False}},
        {"checkpointed": {}, "dropout": 0.5},
    ],
    ids=["all of a block", "up to what backward needs", "the same draws"],
)
def test_a_recomputed_exchange_has_the_sizes_of_the_first(of_model):
    joint = exchanging(layers=2, **of_model)
    read = defaultdict(list)
    for node in symbols(joint):
        read[is_backward(node)].append(value_of(node).node.expr)
    first, recomputed = read[False], read[True]
    assert len(set(first)) == len(first) == 2 * 2 * RANKS
    assert recomputed == first[2 * RANKS :] + first[: 2 * RANKS], "the last layer comes first"
    sizes = data_sizes_of(value_of(joint.placeholders()[0]))
    assert sizes.received_rows() == [ROWS, ROWS]
    # by its exchange, and whether the splits are numbers that backward reads again, as eager does:
    # the recomputed rows travel by these, gradients by those of forward
    sent = []
    for collective in collectives(joint):
        if collective.kind == "all_to_all_single" and is_backward(collective.node):
            splits = argument_nodes(collective.node.args[1:])
            sent.append((counts_of(collective.node), {is_backward(n) for n in splits}))
    again, gradients = {True}, {False}
    last = [(None, set()), ("1", again), ("1 back", again), ("1", gradients), ("1 back", gradients)]
    # the batch needs no gradient, so that nothing returns to it
    assert sent == [*last, (None, set()), ("0", again), ("0 back", again), ("0", gradients)]


def test_an_exchange_by_other_draws_has_sizes_of_its_own():
    with pytest.raises(gt.CaptureError, match="Could not guard"):
        exchanging(checkpointed={"preserve_rng_state": False}, dropout=0.5)


def test_the_order_is_proved_whatever_the_ranks_send():
    sequences = {}
    for rank in range(RANKS):
        sequences[rank] = issued_by(exchanging(layers=2, rank=rank), RANKS)
    assert prove_order(sequences).ranks == RANKS


def test_ranks_that_take_splits_of_other_exchanges_are_refused():
    sequences = {rank: issued_by(exchanging(layers=2, rank=rank), RANKS) for rank in range(RANKS)}
    joint = exchanging(layers=2, rank=1)
    for node in joint.graph.nodes:
        custom = node.meta.get("custom", {})
        if custom.get("counts") == "1":
            node.meta["custom"] = custom | {"counts": "0"}
    sequences[1] = issued_by(joint, RANKS)
    with pytest.raises(gt.VerificationError, match=r"splits by counts 1.*splits by counts 0"):
        prove_order(sequences)


def test_an_all_to_all_of_unknown_counts_is_refused():
    joint = exchanging()
    for node in joint.graph.nodes:
        node.meta.get("custom", {}).pop("counts", None)
    with pytest.raises(gt.VerificationError, match="no annotation of the exchange"):
        collectives(joint)


@pytest.mark.parametrize(
    "change",
    [
        lambda counts, sent, received: (sent, sent),
        lambda counts, sent, received: (sent, received[::-1]),
        lambda counts, sent, received: (sent[1:] + sent[:1], received),
        lambda counts, sent, received: ((counts + 1).sum(dim=1).tolist(), received),
        lambda counts, sent, received: ([s + 1 for s in sent], received),
    ],
    ids=["the same twice", "another order", "shifted", "other counts", "computed"],
)
def test_splits_that_other_ranks_may_not_expect_are_refused(change):
    with pytest.raises(gt.CaptureError, match="does not show that the other ranks expect"):
        exchanging(change=change)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x * x.long().sum().item(),
        lambda x: x if x.long().sum().item() > 3 else -x,
        lambda x: x * float(x.sum()),
        lambda x: x[: x.long().sum().item()],
    ],
    ids=["factor", "condition", "float", "size"],
)
def test_any_other_number_that_is_read_is_refused(read):
    model = torch.nn.Linear(4, 4)
    with pytest.raises(gt.CaptureError, match=r"reads a tensor's value into Python") as refused:
        gt.capture(model, lambda m, x: read(m(x)).sum(), (torch.ones(2, 4),))
    said = str(refused.value)
    assert "\n" not in said and "  " not in said and "TORCH" not in said, "printed as prose"
