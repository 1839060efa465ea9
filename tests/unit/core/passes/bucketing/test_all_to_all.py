"""Buckets around all-to-alls: none waits for itself through one, as in torchtitan 4047 and 4052."""

import sys

import pytest

from graph_trainer.core.graph.annotations import Role, parameters_of
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.testing import Builder, assert_same, run
from tests.unit.core.passes.bucketing.bucket_graphs import (
    STRATEGIES,
    bucket,
    collectives_of,
    finish,
)
from tests.unit.graphs import BACKWARD, FORWARD, GATHER, SCATTER, aten, c10d

FIRST, SECOND = "layers.0.first", "layers.0.second"


@pytest.fixture(autouse=True)
def of_two_ranks(monkeypatch):
    """The groups of these graphs do not exist."""
    module = "graph_trainer.core.passes.bucketing.bucket_collectives"
    monkeypatch.setattr(sys.modules[module], "group_ranks", lambda group: (0, 1))


def exchange(b, rows, phase):
    splits = [4, 4]
    return b.waited(c10d.all_to_all_single.default, rows, splits, splits, "ep", phase=phase)


def mixture(*, gather_reads=False, exchange_reads=False):
    """A layer of two weights: tokens are exchanged between the products, and their gradients back.

    Args:
        gather_reads: whether what is gathered of the second weight depends on the first exchange.
        exchange_reads: whether the second exchange depends on the reduced gradient of the second
            weight, which is reduced before that of the first.
    """
    b = Builder()
    shards = {name: b.parameter(name, 2, 4) for name in (FIRST, SECOND)}
    x = b.input("x", 8, 4)

    def gather(name, shard):
        # the shard is made ready where it is gathered, behind what comes before in the graph
        how = {"role": Role.UNSHARD, "parameter": name}
        return b.waited(GATHER, b.call(aten.clone.default, shard, **how), 2, "fsdp", **how)

    def reduce(name, grad):
        how = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": name}
        return b.waited(SCATTER, grad, "sum", 2, "fsdp", **how)

    first = gather(FIRST, shards[FIRST])
    received = exchange(b, b.call(aten.mm.default, x, first), FORWARD)
    shard = shards[SECOND]
    if gather_reads:
        shard = b.call(aten.mul.Tensor, shard, b.call(aten.mean.default, received))
    second = gather(SECOND, shard)
    loss = b.call(aten.sum.default, b.call(aten.mm.default, received, second))

    b.phase = BACKWARD
    dy = b.call(aten.ones.default, [8, 4])
    turned = b.call(aten.t.default, received)
    grads = {SECOND: reduce(SECOND, b.call(aten.mm.default, turned, dy))}
    dh = b.call(aten.mm.default, dy, b.call(aten.t.default, second))
    if exchange_reads:
        dh = b.call(aten.mul.Tensor, dh, b.call(aten.mean.default, grads[SECOND]))
    dx = exchange(b, dh, BACKWARD)
    grads[FIRST] = reduce(FIRST, b.call(aten.mm.default, b.call(aten.t.default, x), dx))
    return finish(b, loss, grads)


def bucketed(joint, options):
    """The parameters of each gather and of each reduction; the numbers stay the same."""
    before = run(joint)
    bucket(joint, **options)
    assert_same(before, run(joint))
    kinds = (Role.UNSHARD, False), (Role.REDUCE_GRAD, True)
    return [sorted(map(parameters_of, collectives_of(joint, *kind))) for kind in kinds]


EVERY = pytest.mark.parametrize(
    "options", [STRATEGIES["block"], STRATEGIES["large"]], ids=["block", "large"]
)
TOGETHER, APART = [(FIRST, SECOND)], [(FIRST,), (SECOND,)]


@EVERY
def test_a_bucket_passes_an_all_to_all_that_needs_one_of_its_members(options):
    joint = mixture()
    assert bucketed(joint, options) == [TOGETHER, TOGETHER]
    # what the second weight is gathered from comes along, in front of the exchange
    kinds = [str(n.target).split(".")[1] for n in joint.graph.nodes if is_collective(n)]
    gather, exchange_, scatter = "all_gather_into_tensor", "all_to_all_single", "reduce_scatter"
    assert kinds == [gather, exchange_, exchange_, f"{scatter}_tensor"]


@EVERY
def test_a_gather_that_depends_on_an_all_to_all_is_not_merged_with_what_that_needs(options):
    """torchtitan 4047: no order of the merged graph has a bucket behind what its member reads."""
    assert bucketed(mixture(gather_reads=True), options) == [APART, TOGETHER]


@EVERY
def test_a_reduction_that_an_all_to_all_needs_is_not_merged_with_what_follows(options):
    """torchtitan 4052: a bucket would wait for the all-to-all that waits for the bucket."""
    assert bucketed(mixture(exchange_reads=True), options) == [TOGETHER, APART]
