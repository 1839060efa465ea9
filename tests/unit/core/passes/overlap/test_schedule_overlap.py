"""Collectives start early and end late, as the clock says, within what memory is allowed."""

import functools
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import Role, is_backward, parameter_of, role_of
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.proof import prove_order
from graph_trainer.core.ordering.sequences import sequence_of
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.passes.context import OtherMemory, PassContext
from graph_trainer.core.passes.overlap.schedule_overlap import (
    ScheduleOverlapOptions,
    schedule_overlap,
)
from graph_trainer.core.passes.pipeline import passes_like
from graph_trainer.core.simulation.gloo_buffers import gloo_scratch
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.core.units import MIB
from tests.unit.core.passes.overlap.schedule_graphs import (
    FSDP,
    REPLICATE,
    TENSOR,
    late_reductions,
    make_groups,
    programs,
    step_of,
)
from tests.unit.core.simulation.machines import machine
from tests.unit.fake_ranks import become
from tests.unit.graphs import (
    BACKWARD,
    Builder,
    Decoder,
    assert_same,
    aten,
    c10d,
    captured,
    code,
    mean_square,
    run,
)

GROUPS: dict[tuple[int, ...], str] = {}
MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def options(**changes):
    """Options of the pass, and its context on some machine."""
    hardware = machine(**changes.pop("machine", {}))
    other = OtherMemory(fused=changes.pop("fused", False), device=hardware.device)
    context = PassContext(hardware=hardware, other_memory=lambda joint: other)
    return ScheduleOverlapOptions(**changes), context


def scheduled(joint, **changes):
    """A copy, scheduled."""
    joint = copy_graph(joint)
    schedule_overlap(joint, *options(**changes))
    joint.validate()
    return joint


machines = st.fixed_dictionaries(
    {
        "memory_bytes_per_second": st.sampled_from([1e6, 1e9]),
        "collective_seconds": st.sampled_from([1e-9, 1e-6, 1e-3]),
        "collective_compute_share": st.sampled_from([0.0, 0.25]),
        "device": st.sampled_from(["cuda", "cpu"]),
    }
)
limits = st.fixed_dictionaries(
    {
        "prefetch_depth": st.integers(0, 3),
        "max_in_flight_mib": st.sampled_from([100 / MIB, 400 / MIB, 1.0]),
        "max_peak_growth": st.sampled_from([0.0, 0.1, 1.0, 100.0]),
        "max_consecutive_compute": st.integers(1, 8),
        "machine": machines,
    }
)


@MANY
@given(programs, limits)
def test_a_schedule_keeps_its_promises(program, limits):
    if not dist.is_initialized():
        GROUPS.update(make_groups())
    groups = GROUPS
    before = step_of(program, groups)
    after = scheduled(before, **limits)
    assert_same(run(before), run(after))
    assert code(after) == code(scheduled(before, **limits)), "the same twice"
    # memory
    growth = int(limits["max_peak_growth"] * peak(before, limits))
    assert peak(after, limits) <= peak(before, limits) + growth
    # order
    for kept in (gathers, reductions, of_tensor_parallelism):
        was, now = ([node.name for node in kept(each)] for each in (before, after))
        assert was == now, kept.__name__
    products = [n.target is aten.mm.default and not is_backward(n) for n in after.graph.nodes]
    ahead = [role_of(n) is Role.UNSHARD and is_backward(n) for n in after.graph.nodes]
    assert True not in products or True not in ahead[: len(products) - products[::-1].index(True)]
    # nothing is waited for before it started, and everything is
    assert all(c.waited_after is not None for c in collectives(after))


@MANY
@given(late_reductions, limits, st.booleans(), st.integers(1, 3))
def test_products_do_not_pile_up_before_a_reduction(program, limits, plenty, most):
    """Few of them if memory allows that it starts; if not, here, not more than before."""
    if not dist.is_initialized():
        GROUPS.update(make_groups())
    limits |= {"max_consecutive_compute": most}
    if plenty:
        limits |= {"max_peak_growth": 100.0, "max_in_flight_mib": 1.0}
    before = step_of(program, GROUPS)
    was, now = products_before_starts(before), products_before_starts(scheduled(before, **limits))
    for name, (since_it_could, since_inputs) in now.items():
        assert since_inputs <= max(most, was[name][1])
        assert since_it_could <= most or not plenty


@MANY
@given(programs, st.lists(st.integers(1, 6), min_size=4, max_size=4), limits)
def test_ranks_that_compute_different_things_keep_one_order(program, other_rows, limits):
    """Two tensor-parallel ranks with parameters of different sizes, each of four data-parallel
    ones: all eight come to the end."""
    if not dist.is_initialized():
        GROUPS.update(make_groups())
    rows, steps, backward_from = program
    sequences = {}
    for place, of_place in ((0, rows), (4, [rows[0], *other_rows][: len(rows)])):
        joint = scheduled(step_of((of_place, steps, backward_from), GROUPS), **limits)
        for rank in range(4):
            sequences[place + rank] = [seen_by(place + rank, i) for i in sequence(joint)]
    prove_order(sequences)


def sequence(joint):
    return sequence_of(collectives(joint))


def seen_by(rank, issued):
    """What rank 0 issues, as another rank of eight does: each group along one binary digit."""
    kind, ranks, inputs, reduction = issued.entry
    digit = max(ranks)
    own = (rank & ~digit, rank | digit)
    return replace(issued, entry=(kind, own, inputs, reduction))


UNEVEN = {
    "no rows at all": ((5,), "fully_shard"),
    "fewer rows": ((3,), "fully_shard"),
    "hybrid": ((2, 5), "hybrid_shard"),
}


@pytest.mark.parametrize("bucketed", [False, True], ids=["plain", "bucketed"])
@pytest.mark.parametrize("case", UNEVEN)
def test_ranks_with_fewer_rows_keep_the_order(case, bucketed):
    """A rank may hold fewer rows of a parameter than others, or none, and whatever the machine,
    all ranks put their collectives in one order."""
    sizes, mode = UNEVEN[case]
    world = math.prod(sizes)
    machines = [some_machine(number) for number in range(12)]
    found = [[] for _ in machines]
    rows = set()
    for rank in (0, sizes[-1] - 1):
        become(rank, world)
        torch.manual_seed(0)
        model = gt.simple_fsdp(Decoder(), init_device_mesh("cpu", sizes), mode)
        joint = gt.capture(model, mean_square, (torch.zeros(2, 3, dtype=torch.int64),))
        bucketing = BucketCollectivesOptions(strategy="transformer_block" if bucketed else "none")
        more = {"bucket_collectives": bucketing}
        gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always", options=more))
        rows.add(tuple(n.meta["val"].numel() for n in joint.placeholders()))
        for of_machine, how in zip(found, machines, strict=True):
            of_machine.append(shared(scheduled(joint, **how)))
    assert len(rows) > 1
    for first, last in found:
        assert first == last
    assert len({tuple(first) for first, _ in found}) > 2, "the machine decides"


def shared(joint):
    """What all ranks of a shard group issue alike: the sizes too, but of a sum over replicas, who
    hold the same rows."""
    return [
        (
            c.kind,
            len(c.ranks),
            c.reduction,
            c.parameter,
            None if c.kind == "all_reduce" else c.inputs,
        )
        for c in collectives(joint)
    ]


def some_machine(number):
    rng = random.Random(number)
    return {
        "prefetch_depth": rng.choice([1, 2, 8]),
        "max_in_flight_mib": rng.choice([1e-3, 4e-3, 1.0]),
        "max_peak_growth": rng.choice([0.02, 0.1, 2.0]),
        "fused": rng.random() < 0.5,
        "machine": {
            "memory_bytes_per_second": 10 ** rng.uniform(6, 9),
            "peak_flops": {"float32": 10 ** rng.uniform(7, 9)},
            "network_bytes_per_second": 10 ** rng.uniform(6, 9),
            "node_bytes_per_second": 10 ** rng.uniform(6, 9),
            "network_latency_seconds": 0.0,
            "node_latency_seconds": 0.0,
            "devices_per_node": rng.choice([2, 8]),
            "launch_seconds": rng.choice([0.0, 1e-6]),
        },
    }


def peak(joint, limits):
    scratch = gloo_scratch(joint) if limits["machine"]["device"] == "cpu" else None
    return lifetimes(joint, scratch=scratch).peak_bytes


def gathers(joint):
    return [c.node for c in collectives(joint) if c.role is Role.UNSHARD]


def reductions(joint):
    """Those of gradients that nothing else has reduced before."""
    return [
        c.node
        for c in collectives(joint)
        if c.role is Role.REDUCE_GRAD and c.ranks == FSDP and not is_wait(c.node.args[0])
    ]


def products_before_starts(joint):
    """By reduction, the matrix products that run before it starts: since all that it reads is
    there and the reduction before it has started, and since all that it reads is there."""
    place = {node: index for index, node in enumerate(joint.graph.nodes)}
    is_product = [node.target is aten.mm.default for node in joint.graph.nodes]
    found = {}
    last = 0
    for node in reductions(joint):
        prepares, inputs = [node], []
        for each in prepares:
            for source in each.all_input_nodes:
                (prepares if role_of(source) is Role.REDUCE_GRAD else inputs).append(source)
        there = max(place[source] for source in inputs) + 1
        start = place[node]
        found[node.name] = sum(is_product[max(there, last) : start]), sum(is_product[there:start])
        last = start
    return found


def of_tensor_parallelism(joint):
    return [c.node for c in collectives(joint) if c.ranks == TENSOR]


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


def a_path_behind_a_gradient_of_no_product():
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
    """The first gradient is held until its reduction is waited for."""
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
        (a_path_behind_a_gradient_of_no_product, 2, 9.0),
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
    """Waiting for either runs part of what was put off for the other."""
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
    """What is put off for one reduction waits for the second of another, and reads the first."""
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


def test_it_says_what_moved_and_what_that_hides():
    groups = make_groups()
    program = ([4, 4], [("gather", 0, 0), ("use", 0, 0), ("gather", 1, 0), ("use", 1, 0)] * 2, 99)
    joint = step_of(program, groups)
    slow = {"memory_bytes_per_second": 1e6, "collective_seconds": 1e-4}
    given, context = options(max_peak_growth=9.0, machine=slow)
    passes = gt.PassConfig(
        passes=[schedule_overlap],
        options={"schedule_overlap": given},
        hardware=context.hardware,
    )
    before = simulate(joint, machine(**slow)).timeline.exposed_seconds()
    report = gt.run_passes(joint, passes)
    after = simulate(joint, machine(**slow)).timeline.exposed_seconds()
    (was,), (now,) = before.values(), after.values()
    told = f"exposed {was * 1e3:.1f} ms before and {now * 1e3:.1f} ms now"
    assert now < was and told in report.last.remarks[0]
    assert "3 of 4 start earlier" in report.last.remarks[0]
    assert report.notes() == [f"schedule_overlap: {report.last.remarks[0]}"]
    assert any("node all_gather_into_tensor" in line for line in report.last.remarks[1:])
    # nothing to move, nothing to say
    assert gt.run_passes(step_of(([1], [("relu", 0, 0)], 99), groups), passes).notes() == []


def test_without_a_machine_it_does_nothing():
    joint = step_of(([1], [("relu", 0, 0)], 99), make_groups())
    with pytest.raises(gt.PassError, match="no hardware is named: set compile.hardware"):
        gt.run_passes(joint, gt.PassConfig(passes=["schedule_overlap"]))


@pytest.mark.parametrize(
    "key, value",
    [
        ("prefetch_depth", -1),
        ("max_in_flight_mib", 0.0),
        ("max_in_flight_mib", math.nan),
        ("max_peak_growth", -0.1),
        ("max_consecutive_compute", 0),
    ],
)
def test_limits_that_allow_nothing_are_refused(key, value):
    with pytest.raises(gt.PassError, match=f"schedule_overlap.{key} is {value:g}"):
        ScheduleOverlapOptions(**{key: value})


def test_no_gather_moves_from_backward_into_forward():
    uses = [("gather", 0, 0), ("use", 0, 0), ("gather", 1, 0), ("use", 1, 0)]
    joint = step_of(([4, 4], uses * 2, 4), make_groups())
    after = scheduled(joint, prefetch_depth=9, max_peak_growth=9.0)
    ahead = [
        is_backward(n) for n in after.graph.nodes if n.target is aten.mm.default or is_gather(n)
    ]
    assert code(after) != code(joint) and ahead == sorted(ahead)


def is_gather(node):
    return is_collective(node) and role_of(node) is Role.UNSHARD


def test_a_graph_of_another_batch_shape_is_put_in_the_order_of_the_first():
    """Alone it would be ordered otherwise, and its rank would be at odds with the others."""

    def ordered(tokens, config):
        model = Decoder(2, dim=64, hidden=512)
        joint = captured(model, torch.zeros(2, tokens, dtype=torch.int64))
        gt.run_passes(joint, config)
        return joint, [(n.target, parameter_of(n)) for n in joint.graph.nodes]

    config = gt.PassConfig(
        passes=["default", "schedule_overlap"],
        hardware=machine(collective_seconds=1e-3, memory_bytes_per_second=1e8),
        reshard_after_forward="always",
        options={"schedule_overlap": ScheduleOverlapOptions(max_peak_growth=9.0)},
    )
    first, order = ordered(8, config)
    assert ordered(4096, config)[1] != order
    assert ordered(4096, passes_like(config, first))[1] == order


@pytest.mark.parametrize("growth, device", [(0.05, "cuda"), (9.0, "cuda"), (0.05, "cpu")])
def test_what_the_order_of_the_first_costs_a_graph_of_another_shape_is_said(growth, device):
    """An order that is within its bound for many tokens, and beyond it for few."""

    def ordered(tokens, config):
        joint = captured(Decoder(4, dim=64, hidden=512), torch.zeros(2, tokens, dtype=torch.int64))
        plain = copy_graph(joint)
        gt.run_passes(plain, gt.PassConfig(reshard_after_forward="always"))
        report = gt.run_passes(joint, config)
        here = {"machine": {"device": device}}
        more = peak(joint, here) / peak(plain, here) - 1
        return joint, more, report.last.remarks[0]

    config = gt.PassConfig(
        passes=["default", "schedule_overlap"],
        hardware=machine(collective_seconds=1e-3, memory_bytes_per_second=1e8, device=device),
        reshard_after_forward="always",
        options={"schedule_overlap": ScheduleOverlapOptions(max_peak_growth=growth)},
    )
    first, more, said = ordered(512, config)
    assert more <= growth and "more memory at the peak" not in said
    _, more, said = ordered(8, passes_like(config, first))
    told = f"a batch of another shape, in the order of the first: {more:.1%} more memory"
    assert said.startswith(told) is (more > growth) is (growth == 0.05)
