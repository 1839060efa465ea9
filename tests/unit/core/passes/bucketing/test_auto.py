"""How large a bucket is, where the network and the context decide."""

import dataclasses
from itertools import cycle, product

import pytest

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import bucket_tag, parameters_of
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.graph.snapshot import copy_graph, restore_graph
from graph_trainer.core.passes.base import NoOptions, Pass, Stage
from graph_trainer.core.passes.bucketing.assign import members_of
from graph_trainer.core.passes.bucketing.bucket_collectives import (
    BucketCollectivesOptions,
    best_caps,
    bucket_collectives,
    saturating_mib,
)
from graph_trainer.core.passes.bucketing.tag_buckets import tag_buckets
from graph_trainer.core.passes.context import PassContext, RunSettings
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.hardware import known_hardware, load_hardware
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.core.units import GIB, MIB
from graph_trainer.testing import code
from tests.unit.core.simulation.machines import changed, machine
from tests.unit.fake_ranks import Agreed
from tests.unit.graphs import captured_decoder, collective

AUTO = BucketCollectivesOptions(strategy="auto")
SPAN = AUTO.max_span
SLOW = machine(base_seconds=1e-4, node_bytes_per_second=2e9)
"""Needs 2 MiB to be busy: two matrices of the decoder below."""
FACTORS = (1.0, 0.5, 0.25, 0.0, 2.0, 4.0)


def captured(**decoder):
    return captured_decoder(layers=3, dim=64, hidden=4096, **decoder)


def tagged(**decoder):
    joint = captured(**decoder)
    off = ["tag_buckets", "bucket_collectives", "schedule_overlap"]
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always", disable_passes=off))
    tag_buckets(joint)
    return joint


def tried(joint, hardware):
    """Seconds and needed bytes with buckets of each size that is tried."""
    first = max(saturating_mib(c, hardware) for c in collectives(joint) if bucket_tag(c.node))
    found = {}
    for factor in FACTORS:
        trial = copy_graph(joint)
        options = BucketCollectivesOptions(strategy="size", cap_mib=factor * first or 1e-9)
        bucket_collectives(trial, options)
        step = simulate(trial, hardware)
        found[factor * first] = (step.timeline.step_seconds, step.need().total)
    return found


KINDS = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")
GROUPS = ((0, 1), tuple(range(64)), tuple(range(0, 128, 8)), (0, 7, 9))


@pytest.mark.parametrize(
    ("profile", "kind", "ranks"),
    [
        (profile, *pair)
        for profile, pair in zip(cycle(known_hardware()), product(KINDS, GROUPS), strict=False)
    ],
)
def test_the_size_that_saturates_a_group_is_the_smallest(profile, kind, ranks):
    hardware, one = load_hardware(profile), collective(kind, ranks)

    def rate(mib):
        size = int(mib * MIB)
        sized = dataclasses.replace(one, input_bytes=size, output_bytes=size)
        return size / collective_seconds(sized, hardware)

    mib = saturating_mib(one, hardware)
    wanted = 0.9 * rate(2**40)
    assert mib == 4096 or rate(mib) >= wanted
    assert mib == 1 or rate(mib / 2) < wanted


def test_collectives_stay_alone_where_merging_gains_nothing():
    joint = tagged()
    hardware = changed(SLOW, base_seconds=0.0, node_latency_seconds=0.0)
    (cap,) = best_caps(joint, members_of(joint), PassContext(hardware=hardware), SPAN).values()
    assert cap == 0


@pytest.mark.parametrize("latency", [1e-6, 1e-3])
def test_the_fastest_size_is_taken(latency):
    joint = tagged()
    hardware = changed(SLOW, base_seconds=latency)
    (cap,) = best_caps(joint, members_of(joint), PassContext(hardware=hardware), SPAN).values()
    by_cap = tried(joint, hardware)
    assert by_cap[cap][0] == pytest.approx(min(seconds for seconds, _ in by_cap.values()))


@pytest.mark.parametrize("limit_gib", [None, 1e-3], ids=["fits", "does not fit"])
def test_it_says_what_it_tried(limit_gib):
    joint = tagged()
    context = PassContext(settings=RunSettings(memory_limit_gib=limit_gib), hardware=SLOW)
    by_cap = tried(joint, SLOW)
    bucket_collectives(joint, AUTO, context)
    (cap,) = joint.decisions["bucket_collectives"].values()
    told = {}
    for size, (seconds, needed) in by_cap.items():
        size_told = f"up to {size:g} MiB" if size else "each alone"
        told[size] = (
            f"{size_told} over 4 ranks: {seconds * 1e3:.1f} ms a step, needs {needed / GIB:.2f} GiB"
            + (", more than memory_limit_gib" if limit_gib else "")
        )
    assert joint.remarks[0] == f"the best of 6: {told.pop(cap)}"
    assert joint.remarks[1:-1] == list(told.values())
    assert "may add in another order" in joint.remarks[-1]


def test_what_does_not_fit_is_not_taken():
    joint = tagged()
    # on a CPU, where memory is taken byte by byte
    slow = changed(SLOW, base_seconds=1e-2, device="cpu")
    by_cap = tried(joint, slow)
    (free,) = best_caps(joint, members_of(joint), PassContext(hardware=slow), SPAN).values()
    smaller = [needed for _, needed in by_cap.values() if needed < by_cap[free][1]]
    limit = PassContext(settings=RunSettings(memory_limit_gib=max(smaller) / GIB), hardware=slow)
    (cap,) = best_caps(joint, members_of(joint), limit, SPAN).values()
    assert by_cap[cap][1] <= max(smaller) < by_cap[free][1]


def test_the_slowest_rank_decides():
    """Where every size takes all ranks as long, the first is taken, whatever this rank's say."""
    joint = tagged()
    said = []

    def agree(mine):
        said.append(mine)
        return 10**15 if len(said) > 1 else mine  # first how large a bucket is asked for

    context = PassContext(hardware=SLOW, agreement=Agreed(agree))
    (cap,) = best_caps(joint, members_of(joint), context, SPAN).values()
    by_cap = tried(joint, SLOW)
    assert cap == list(by_cap)[FACTORS.index(1.0)]
    assert by_cap[cap][0] > min(seconds for seconds, _ in by_cap.values())
    assert len(said) == 1 + 3 * len(FACTORS)


def test_later_passes_are_simulated_too():
    joint = captured()
    seen = []
    mine = Pass("mine", Stage.SCHEDULE, "", lambda j, o, c: seen.append(j), NoOptions)
    options = {"bucket_collectives": AUTO}
    config = gt.PassConfig(passes=["default", mine], options=options, hardware=SLOW)
    gt.run_passes(joint, config)
    assert seen[-1] is joint and len(seen) == len(FACTORS) + 1
    assert all(trial is not joint for trial in seen[:-1])


def buckets(joint):
    return [parameters_of(n) for n in joint.graph.nodes if is_collective(n)]


@pytest.mark.parametrize("options", [AUTO, BucketCollectivesOptions(strategy="size", cap_mib=2)])
def test_another_graph_of_the_step_is_bucketed_alike_without_an_all_reduce(options):
    """The rank that meets it is alone: to ask others would be to wait for ever."""
    first, second = captured(), captured()
    options = {"bucket_collectives": options}
    config = gt.PassConfig(options=options, hardware=SLOW)
    asked = []
    gt.run_passes(first, config, agreement=Agreed(lambda mine: asked.append(mine) or mine))
    so_far = len(asked)
    slower = changed(SLOW, base_seconds=10.0)
    gt.run_passes(second, dataclasses.replace(config, hardware=slower), first=first)
    assert 0 < so_far == len(asked)
    assert buckets(second) == buckets(first)
    assert any(len(names) > 1 for names in buckets(first))


def test_a_decision_is_rolled_back_with_its_pass():
    joint = tagged()
    before, text = copy_graph(joint), code(joint)
    bucket_collectives(joint, AUTO, PassContext(hardware=SLOW))
    assert joint.decisions and copy_graph(joint).decisions == joint.decisions
    restore_graph(joint, before)
    assert not joint.decisions and code(joint) == text
