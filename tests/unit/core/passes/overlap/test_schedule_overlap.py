"""Collectives start early and are waited for late, by simulated time, within a memory limit."""

import importlib
import math
import random
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import (
    Role,
    annotate_node,
    annotation,
    is_backward,
    parameter_of,
    role_of,
)
from graph_trainer.core.graph.ops import is_getitem, is_wait, storage_roots, written_arguments
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.core.ordering.proof import prove_order
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.passes.overlap.schedule_graph import ScheduleGraph
from graph_trainer.core.passes.overlap.schedule_overlap import (
    ScheduleOverlapOptions,
    schedule_overlap,
)
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.core.units import GIB, MIB
from graph_trainer.testing import assert_same, code, run
from tests.examples import examples
from tests.unit.core.ordering.front_ends import sequence_of
from tests.unit.core.passes.overlap.schedule_graphs import (
    TENSOR,
    late_reductions,
    make_groups,
    options,
    peak_bytes,
    products_before_starts,
    programs,
    reductions,
    scheduled,
    step_of,
)
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import Decoder, aten, captured_decoder, captured_once

GROUPS: dict[tuple[int, ...], str] = {}
MANY = examples(100, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


machines = st.fixed_dictionaries(
    {
        "memory_bytes_per_second": st.sampled_from([1e6, 1e9]),
        "base_seconds": st.sampled_from([1e-9, 1e-6, 1e-3]),
        "collective_compute_share": st.sampled_from([0.0, 0.25]),
        "device": st.sampled_from(["cuda", "cpu"]),
    }
)
limits = st.fixed_dictionaries(
    {
        "prefetch_depth": st.integers(0, 3),
        "max_in_flight_mib": st.sampled_from([100 / MIB, 400 / MIB, None]),
        "growth": st.sampled_from([0, 100, 1000, 1 << 40]),
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
    device, cap = limits["machine"]["device"], limits["max_in_flight_mib"]
    growth = min(limits["growth"], math.inf if cap is None else cap * MIB)
    assert peak_bytes(after, device) <= peak_bytes(before, device) + growth
    # order
    for kept in (gathers, reductions, of_tensor_parallelism):
        was, now = ([node.name for node in kept(each)] for each in (before, after))
        assert was == now, kept.__name__
    products = [n.target is aten.mm.default and not is_backward(n) for n in after.graph.nodes]
    ahead = [role_of(n) is Role.UNSHARD and is_backward(n) for n in after.graph.nodes]
    assert True not in products or True not in ahead[: len(products) - products[::-1].index(True)]
    # nothing is waited for before it started, and everything is
    assert all(c.waited_after is not None for c in collectives(after))
    assert accesses(before) == accesses(after)
    if code(before) != code(after):
        for node in after.graph.nodes:
            assert not is_getitem(node) or node.prev in (node.args[0], *node.args[0].users)


def accesses(joint):
    """For each write in place and each node that reads the storage: does it read before? What a
    collective reads, it reads until its wait."""
    storages = storage_roots(joint.graph)
    place = {node: index for index, node in enumerate(joint.graph.nodes)}
    found = set()
    for write in place:
        written = {storages[target] for target in written_arguments(write)}
        for node in place if written else ():
            read = [*node.all_input_nodes]
            read += [each for start in read if is_wait(node) for each in start.all_input_nodes]
            if not written.isdisjoint(storages[each] for each in read):
                found.add((write.name, node.name, place[node] < place[write]))
    return found


@MANY
@given(late_reductions, limits, st.booleans(), st.integers(1, 3))
def test_products_do_not_pile_up_before_a_reduction(program, limits, plenty, most):
    """Few of them if memory allows that it starts; if not, here, not more than before."""
    if not dist.is_initialized():
        GROUPS.update(make_groups())
    limits |= {"max_consecutive_compute": most}
    if plenty:
        limits |= {"growth": 1 << 40, "max_in_flight_mib": None}
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
    group = (rank & ~digit, rank | digit)
    return replace(issued, entry=(kind, group, inputs, reduction))


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
    machines = [some_machine(number) for number in range(8)]
    found = [[] for _ in machines]
    rows = set()
    for rank in (0, sizes[-1] - 1):
        joint = captured_decoder(world=sizes, rank=rank, fsdp={"mode": mode})
        bucketing = BucketCollectivesOptions(strategy="transformer_block" if bucketed else "none")
        more = {"bucket_collectives": bucketing}
        gt.run_passes(
            joint,
            gt.PassConfig(
                reshard_after_forward="always",
                options=more,
                disable_passes=["schedule_overlap"],
            ),
        )
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
        "max_in_flight_mib": rng.choice([1e-3, 4e-3, None]),
        "growth": rng.choice([100, 1000, 1 << 20]),
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


def gathers(joint):
    return [c.node for c in collectives(joint) if c.role is Role.UNSHARD]


def of_tensor_parallelism(joint):
    return [c.node for c in collectives(joint) if c.ranks == TENSOR]


def test_it_says_what_moved_and_what_that_hides():
    groups = make_groups()
    program = ([4, 4], [("gather", 0, 0), ("use", 0, 0), ("gather", 1, 0), ("use", 1, 0)] * 2, 99)
    joint = step_of(program, groups)
    slow = {"memory_bytes_per_second": 1e2, "base_seconds": 1.0}
    given, context = options(machine=slow)
    passes = gt.PassConfig(
        passes=[schedule_overlap],
        options={"schedule_overlap": given},
        hardware=context.hardware,
    )
    before = simulate(joint, machine(**slow)).timeline.exposed_seconds()
    report = gt.run_passes(joint, passes)
    after = simulate(joint, machine(**slow)).timeline.exposed_seconds()
    (was,), (now,) = before.values(), after.values()
    expected = f"exposed {was * 1e3:,.1f} ms before and {now * 1e3:,.1f} ms now"
    assert now < was and "," in expected and expected in report.last.remarks[0]
    assert "3 of 4 start earlier" in report.last.remarks[0]
    assert report.notes() == [f"schedule_overlap: {report.last.remarks[0]}"]
    assert any("node all_gather_into_tensor" in line for line in report.last.remarks[1:])
    # nothing to move, nothing to say
    assert gt.run_passes(step_of(([1], [("relu", 0, 0)], 99), groups), passes).notes() == []


@pytest.mark.parametrize("of_context", [False, True])
def test_context_parallelism_may_use_the_ranks_of_fsdp(of_context):
    """It has groups of its own; other collectives on FSDP's group keep FSDP's where they are."""
    program = ([4, 4], [("gather", 0, 0), ("use", 0, 0), ("gather", 1, 0), ("use", 1, 0)] * 2, 99)
    joint = step_of(program, make_groups())
    *others, last = gathers(joint)
    custom = last.meta["custom"]
    last.meta["custom"] = {k: v for k, v in custom.items() if v != Role.UNSHARD.value}
    if of_context:
        annotate_node(last, annotation(context_parallel=True))
    graph = ScheduleGraph(joint, machine(), fused=False)
    assert len(graph.gathers) == (len(others) if of_context else 0)


@pytest.mark.parametrize(
    "key, value",
    [
        ("prefetch_depth", -1),
        ("max_in_flight_mib", 0.0),
        ("max_in_flight_mib", math.nan),
        ("max_consecutive_compute", 0),
    ],
)
def test_limits_that_allow_nothing_are_refused(key, value):
    with pytest.raises(gt.PassError, match=f"ScheduleOverlapOptions.{key} is {value:g}"):
        ScheduleOverlapOptions(**{key: value})


def test_no_gather_moves_from_backward_into_forward():
    uses = [("gather", 0, 0), ("use", 0, 0), ("gather", 1, 0), ("use", 1, 0)]
    joint = step_of(([4, 4], uses * 2, 4), make_groups())
    after = scheduled(joint, prefetch_depth=9)
    shown = {*gathers(after), *after.graph.find_nodes(op="call_function", target=aten.mm.default)}
    ahead = [is_backward(n) for n in after.graph.nodes if n in shown]
    assert code(after) != code(joint) and ahead == sorted(ahead)


def captured_wide(tokens, layers):
    batch = torch.zeros(2, tokens, dtype=torch.int64)
    return captured_once(lambda: Decoder(layers, dim=64, hidden=512), layers, batch)


def in_order_of(tokens, layers=2, first=None, **settings):
    """A step of so many tokens, and the report: scheduled, in the order of a first graph if any."""
    slow = {"base_seconds": 1e-3, "memory_bytes_per_second": 1e8}
    hardware = machine(**slow, device="cpu", **settings)
    config = gt.PassConfig(hardware=hardware, reshard_after_forward="always")
    joint = captured_wide(tokens, layers)
    return joint, gt.run_passes(joint, config, first=first)


def test_a_graph_of_another_batch_shape_is_put_in_the_order_of_the_first():
    """By itself it would get another order, and its rank would not match the others."""

    def order(joint):
        return [(n.target, parameter_of(n)) for n in joint.graph.nodes]

    first, _ = in_order_of(8)
    alone, _ = in_order_of(4096)
    alike, _ = in_order_of(4096, first=first)
    assert order(alike) == order(first) != order(alone)


class OfTwo(OneRank):
    """Two ranks, the other of which needs more by twice what the schedule adds here, as where its
    allocator has gaps."""

    def __init__(self, plain):
        super().__init__()
        self.plain = plain

    def all_reduce_max(self, number):
        is_bytes = self.plain < number < 1 << 40  # or a digest
        return 3 * number - 2 * self.plain if is_bytes else number


class OnlyTheFirstFits(OneRank):
    """A rank on which each order but the first that is looked at needs a GiB more."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def all_reduce_max(self, number):
        is_bytes = 0 < number < 1 << 40  # or a digest
        self.calls += is_bytes
        return number + (is_bytes and self.calls > 1) * GIB


def test_an_order_that_does_not_fit_is_not_taken():
    """Not even the last that is tried, which adds nothing by the scheduler's account."""
    captured, orders = captured_wide(64, 4), []
    slow = {"base_seconds": 1e-2, "memory_bytes_per_second": 1e8, "device": "cpu"}
    config = gt.PassConfig(hardware=machine(**slow), reshard_after_forward="always")
    for changes in ({}, {"disable_passes": ["schedule_overlap"]}):
        joint = copy_graph(captured)
        gt.run_passes(joint, replace(config, **changes), agreement=OnlyTheFirstFits())
        orders.append([node.name for node in joint.graph.nodes])
    assert orders[0] == orders[1]


def test_what_is_in_flight_follows_from_the_memory_that_is_left(monkeypatch):
    """The less is left, the longer the step, and never more than there is on any rank; a limit and
    a device are alike; and the report has what the bound costs. On CPU ranks, whose memory has no
    gaps, to the byte; there a step needs 3% more at most, whatever is left."""
    captured = captured_wide(64, 4)

    def scheduled(memory_gib, agreement=None, **settings):
        """Bytes that are needed, seconds of a step, the order, and the seconds lost."""
        slow = {"base_seconds": 1e-2, "memory_bytes_per_second": 1e8, "device": "cpu"}
        hardware = machine(**slow, memory_gib=memory_gib)
        config = gt.PassConfig(hardware=hardware, reshard_after_forward="always", **settings)
        joint = copy_graph(captured)
        notes = "".join(gt.run_passes(joint, config, agreement=agreement).notes())
        lost = re.search(r"a step would take ([0-9.]+) ms", notes)
        simulated = simulate(joint, hardware)
        seconds, needed = simulated.timeline.step_seconds, simulated.need().total
        order = [n.name for n in joint.graph.nodes]
        return needed, seconds, order, float(lost[1]) / 1e3 if lost else 0.0

    plain, plain_seconds, *_ = scheduled(1.0, disable_passes=["schedule_overlap"])
    assert plain < scheduled(1.0)[0] <= 1.03 * plain
    overlap = importlib.import_module(schedule_overlap.function.__module__)
    monkeypatch.setattr(overlap, "_HOST_GROWTH", 10)
    most, fastest, _, lost = scheduled(1.0)
    assert most > 1.03 * plain
    assert fastest < plain_seconds and most > plain and not lost
    before = math.inf
    for part in (0.0, 0.6, 1.0):
        allowed = plain + part * (most - plain)
        needed, seconds, order, lost = scheduled(allowed / GIB)
        assert needed <= allowed and fastest <= seconds < before
        assert lost == pytest.approx(seconds - fastest, abs=1e-4)
        assert scheduled(1.0, memory_limit_gib=allowed / GIB)[2] == order
        before = seconds
    assert seconds == fastest
    needed, seconds, order, _ = scheduled(allowed / GIB, OfTwo(plain))
    assert plain + 3 * (needed - plain) <= allowed and fastest < seconds < plain_seconds
