"""A whole step on some hardware."""

import sys

import pytest

import graph_trainer as gt
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.simulation.collective_costs import scratch_bytes
from graph_trainer.core.simulation.simulate import OtherMemory, simulate
from graph_trainer.core.simulation.timeline import COMPUTE
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import captured_decoder


def step(layers=2, **how):
    joint = captured_decoder(layers=layers, **how)
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
    return joint


def test_its_parts_are_of_one_graph():
    joint = step()
    found = simulate(joint, machine())
    assert [c.node for c in found.collectives] == [
        e.node for e in found.timeline.events if e.stream != COMPUTE
    ]
    computing = sum(c.seconds for c in found.costs.values())
    assert found.timeline.busy[COMPUTE] == pytest.approx(computing)
    assert len(found.memory.total) == len(found.timeline.starts) == len(joint.graph.nodes)
    assert found.joint is joint and found.hardware == machine()


def test_simulating_changes_nothing():
    joint = step()
    before, first = str(joint), simulate(joint, machine())
    again = simulate(joint, machine())
    assert str(joint) == before
    assert again.timeline.step_seconds == first.timeline.step_seconds
    assert again.memory.total == first.memory.total


BETTER = [
    {"memory_bytes_per_second": 2e9},
    {"matmul_efficiency": 1.0},
    {"node_bytes_per_second": 200e9},
    {"node_latency_seconds": 0.0},
    {"node_efficiency": 1.0},
    {"launch_seconds": 0.0},
    {"base_seconds": 0.0},
    {"power_limit_watts": 100},
]


def test_a_better_machine_is_faster():
    worse = {
        "launch_seconds": 1e-7,
        "base_seconds": 1e-5,
        "node_efficiency": 0.5,
        "power_limit_watts": 50,
        "peak_flops": {"float32": 1e8},
        "node_bytes_per_second": 1e7,
    }
    joint = step()
    before = simulate(joint, machine(**worse)).timeline.step_seconds
    for better in BETTER:
        after = simulate(joint, machine(**(worse | better))).timeline.step_seconds
        assert after < before, better


def test_gathering_across_nodes_takes_longer():
    joint = step()
    inside = simulate(joint, machine()).timeline
    across = simulate(joint, machine(devices_per_node=2)).timeline
    assert sum(across.exposed_seconds().values()) > sum(inside.exposed_seconds().values())
    assert across.busy[COMPUTE] == inside.busy[COMPUTE]


def test_a_compiler_saves_time_and_memory():
    joint = step()
    hardware = machine(launch_seconds=1e-6)
    eager, compiled = (
        simulate(joint, hardware, OtherMemory(fused=fused)) for fused in (False, True)
    )
    assert compiled.timeline.step_seconds < eager.timeline.step_seconds
    assert compiled.memory.peak_bytes <= eager.memory.peak_bytes
    assert sum(compiled.memory.total) < sum(eager.memory.total)
    assert [c.node for c in compiled.collectives] == [c.node for c in eager.collectives]


def test_optimizer_state_and_earlier_gradients_are_always_alive():
    joint = step()
    plain = simulate(joint, machine()).memory
    more = simulate(joint, machine(), OtherMemory(1000, 200)).memory
    assert more.total == [live + 1200 for live in plain.total]


def test_gloo_allocates_inside_collectives_and_nccl_does_not():
    joint = step()
    memory = {d: simulate(joint, machine(device=d)).memory for d in ("cpu", "cuda")}
    scratch = scratch_bytes(joint, "cpu")
    places = [p for p, node in enumerate(joint.graph.nodes) if node in scratch]
    assert places
    for place, node in enumerate(joint.graph.nodes):
        more = memory["cpu"].total[place] - memory["cuda"].total[place]
        assert more >= scratch.get(node, 0)
    assert (
        memory["cpu"].by_category[Category.ACTIVATIONS]
        == (memory["cuda"].by_category[Category.ACTIVATIONS])
    )


def test_work_grows_with_nodes():
    """Calls of functions a node: in a graph several times as long no more of them."""
    calls = {}
    for layers in (1, 4):
        joint = step(layers)
        count = 0

        def counting(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(counting)
        try:
            simulate(joint, machine(), OtherMemory(fused=True))
        finally:
            sys.setprofile(None)
        calls[len(joint.graph.nodes)] = count
    (short, few), (long, many) = sorted(calls.items())
    assert long > 2 * short
    assert many / long < 1.1 * few / short
