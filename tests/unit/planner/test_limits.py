"""What a step is limited by: the thing whose loss costs most."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from graph_trainer.core.simulation.hardware import Host, load_hardware
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.planner.limits import _slower, limits_of
from graph_trainer.planner.plan_report import plan_report, readable_report
from tests.unit.planner.conftest import shown

BASE = load_hardware("h100-sxm")
NO_HOST = Host(**{f.name: 0.0 for f in fields(Host)})


@pytest.mark.parametrize(
    "hardware, what",
    [
        (
            replace(
                *(BASE,),
                host=NO_HOST,
                network_bytes_per_second=1e6,
                node_bytes_per_second=1e6,
            ),
            "the network",
        ),
        (
            replace(BASE, host=Host(**{f.name: 1e-2 for f in fields(Host)})),
            "the host",
        ),
        (
            replace(BASE, host=NO_HOST, memory_bytes_per_second=1e6, memory_latency_seconds=0.0),
            "memory bandwidth",
        ),
        (
            replace(BASE, host=NO_HOST, matmul_efficiency=1e-6, attention_efficiency=1e-6),
            "power, which sets the clock of matmuls",
        ),
    ],
    ids=["network", "host", "memory", "power"],
)
def test_the_slowest_part_limits(full, hardware, what):
    plan = full.on(hardware)
    limits = limits_of(plan)
    assert limits[0].what == what
    assert [limit.longer for limit in limits] == sorted(
        (limit.longer for limit in limits), reverse=True
    )
    if what == "the host":
        assert limits[0].longer == pytest.approx(0.1, rel=0.05)
    if what in ("the network", "memory bandwidth"):
        assert limits[0].longer == pytest.approx(1 / 0.9 - 1, rel=0.05)


def test_the_step_is_timed_as_by_a_simulation_of_all(full):
    without_host = replace(BASE, host=NO_HOST, launch_seconds=1e-9, memory_latency_seconds=1e-9)
    for base in (BASE, without_host):
        plan = full.on(base)
        changed = 0
        for _, _, hardware in _slower(base):
            retimed = plan.simulation.retimed(hardware)
            whole = simulate(plan.simulation.joint, hardware, plan.simulation.other)
            assert retimed.timeline == whole.timeline
            assert (retimed.hardware, retimed.costs) == (hardware, whole.costs)
            changed += retimed.timeline != plan.simulation.timeline
        assert changed >= 2


def test_the_report_has_one_sentence(full):
    plan = full.on(BASE)
    assert plan_report(plan)["limits"] == [] and not readable_report(plan)["limited_by"]
    plan = replace(plan, limits=limits_of(plan))
    sentence = readable_report(plan)["limited_by"]
    assert sentence in " ".join(shown(plan).split())
    assert all(limit.change in sentence for limit in plan.limits)
    found = json.loads(json.dumps(plan_report(plan)))["limits"]
    assert [limit["what"] for limit in found] == [limit.what for limit in plan.limits]
