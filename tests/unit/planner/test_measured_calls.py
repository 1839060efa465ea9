"""What a calibration measures of a plan's step, made again from shapes alone and timed."""

import pickle

import pytest
import torch
import torch.distributed as dist

from graph_trainer.core.simulation.hardware import OpKind, load_hardware
from graph_trainer.planner.measure_ranks import Bench, Job, placed_alike
from graph_trainer.planner.measured_calls import (
    collective_calls,
    op_calls,
    op_named,
    real_arguments,
)
from graph_trainer.planner.plan import make_plan
from tests.unit.graphs import fake_world
from tests.unit.planner.conftest import RANKS, config_of


@pytest.fixture(scope="module")
def plan():
    return make_plan(config_of(), RANKS, load_hardware("cpu"), every_pass=False)


def test_the_distinct_ops_of_a_step_with_how_often_it_runs_them(plan):
    calls = op_calls(plan.simulation, plan.hardware, 1000)
    nodes = plan.simulation.costs
    by_cost = sum(cost.seconds > 0 for cost in nodes.values())
    assert sum(call.sample.count for call in calls) == by_cost > len(calls)
    assert {call.sample.kind for call in calls} == {*OpKind}
    flops = sum(call.sample.count * call.sample.size for call in calls if call.sample.bytes)
    assert flops == sum(cost.flops for cost in nodes.values())
    first = op_calls(plan.simulation, plan.hardware, 3)
    assert [call.target for call in first] == [call.target for call in calls[:3]]


def test_every_op_of_a_step_runs_on_what_is_made_of_its_shapes(plan):
    calls = pickle.loads(pickle.dumps(op_calls(plan.simulation, plan.hardware, 1000)))
    for call in calls:
        args, kwargs = real_arguments(call, torch.device("cpu"))
        with torch.no_grad():
            op_named(call.target)(*args, **kwargs)


def test_collectives_beyond_the_ranks_that_measure_are_left_out(plan):
    calls, beyond = collective_calls(plan.simulation, RANKS, 1000)
    issued = plan.simulation.collectives
    assert sum(call.sample.count for call in calls) == len(issued) and not beyond
    calls, beyond = collective_calls(plan.simulation, 1, 1000)
    assert not calls and beyond


@pytest.mark.parametrize(
    ("ranks", "size", "groups"),
    [
        ((0, 1), 4, [(0, 1), (2, 3)]),
        ((0, 2), 4, [(0, 2), (1, 3)]),
        ((0, 1, 4, 5), 8, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ((0, 1), 3, [(0, 1)]),
        ((0,), 2, [(0,), (1,)]),
    ],
)
def test_other_ranks_communicate_in_groups_of_the_same_shape(ranks, size, groups):
    assert placed_alike(ranks, size) == groups


def test_a_rank_measures_every_op_collective_and_the_host(plan):
    """On fake groups, whose collectives take no time."""
    calls, _ = collective_calls(plan.simulation, RANKS, 3)
    ops = op_calls(plan.simulation, plan.hardware, 4)
    fake_world(RANKS)
    lines = []
    bench = Bench(0, Job(ops, calls, "cpu", RANKS, seconds=60.0), lines.append)
    measured = bench.run()
    assert len(measured.ops) == 4 and all(seconds > 0 for seconds in measured.ops)
    assert len(measured.collectives) == 3 and all(seconds > 0 for seconds in measured.collectives)
    assert not measured.failed and measured.launches[0] > 0 and measured.overlaps
    assert {"view_seconds", "clip_seconds", "optimizer_seconds"} <= measured.host.keys()
    assert lines and dist.get_world_size() == RANKS


def test_what_there_is_no_time_for_is_left_out(plan):
    calls, _ = collective_calls(plan.simulation, RANKS, 1)
    fake_world(RANKS)
    job = Job(op_calls(plan.simulation, plan.hardware, 2), calls, "cpu", RANKS, seconds=0.0)
    measured = Bench(0, job, lambda line: None).run()
    assert measured.ops == [None, None] and measured.collectives == [None]
