"""The step time of a run over its memory limit, with fixed policies as points beside the curve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.context import ActivationPolicy
from graph_trainer.core.passes.pipeline import PassConfig, run_passes, with_policy
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import MemoryLimitError
from graph_trainer.planner.console import OnProgress
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.plan import CurvePoint, Plan

_FIXED: tuple[ActivationPolicy, ...] = ("none", "selective", "full")
_LIMITS = 8


def memory_curve(plan: Plan, on_progress: OnProgress) -> list[CurvePoint]:
    """Plan the run under every fixed policy, and under limits between the least and the most.

    The step is captured once. Limits stand closer where memory is short, as time changes fastest
    there; parameters are kept unsharded or gathered again as the plan chooses ("auto").

    Raises:
        CaptureError, PassError, VerificationError: as `make_plan`.
    """
    run = FakeRank(plan.config, plan.world_size, plan.rank, plan.hardware.device)
    on_progress("capturing the train step")
    joint = run.capture()
    passes = replace(run.pass_config(hardware=plan.hardware), memory_limit_gib=0.0)
    points = []
    for policy in _FIXED:
        on_progress(f"the policy {policy}")
        # nothing is planned without a limit
        auto = passes.reshard_after_forward == "auto"
        reshard = "default" if auto else passes.reshard_after_forward
        fixed = with_policy(passes, policy, reshard_after_forward=reshard)
        points.append(_point(plan, joint, fixed))
    least, most = (chosen(point.needed_bytes for point in points) for chosen in (min, max))
    for limit in _limits(least, most):
        on_progress(f"a limit of {gib(limit)} GiB")
        limited = with_policy(
            passes, "budget", reshard_after_forward="auto", memory_limit_gib=limit / GIB
        )
        try:
            points.append(_point(plan, joint, limited))
        except MemoryLimitError:  # gathered ahead, merged: a little more than "full" needs
            continue
    return points


def _limits(least: int, most: int) -> Iterator[int]:
    for number in range(_LIMITS):
        part = ((number + 1) / _LIMITS) ** 2
        yield int(least + (most - least) * part + 0.02 * least)


def _point(plan: Plan, joint: JointGraph, passes: PassConfig) -> CurvePoint:
    trial = copy_graph(joint)
    run_passes(trial, passes)
    simulation = simulate(trial, plan.hardware, passes.other_memory(trial))
    limit = passes.memory_limit_gib
    return CurvePoint(
        passes.activation_policy,
        int(limit * GIB) if limit else None,
        simulation.memory.peak_bytes,
        simulation.need().total,
        plan.microbatches * simulation.timeline.step_seconds + plan.outside_seconds,
    )
