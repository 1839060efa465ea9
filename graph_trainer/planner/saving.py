"""From a plan of one rank to a plan of the whole run, which a later run is held to."""

from __future__ import annotations

from collections.abc import Callable

from graph_trainer.core.analysis.collective_purpose import traffic_of
from graph_trainer.core.analysis.lifetimes import lifetimes, storage_bytes
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.passes.context import AllReduceMax
from graph_trainer.core.simulation.simulate import Simulation
from graph_trainer.planner.agreement import Passes, as_agreed, decided_by
from graph_trainer.planner.fake_run import FakeRun
from graph_trainer.planner.fingerprint import fingerprint_of
from graph_trainer.planner.plan import Plan, make_plan
from graph_trainer.planner.plan_check import pass_names
from graph_trainer.planner.report import versions
from graph_trainer.planner.saved_plan import PlannedClass, Predicted, SavedPlan
from graph_trainer.planner.verify_order import rank_classes
from graph_trainer.titan.config.serialize import config_to_toml


def plan_every_class(
    plan: Plan, *, on_progress: Callable[[str], None] = lambda line: None
) -> SavedPlan:
    """Plan one rank of each class that differs, with the config and hardware of a plan, as they
    run once they have agreed on what a memory limit rolls back.

    Raises:
        GraphTrainerError: as `make_plan`, for any of the ranks.
    """
    config, world_size, hardware = plan.config, plan.world_size, plan.hardware
    classes = rank_classes(FakeRun(config, world_size, 0, hardware.device))
    stands_for = classes.representatives()
    ranks = list(stands_for)

    def run(rank: int, agree: AllReduceMax) -> tuple[PlannedClass, Passes]:
        on_progress(f"rank {rank}, class {ranks.index(rank) + 1} of {len(ranks)}")
        of_rank = make_plan(config, world_size, hardware, rank=rank, every_pass=False, agree=agree)
        passes = decided_by(of_rank.simulation.joint)
        return _class(of_rank, stands_for[rank], classes), passes

    by_rank = as_agreed(ranks, run, on_progress)
    return SavedPlan(
        versions=versions(),
        config=config_to_toml(config),
        hardware=hardware.name,
        device=hardware.device,
        world_size=world_size,
        passes=tuple(pass_names(config)),
        microbatches=plan.microbatches,
        classes=classes,
        by_rank=by_rank,
    )


def _class(plan: Plan, ranks: int, classes: RankClasses) -> PlannedClass:
    simulation = plan.simulation
    fingerprint = fingerprint_of(simulation.joint, plan.rank, classes)
    return PlannedClass(plan.rank, ranks, fingerprint, _predicted(plan))


def _predicted(plan: Plan) -> Predicted:
    simulation = plan.simulation
    at_peak = simulation.memory.peak_by_category()
    gradients = [t for _, node in simulation.joint.gradients() for t in tensors_of(node)]
    return Predicted(
        peak_bytes=plan.peak_bytes,
        reserved_bytes=plan.reserved_bytes,
        peak_by_category={category.value: num for category, num in at_peak.items()},
        made_bytes=lifetimes(simulation.joint).peak_bytes,
        parameter_bytes=at_peak[Category.PARAMETERS],
        gradient_bytes=sum(map(storage_bytes, gradients)),
        optimizer_bytes=at_peak[Category.OPTIMIZER_STATE],
        step_seconds=plan.step_seconds,
        collectives=_collectives(simulation),
    )


def _collectives(simulation: Simulation) -> dict[str, dict[str, dict[str, int]]]:
    traffic = traffic_of(simulation.collectives)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for c in simulation.collectives:
        volume = found.setdefault(c.kind, {}).setdefault(
            traffic[c.node].value, {"count": 0, "bytes": 0}
        )
        volume["count"] += 1
        volume["bytes"] += c.input_bytes
    return found
