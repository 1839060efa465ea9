"""Nothing is run early at the cost of a reduction of gradients."""

import pytest

from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.overlap.overlap_fsdp import OverlapFsdpOptions, overlap_fsdp
from graph_trainer.testing import Builder, assert_same, run
from tests.unit.core.passes.overlap.schedule_graphs import (
    FSDP,
    REPLICATE,
    TENSOR,
    make_groups,
    peak_bytes,
    products_before_starts,
    scheduled,
)
from tests.unit.graphs import ALL_REDUCE, BACKWARD, GATHER, SCATTER, aten, c10d

SLOW = {"base_seconds": 0.1, "memory_bytes_per_second": 1e7}
REDUCES = {"role": Role.REDUCE_GRAD, "parameter": "w"}


class Products(Builder):
    """Matrix products of backward, and what communicates: a large gradient, and little else."""

    def __init__(self):
        super().__init__()
        self.groups = make_groups()
        self.phase = BACKWARD
        self.parameter("w", 32, 64)
        self.bias = self.parameter("bias", 32)
        self.x = self.input("x", 64, 64)
        self.thin = self.input("thin", 1, 64)

    def product(self, of):
        return self.call(aten.mm.default, of, self.x)

    def all_reduced(self, of):
        return self.waited(ALL_REDUCE, of, "sum", self.groups[TENSOR])

    def reduce(self, gradient):
        return self.waited(SCATTER, gradient, "sum", 2, self.groups[FSDP], **REDUCES)

    def gather(self):
        how = {"role": Role.UNSHARD, "parameter": "bias"}
        return self.waited(GATHER, self.bias, 2, self.groups[FSDP], **how)

    def large(self):
        """What leaves no memory until it is read."""
        return self.call(aten.repeat.default, self.x, [4, 1])

    def done(self, mine, *values):
        sums = [self.call(aten.sum.default, value) for value in values]
        return self.joint(self.call(aten.stack.default, sums), w=mine)

    def plus(self, one, other):
        return self.call(aten.add.Tensor, one, other, **REDUCES)

    def times(self, one, factor):
        return self.call(aten.mul.Tensor, one, factor, **REDUCES)


def a_path_after(make_gradient):
    """Compute that leads to a collective runs before other compute, but the gradient in it must
    not be left to lie meanwhile."""

    def make():
        g = Products()
        other = g.product(g.x)
        gradient = make_gradient(g)
        summed = g.all_reduced(g.product(g.product(gradient)))
        return g.done(g.reduce(gradient), other, summed)

    return make


def a_gap_in_which_the_gradient_is_made():
    g = Products()
    summed = g.all_reduced(g.x)
    read = g.call(aten.sum.default, summed)
    gradient = g.product(g.x)
    others = [g.product(g.thin) for _ in range(6)]
    return g.done(g.reduce(gradient), read, *others)


def a_start_for_which_a_wait_makes_room():
    """The first gradient is alive until its reduction is waited for."""
    g = Products()
    first = g.reduce(g.product(g.x))
    gradient = g.product(g.x)
    others = [g.product(g.thin) for _ in range(4)]
    return g.done(g.plus(first, g.reduce(gradient)), *others)


def a_path_while_the_reduction_may_not_start():
    g = Products()
    large = g.large()
    gradient = g.product(g.x)
    other = g.product(g.thin)
    read = g.call(aten.sum.default, large)
    mine = g.reduce(gradient)
    return g.done(mine, other, read, g.all_reduced(g.product(g.thin)))


def gaps_while_the_reduction_may_not_start():
    g = Products()
    large = g.large()
    gradient = g.product(g.x)
    biases = [g.gather(), g.gather()]
    read = g.call(aten.add.Tensor, g.call(aten.select.int, large, 0, 0), biases[1])
    mine = g.reduce(gradient)
    return g.done(mine, biases[0], read, g.product(g.thin), g.product(g.thin))


@pytest.mark.parametrize(
    "make, most, growth",
    [
        (a_path_after(lambda g: g.product(g.x)), 2, 9.0),
        (a_path_after(lambda g: g.call(aten.add.Tensor, g.x, g.x)), 2, 9.0),
        (a_gap_in_which_the_gradient_is_made, 1, 9.0),
        (a_start_for_which_a_wait_makes_room, 1, 0.625),
        (a_path_while_the_reduction_may_not_start, 1, 0.05),
        (gaps_while_the_reduction_may_not_start, 1, 0.05),
    ],
)
def test_nothing_is_run_early_at_the_cost_of_a_reduction(make, most, growth):
    joint = make()
    more = int(growth * peak_bytes(joint))
    after = scheduled(joint, more, max_consecutive_compute=most, machine=SLOW)
    assert_same(run(joint), run(after))
    assert max(products for products, _ in products_before_starts(after).values()) <= most


@pytest.mark.parametrize("nodes", range(8))
def test_sums_of_two_reductions_that_read_each_other(nodes):
    """Waiting for either runs a part of what is deferred for the other."""
    g = Products()
    for _ in range(nodes):
        g.call(aten.t.default, g.thin)
    gradient = g.product(g.x)
    groups = (g.groups[FSDP], g.groups[REPLICATE])
    starts = [g.call(SCATTER, gradient, "sum", 2, group, **REDUCES) for group in groups]
    one, two = (g.call(c10d.wait_tensor.default, start, **REDUCES) for start in starts)
    joint = g.done(g.plus(two, g.plus(one, two)), g.product(g.x))
    assert_same(run(joint), run(scheduled(joint, machine=SLOW)))


@pytest.mark.parametrize("seconds", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("products", [1, 2, 5])
def test_sums_of_reductions_one_of_which_goes_on(products, seconds):
    """What is deferred for one reduction waits for the second of another, and reads the first."""
    g = Products()
    mine = g.reduce(g.product(g.x))
    one = g.waited(ALL_REDUCE, mine, "sum", g.groups[REPLICATE], **REDUCES)
    one = g.times(one, 2.0)
    other = g.reduce(g.product(g.x))
    first = g.plus(one, g.times(other, 2.0))
    values = [g.product(g.x) for _ in range(products)]
    second = g.plus(one, g.times(other, 3.0))
    joint = g.done(g.plus(first, second), *values)
    slow = SLOW | {"base_seconds": seconds}
    assert_same(run(joint), run(scheduled(joint, machine=slow)))


def late(joint):
    joint = copy_graph(joint)
    overlap_fsdp(joint, OverlapFsdpOptions(), PassContext())
    return joint


@pytest.mark.parametrize("moved", [late, lambda joint: scheduled(joint, machine=SLOW)])
@pytest.mark.parametrize("written", [False, True])
def test_a_wait_stays_before_a_write_into_what_its_collective_reads(moved, written):
    g = Products()
    gradient = g.product(g.x)
    reduced = g.reduce(gradient)
    last = g.call(aten.add_.Tensor if written else aten.add.Tensor, gradient, 1.0)
    targets = [n.target for n in moved(g.done(reduced, last, g.product(g.x))).graph.nodes]
    wait, add = targets.index(c10d.wait_tensor.default), targets.index(last.target)
    assert (wait < add) is written, "without a write it is waited for late"
