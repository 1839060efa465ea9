"""What a step consists of: compute, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping

from graph_trainer.planner.pipeline_plan import PipelinePlan
from graph_trainer.planner.plan import Plan
from graph_trainer.planner.plan_report import PURPOSES

COMPUTE = "compute"
OPTIMIZER = "clipping and optimizer"
BUBBLE = "bubble"


def parts_of_step(plan: Plan) -> dict[str, float]:
    """Return the seconds of a step by what they go into; their sum is the step."""
    row, timeline = plan.rows[-1], plan.simulation.timeline
    waits = {PURPOSES[traffic.value]: s for traffic, s in row.exposed_seconds.items()}
    waits["the host"] = row.host_wait_seconds
    waits["copies to and from the host"] = timeline.copy_wait_seconds
    factor = plan.microbatches * plan.slowest_device
    parts = {name: factor * seconds for name, seconds in waits.items() if seconds}
    parts[OPTIMIZER] = plan.slowest_device * plan.outside_seconds
    return {COMPUTE: plan.step_seconds - sum(parts.values())} | parts


def parts_of_pipeline(plan: PipelinePlan) -> dict[str, float]:
    """Return the same for a step of a pipeline, on the mean over its ranks; what a stage waits for
    within its programs is part of its compute."""
    factor, ranks = plan.repeats * plan.slowest_device, plan.num_ranks
    exposed = sum(map(plan.timeline.exposed_seconds, plan.actions)) / ranks
    parts = {
        BUBBLE: factor * plan.timeline.bubble * plan.timeline.seconds,
        "sends between stages": factor * exposed,
        OPTIMIZER: plan.slowest_device * plan.outside_seconds,
    }
    return {COMPUTE: plan.step_seconds - sum(parts.values())} | parts


def limited_by(parts: Mapping[str, float]) -> str:
    """Say what takes most of a step: compute, and the longest wait."""
    total = sum(parts.values())
    waits = {name: seconds for name, seconds in parts.items() if name != COMPUTE}
    longest = max(waits, key=waits.__getitem__, default="")
    text = f"{COMPUTE} {parts[COMPUTE] / total:.0%}"
    return f"{text}, {longest} {waits[longest] / total:.0%}" if longest else text
