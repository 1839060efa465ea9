"""plan.json: the plan of a whole run, which `train --plan` compares a run with.

The pydantic models are the file's format. A plan is data: reading one executes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.data_sizes import storage_bytes
from graph_trainer.core.passes.pass_list import pass_list
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.fingerprint import Fingerprint, fingerprint_of
from graph_trainer.planner.plan import Plan, make_plan, versions
from graph_trainer.planner.simulated_agreement import AsFarAsKnown, Passes, as_agreed, decided_by
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.planner.verify_order import rank_classes
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.write_toml import config_to_toml
from graph_trainer.titan.step_inputs import pass_config
from graph_trainer.titan.strict import Strict

SCHEMA: Final = "graph_trainer.saved_plan/5"
"""Changes with every change of the format."""

REMEDY = (
    "Name a file that `graph-trainer plan --save` wrote, or write the plan again; what --json "
    "writes is for other programs."
)

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Predicted(Strict):
    """What the simulation predicts for one rank."""

    peak_bytes: Count
    """The most bytes alive at once."""
    reserved_bytes: Count
    """The bytes that the allocator takes from the device, gaps included."""
    needed_bytes: Count
    """What the device must have: reserved_bytes and the reserve of the hardware's profile."""
    peak_by_category: dict[str, Count]
    made_bytes: Count
    """The most bytes alive at once of the tensors that the graph makes; inputs do not count."""
    parameter_bytes: Count
    gradient_bytes: Count
    optimizer_bytes: Count
    step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """All microbatches, clipping and optimizer."""
    collectives: dict[str, Count]
    """The number of collectives of each kind in one microbatch."""


class PlannedClass(Strict):
    """A class of ranks that capture the same graph, described by one of them."""

    predicted: Predicted
    fingerprint: Fingerprint


class SavedPlan(Strict):
    """A plan as `graph-trainer plan --save` writes it."""

    schema_: Literal["graph_trainer.saved_plan/5"] = Field(alias="schema")
    versions: dict[str, str]
    """By package."""
    config: str
    """The resolved config as TOML."""
    hardware: Hardware
    """The profile with all its numbers: the machine that trains may lack one of a user's own."""
    world_size: Annotated[int, Field(ge=1)]
    passes: tuple[str, ...]
    """Names, in order."""
    axes: dict[str, tuple[Count, ...]]
    """By axis of the mesh, the class of each coordinate along it."""
    classes: dict[Count, PlannedClass]
    """By the first rank of each class, which was captured."""

    @model_validator(mode="after")
    def _check_ranks(self) -> SavedPlan:
        """Check that axes and classes are those of all ranks, as `of_rank` relies on."""
        known = self.rank_classes
        if known.num_ranks != self.world_size:
            raise PydanticCustomError(
                "axes",
                "axes: they multiply to {ranks} ranks, and world_size is {world_size}",
                {"ranks": known.num_ranks, "world_size": self.world_size},
            )
        # Counted first: a few bytes of axes may stand for more classes than there is memory.
        number = math.prod(len(set(labels)) for labels in known.labels)
        if number != len(self.classes) or {*self.classes} != {*known.representatives()}:
            raise PydanticCustomError(
                "classes", "classes: they must be one for each class of the axes"
            )
        return self

    @property
    def rank_classes(self) -> RankClasses:
        """The axes as classes of ranks."""
        return RankClasses(tuple(self.axes), tuple(self.axes.values()))

    def of_rank(self, rank: int) -> PlannedClass:
        """Return the class that a rank belongs to."""
        return self.classes[self.rank_classes.representative_of(rank)]

    def to_json(self) -> str:
        """Return the content of the file."""
        return self.model_dump_json(by_alias=True) + "\n"


def plan_every_class(
    plan: Plan, *, processes: int = 1, on_progress: OnProgress = lambda line: None
) -> SavedPlan:
    """Plan one rank of every class of ranks, with the config and hardware of one rank's plan.

    The passes run as they do in training, where the ranks agree on what a memory limit rolls back.
    At most `processes` plan at once.

    Raises:
        GraphTrainerError: as `make_plan`, for any of the ranks.
    """
    config, world_size, hardware = plan.config, plan.world_size, plan.hardware
    classes = rank_classes(FakeRank(config, world_size, 0, hardware.device))
    ranks = list(classes.representatives())

    def run(rank: int, agreement: AsFarAsKnown) -> tuple[PlannedClass, Passes]:
        of_rank = plan
        agreed = [agreement.all_reduce_max(number) for number in plan.decided_on]
        if rank != plan.rank or agreed != [*plan.decided_on]:
            agreement.numbers.clear()
            of_rank = make_plan(
                config,
                world_size,
                hardware,
                rank=rank,
                every_pass=False,
                agreement=agreement,
                captures=plan.captures,
            )
        joint = of_rank.simulation.joint
        fingerprint = fingerprint_of(joint, rank, classes)
        planned = PlannedClass(predicted=_predicted(of_rank), fingerprint=fingerprint)
        return planned, decided_by(joint)

    def announce(rank: int) -> None:
        on_progress(f"planning rank {rank}, class {ranks.index(rank) + 1} of {len(ranks)}")

    return SavedPlan(
        schema=SCHEMA,
        versions=versions(),
        config=config_to_toml(config),
        hardware=hardware,
        world_size=world_size,
        passes=pass_names(config),
        axes=dict(zip(classes.names, classes.labels, strict=True)),
        classes=as_agreed(ranks, run, on_progress, processes, on_start=announce),
    )


def pass_names(config: GraphTrainerConfig) -> tuple[str, ...]:
    """Return the names of the passes that a config selects, in order."""
    return tuple(pass_.name for pass_ in pass_list(pass_config(config)))


def _predicted(plan: Plan) -> Predicted:
    simulation = plan.simulation
    at_peak = simulation.memory.peak_by_category()
    gradients = [t for _, node in simulation.joint.gradients() for t in tensors_of(node)]
    return Predicted(
        peak_bytes=plan.peak_bytes,
        reserved_bytes=plan.need.allocated,
        needed_bytes=plan.need.total,
        peak_by_category={category.value: num for category, num in at_peak.items()},
        made_bytes=lifetimes(simulation.joint).peak_bytes,
        parameter_bytes=at_peak[Category.PARAMETERS],
        gradient_bytes=sum(map(storage_bytes, gradients)),
        optimizer_bytes=at_peak[Category.OPTIMIZER_STATE],
        step_seconds=plan.step_seconds,
        collectives=Counter(c.kind for c in simulation.collectives),
    )
