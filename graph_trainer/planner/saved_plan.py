"""plan.json: the plan of a whole run, which `train --plan` compares a run with.

The pydantic models are the file's format. A plan is data: reading one executes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from graph_trainer.core.analysis.collective_purpose import traffic_of
from graph_trainer.core.analysis.lifetimes import lifetimes, storage_bytes
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.passes.catalogue import resolve_passes
from graph_trainer.core.passes.context import AllReduceMax
from graph_trainer.core.simulation.simulate import Simulation
from graph_trainer.core.toml_file import parse_toml
from graph_trainer.errors import ConfigError
from graph_trainer.planner.agreement import Passes, as_agreed, decided_by
from graph_trainer.planner.console import OnProgress
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.files import Texts
from graph_trainer.planner.fingerprint import Entry, Fingerprint, fingerprint_of
from graph_trainer.planner.plan import Plan, make_plan, versions
from graph_trainer.planner.verify_order import rank_classes
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.serialize import config_to_toml
from graph_trainer.titan.config.sources import did_you_mean, show

SCHEMA: Final = "graph_trainer.saved_plan/2"
"""Changes with every change of the format."""

AGAIN = "Write the plan again with `graph-trainer plan --save`."

Count = Annotated[int, Field(ge=0, lt=2**63)]
Entries = tuple[tuple[Count, Count], ...]
"""The entries of a list of a fingerprint. They are long and repeat themselves, so each text is
written once: `Entry.what` and `Entry.where` are positions in `SavedPlan.texts`."""


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class CollectiveVolume(_Model):
    """Collectives of one kind and role in one microbatch."""

    count: Count
    bytes: Count
    """The bytes that they read on this rank."""


class Predicted(_Model):
    """What the simulation predicts for one rank."""

    peak_bytes: Count
    """The most bytes alive at once."""
    reserved_bytes: Count
    """The bytes that the allocator takes from the device, gaps included."""
    needed_bytes: Count
    """What the device must have: those and the reserve of the hardware's profile."""
    peak_by_category: dict[str, Count]
    made_bytes: Count
    """The most bytes alive at once of the tensors that the graph makes; inputs do not count."""
    parameter_bytes: Count
    gradient_bytes: Count
    optimizer_bytes: Count
    step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """All microbatches, clipping and optimizer."""
    collectives: dict[str, dict[str, CollectiveVolume]]
    """By kind and role, of one microbatch."""

    def counts(self) -> dict[str, int]:
        """Return the number of collectives of each kind in one microbatch."""
        return {
            kind: sum(volume.count for volume in roles.values())
            for kind, roles in self.collectives.items()
        }


class PlannedClass(_Model):
    """A class of ranks that capture the same graph, described by one of them."""

    rank: Count
    """The rank that was captured."""
    ranks: Count
    """The number of ranks in the class."""
    fingerprint: str
    """The digest of the three lists below."""
    predicted: Predicted
    input: Entries
    op: Entries
    collective: Entries


class SavedPlan(_Model):
    """A plan as `graph-trainer plan --save` writes it."""

    schema_: Literal["graph_trainer.saved_plan/2"] = Field(alias="schema")
    versions: dict[str, str]
    """By package."""
    config: str
    """The resolved config as TOML."""
    hardware: str
    device: str
    """ "cuda" or "cpu": what the step was captured for."""
    world_size: Count
    passes: tuple[str, ...]
    """Names, in order."""
    microbatches: Count
    """How often the graph runs in a step."""
    axes: tuple[tuple[str, Annotated[tuple[Count, ...], Field(min_length=1)]], ...]
    """Name of each axis of the mesh, and for each coordinate along it the class it belongs to."""
    classes: tuple[PlannedClass, ...]
    """One for each class of ranks."""
    texts: tuple[str, ...]

    @property
    def rank_classes(self) -> RankClasses:
        """The axes, as the order check names classes of ranks."""
        return RankClasses(*zip(*self.axes, strict=True)) if self.axes else RankClasses((), ())

    def of_rank(self, rank: int) -> PlannedClass:
        """Return the class that a rank belongs to."""
        first = self.rank_classes.representative_of(rank)
        return next(each for each in self.classes if each.rank == first)

    def fingerprint(self, planned: PlannedClass) -> Fingerprint:
        """Return the step that a class was planned to capture."""
        lists = (planned.input, planned.op, planned.collective)
        return Fingerprint(
            *(tuple(Entry(*(self.texts[i] for i in pair)) for pair in entries) for entries in lists)
        )

    def config_table(self) -> dict[str, Any]:
        """Return the config as a parsed document."""
        return parse_toml(self.config, "config")

    def to_json(self) -> str:
        """Return the content of the file."""
        return self.model_dump_json(by_alias=True) + "\n"


def read_plan(path: Path) -> SavedPlan:
    """Read and check a plan.

    Raises:
        ConfigError: the file cannot be read, is no plan, is of another version, or was changed.
    """
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--plan {path}: cannot be read: {reason}. Name a file that `graph-trainer plan "
            "--save` wrote."
        ) from error
    try:
        plan = SavedPlan.model_validate_json(content)
    except ValidationError as error:
        raise ConfigError(f"--plan {path}: {_problem_of(error)}") from error
    for key, value, problem in _contradictions(plan):
        raise ConfigError(f"--plan {path}: {key} = {show(value)}: {problem}. {AGAIN}")
    return plan


def _problem_of(error: ValidationError) -> str:
    """Describe the first thing that keeps a document from being a plan."""
    first = error.errors()[0]
    kind, value, problem = first["type"], first["input"], first["msg"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    key = key.removeprefix(".")
    if kind == "json_invalid":
        return f"not JSON, or cut short: {problem}. {AGAIN}"
    if not key or (key, kind) == ("schema", "missing"):
        return (
            "not a plan: it has no schema. Name a file that `graph-trainer plan --save` wrote; "
            "what --json writes is for other programs."
        )
    if key == "schema":
        return f"schema = {show(value)}, and this version reads {SCHEMA}. {AGAIN}"
    if kind == "missing":
        return f"{key} is missing. {AGAIN}"
    if kind == "extra_forbidden":
        known = {*SavedPlan.model_fields, *PlannedClass.model_fields, *Predicted.model_fields}
        meant = did_you_mean(str(first["loc"][-1]), known)
        problem = f"unknown key. {meant}".strip().rstrip(".")
    return f"{key} = {show(value)}: {problem}. {AGAIN}"


def _contradictions(plan: SavedPlan) -> Iterator[tuple[str, object, str]]:
    """Find what is inconsistent in a plan: key, value and problem.

    Whatever comes after a contradiction relies on its absence: stop at the first one.
    """
    num_ranks = math.prod(len(labels) for _, labels in plan.axes)
    if num_ranks != plan.world_size:
        problem = f"they multiply to {num_ranks} ranks, and world_size is {plan.world_size}"
        yield "axes", plan.axes, problem
    # Counted first: a few bytes of axes may stand for more classes than there is memory.
    number = math.prod(len(set(labels)) for _, labels in plan.axes)
    ranks = {each.rank: each.ranks for each in plan.classes}
    if number != len(plan.classes) or ranks != plan.rank_classes.representatives():
        yield "classes", list(ranks), "not one for each class of the axes"
    for place, each in enumerate(plan.classes):
        for name in ("input", "op", "collective"):
            for i, pair in enumerate(getattr(each, name)):
                if max(pair) >= len(plan.texts):
                    yield f"classes[{place}].{name}[{i}]", pair, "not two positions in texts"
        if each.fingerprint != plan.fingerprint(each).digest:
            problem = "not the digest of the lists in the file, which was changed by hand"
            yield f"classes[{place}].fingerprint", each.fingerprint, problem
    try:
        plan.config_table()
    except ConfigError as error:
        first, *_ = str(error).splitlines()
        yield "config", plan.config, f"not TOML ({first.rstrip('.')})"


def plan_every_class(plan: Plan, *, on_progress: OnProgress = lambda line: None) -> SavedPlan:
    """Plan one rank of every class of ranks, with the config and hardware of one rank's plan.

    The passes run as they do in training, where the ranks agree on what a memory limit rolls back.

    Raises:
        GraphTrainerError: as `make_plan`, for any of the ranks.
    """
    config, world_size, hardware = plan.config, plan.world_size, plan.hardware
    classes = rank_classes(FakeRank(config, world_size, 0, hardware.device))
    sizes = classes.representatives()
    ranks = list(sizes)
    texts = Texts()

    def run(rank: int, agree: AllReduceMax) -> tuple[tuple[Predicted, Fingerprint], Passes]:
        on_progress(f"rank {rank}, class {ranks.index(rank) + 1} of {len(ranks)}")
        of_rank = make_plan(config, world_size, hardware, rank=rank, every_pass=False, agree=agree)
        joint = of_rank.simulation.joint
        return (_predicted(of_rank), fingerprint_of(joint, rank, classes)), decided_by(joint)

    planned = [
        PlannedClass(
            rank=rank,
            ranks=sizes[rank],
            fingerprint=fingerprint.digest,
            predicted=predicted,
            **{
                name: tuple((texts[e.what], texts[e.where]) for e in entries)
                for name, entries in fingerprint.parts().items()
            },
        )
        for rank, (predicted, fingerprint) in as_agreed(ranks, run, on_progress).items()
    ]
    return SavedPlan(
        schema=SCHEMA,
        versions=versions(),
        config=config_to_toml(config),
        hardware=hardware.name,
        device=hardware.device,
        world_size=world_size,
        passes=tuple(pass_names(config)),
        microbatches=plan.microbatches,
        axes=tuple(zip(classes.names, classes.labels, strict=True)),
        classes=tuple(planned),
        texts=tuple(texts),
    )


def pass_names(config: GraphTrainerConfig) -> list[str]:
    """Return the names of the passes that a config asks for, in order."""
    passes = resolve_passes(config.compile.passes, config.compile.disable_passes)
    return [each.name for each in passes]


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
        collectives=_collectives(simulation),
    )


def _collectives(simulation: Simulation) -> dict[str, dict[str, CollectiveVolume]]:
    traffic = traffic_of(simulation.collectives)
    volumes: dict[str, dict[str, CollectiveVolume]] = {}
    for c in simulation.collectives:
        roles, role = volumes.setdefault(c.kind, {}), traffic[c.node].value
        before = roles.get(role, CollectiveVolume(count=0, bytes=0))
        roles[role] = CollectiveVolume(count=before.count + 1, bytes=before.bytes + c.input_bytes)
    return volumes
