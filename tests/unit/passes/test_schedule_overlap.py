"""Collectives start early and end late, as the clock says, within what memory is allowed."""

import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graph_trainer.analysis.collectives import collectives
from graph_trainer.analysis.lifetimes import lifetimes
from graph_trainer.analysis.scratch import gloo_scratch
from graph_trainer.graph_copy import copy_graph
from graph_trainer.joint_graph import Role, is_backward, role_of
from graph_trainer.passes.schedule_overlap import ScheduleOverlapOptions, schedule_overlap
from graph_trainer.passes.simulator import Simulator
from tests.unit.analysis.machines import machine
from tests.unit.graphs import assert_same, aten, code, run
from tests.unit.passes.schedule_graphs import TENSOR, make_groups, programs, step_of

GROUPS: dict[tuple[int, ...], str] = {}
MIB = 1024**2
MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def options(**changes):
    machine_ = machine(**changes.pop("machine", {}))
    return ScheduleOverlapOptions(simulator=Simulator(hardware=machine_), **changes)


def scheduled(joint, **changes):
    """A copy, scheduled."""
    joint = copy_graph(joint)
    schedule_overlap.function(joint, options(**changes))
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
        assert kept(after) == kept(before), kept.__name__
    products = [n.target is aten.mm.default and not is_backward(n) for n in after.graph.nodes]
    ahead = [role_of(n) is Role.UNSHARD and is_backward(n) for n in after.graph.nodes]
    assert True not in products or True not in ahead[: len(products) - products[::-1].index(True)]
    # nothing is waited for before it started, and everything is
    assert all(c.waited_after is not None for c in collectives(after))


def peak(joint, limits):
    scratch = gloo_scratch(joint) if limits["machine"]["device"] == "cpu" else None
    return lifetimes(joint, scratch=scratch).peak_bytes


def gathers(joint):
    return [c.node.name for c in collectives(joint) if c.role is Role.UNSHARD]


def reductions(joint):
    """Those of full gradients."""
    return [c.node.name for c in collectives(joint) if c.kind == "reduce_scatter_tensor"
            and c.role is Role.REDUCE_GRAD]  # fmt: skip


def of_tensor_parallelism(joint):
    return [c.node.name for c in collectives(joint) if c.ranks == TENSOR]
