"""Nothing is run early at the cost of a reduction of gradients."""

import functools

import pytest

from graph_trainer.core.graph.annotations import Role
from tests.unit.core.passes.overlap.schedule_graphs import (
    FSDP,
    REPLICATE,
    TENSOR,
    make_groups,
    products_before_starts,
    scheduled,
)
from tests.unit.graphs import BACKWARD, Builder, assert_same, aten, c10d, run

SLOW = {"collective_seconds": 0.1, "memory_bytes_per_second": 1e7}
REDUCES = {"role": Role.REDUCE_GRAD, "parameter": "w"}


class Products:
    """Matrix products of backward, and what communicates: a large gradient, and little else."""

    def __init__(self):
        self.groups = make_groups()
        self.b = Builder()
        self.b.parameter("w", 32, 64)
        self.bias = self.b.parameter("bias", 32)
        self.x = self.b.input("x", 64, 64)
        self.thin = self.b.input("thin", 1, 64)

    def call(self, op, *args, **how):
        return self.b.call(op, *args, phase=BACKWARD, **how)

    def product(self, of):
        return self.call(aten.mm.default, of, self.x)

    def start(self, of):
        return self.call(c10d.all_reduce.default, of, "sum", self.groups[TENSOR])

    def wait(self, start):
        return self.call(c10d.wait_tensor.default, start)

    def reduce(self, gradient, ranks=FSDP):
        start = self.start_reducing(gradient, ranks)
        return self.call(c10d.wait_tensor.default, start, **REDUCES)

    def start_reducing(self, gradient, ranks=FSDP):
        op = c10d.reduce_scatter_tensor.default
        return self.call(op, gradient, "sum", 2, self.groups[ranks], **REDUCES)

    def gather(self):
        how = {"role": Role.UNSHARD, "parameter": "bias"}
        op = c10d.all_gather_into_tensor.default
        return self.call(
            c10d.wait_tensor.default,
            self.call(op, self.bias, 2, self.groups[FSDP], **how),
            **how,
        )

    def large(self):
        """What leaves no memory until it is read."""
        return self.call(aten.repeat.default, self.x, [4, 1])

    def joint(self, mine, *values):
        sums = [self.call(aten.sum.default, value) for value in values]
        return self.b.joint(self.call(aten.stack.default, sums), w=mine)

    def summed(self, *several):
        return functools.reduce(lambda a, b: self.call(aten.add.Tensor, a, b, **REDUCES), several)


def a_path_with_the_gradient_in_it():
    """Compute that leads to a collective runs before other compute, but the gradient in it must
    not be left to lie meanwhile."""
    g = Products()
    other = g.product(g.x)
    gradient = g.product(g.x)
    summed = g.wait(g.start(g.product(g.product(gradient))))
    mine = g.reduce(gradient)
    return g.joint(mine, other, summed)


def a_path_after_a_gradient_of_no_product():
    g = Products()
    other = g.product(g.x)
    gradient = g.call(aten.add.Tensor, g.x, g.x)
    summed = g.wait(g.start(g.product(g.product(gradient))))
    mine = g.reduce(gradient)
    return g.joint(mine, other, summed)


def a_gap_in_which_the_gradient_is_made():
    g = Products()
    summed = g.wait(g.start(g.x))
    read = g.call(aten.sum.default, summed)
    gradient = g.product(g.x)
    others = [g.product(g.thin) for _ in range(6)]
    return g.joint(g.reduce(gradient), read, *others)


def a_start_for_which_a_wait_makes_room():
    """The first gradient is alive until its reduction is waited for."""
    g = Products()
    first = g.reduce(g.product(g.x))
    gradient = g.product(g.x)
    others = [g.product(g.thin) for _ in range(4)]
    return g.joint(g.summed(first, g.reduce(gradient)), *others)


def a_path_while_the_reduction_may_not_start():
    g = Products()
    large = g.large()
    gradient = g.product(g.x)
    other = g.product(g.thin)
    read = g.call(aten.sum.default, large)
    mine = g.reduce(gradient)
    return g.joint(mine, other, read, g.wait(g.start(g.product(g.thin))))


def gaps_while_the_reduction_may_not_start():
    g = Products()
    large = g.large()
    gradient = g.product(g.x)
    biases = [g.gather(), g.gather()]
    read = g.call(aten.add.Tensor, g.call(aten.select.int, large, 0, 0), biases[1])
    mine = g.reduce(gradient)
    return g.joint(mine, biases[0], read, g.product(g.thin), g.product(g.thin))


@pytest.mark.parametrize(
    "make, most, growth",
    [
        (a_path_with_the_gradient_in_it, 2, 9.0),
        (a_path_after_a_gradient_of_no_product, 2, 9.0),
        (a_gap_in_which_the_gradient_is_made, 1, 9.0),
        (a_start_for_which_a_wait_makes_room, 1, 0.625),
        (a_path_while_the_reduction_may_not_start, 1, 0.05),
        (gaps_while_the_reduction_may_not_start, 1, 0.05),
    ],
)
def test_nothing_is_run_early_at_the_cost_of_a_reduction(make, most, growth):
    joint = make()
    after = scheduled(joint, max_consecutive_compute=most, max_peak_growth=growth, machine=SLOW)
    assert_same(run(joint), run(after))
    assert max(products for products, _ in products_before_starts(after).values()) <= most


@pytest.mark.parametrize("nodes", range(8))
def test_sums_of_two_reductions_that_read_each_other(nodes):
    """Waiting for either runs a part of what is deferred for the other."""
    g = Products()
    for _ in range(nodes):
        g.call(aten.t.default, g.thin)
    gradient = g.product(g.x)
    starts = [g.start_reducing(gradient, ranks) for ranks in (FSDP, REPLICATE)]
    one, two = (g.call(c10d.wait_tensor.default, start, **REDUCES) for start in starts)
    joint = g.joint(g.summed(two, g.summed(one, two)), g.product(g.x))
    assert_same(run(joint), run(scheduled(joint, max_peak_growth=9.0, machine=SLOW)))


@pytest.mark.parametrize("seconds", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("products", [1, 2, 5])
def test_sums_of_reductions_one_of_which_goes_on(products, seconds):
    """What is deferred for one reduction waits for the second of another, and reads the first."""
    g = Products()
    mine = g.reduce(g.product(g.x))
    whole = g.call(c10d.all_reduce.default, mine, "sum", g.groups[REPLICATE], **REDUCES)
    one = g.call(c10d.wait_tensor.default, whole, **REDUCES)
    one = g.call(aten.mul.Tensor, one, 2.0, **REDUCES)
    other = g.reduce(g.product(g.x))
    first = g.summed(one, g.call(aten.mul.Tensor, other, 2.0, **REDUCES))
    values = [g.product(g.x) for _ in range(products)]
    second = g.summed(one, g.call(aten.mul.Tensor, other, 3.0, **REDUCES))
    joint = g.joint(g.summed(first, second), *values)
    slow = SLOW | {"collective_seconds": seconds}
    assert_same(run(joint), run(scheduled(joint, max_peak_growth=9.0, machine=slow)))
