"""What to change where a run does not fit: each setting tried, the one that saves most first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graph_trainer.errors import GraphTrainerError
from graph_trainer.plan.planner import OnProgress, Plan, make_plan

if TYPE_CHECKING:
    from graph_trainer.trainer import GraphTrainer

LoadConfig = Callable[[Sequence[str]], "GraphTrainer.Config"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One change and what it would do."""

    flags: tuple[str, ...]
    """What to write on the command line."""
    reserved_bytes: int
    """Estimated, as are the others."""
    tokens_per_second_per_gpu: float
    fits: bool

    def words(self) -> str:
        """The flags as one would type them."""
        return " ".join(self.flags)


@dataclass(frozen=True, slots=True)
class _Estimate:
    reserved_bytes: float
    tokens_per_second_per_gpu: float


def advise(plan: Plan, load: LoadConfig, on_progress: OnProgress) -> list[Advice]:
    """Plan the run again with one setting changed at a time.

    A change is estimated from the first two and the first four layers of the model, since
    memory and time grow linearly with layers: what it saves there is what it saves, so that
    this takes seconds for a model of any depth.

    Arguments:
        load: the config of the same command line with more flags behind it, checked.

    Returns:
        the changes that need less memory, the one that needs least first; what cannot be
        combined with the config is left out.
    """
    on_progress("estimating from a few layers")
    before = _estimate(load(()), plan)
    found = []
    for flags in changes(plan.config, plan.world_size):
        on_progress(f"trying {' '.join(flags)}")
        try:
            after = _estimate(load(flags), plan)
        except GraphTrainerError:  # this config excludes the change
            continue
        needs = plan.reserved_bytes + int(after.reserved_bytes - before.reserved_bytes)
        if needs < plan.reserved_bytes:
            faster = after.tokens_per_second_per_gpu / before.tokens_per_second_per_gpu
            speed = plan.tokens_per_second_per_gpu * faster
            found.append(Advice(flags, needs, speed, needs <= plan.hardware.usable_bytes))
    return sorted(found, key=lambda a: a.reserved_bytes)


_FEW, _MORE = 2, 4


def _estimate(config: GraphTrainer.Config, plan: Plan) -> _Estimate:
    """What a config needs and does, from a line through two depths of its model."""
    assert config.model_spec is not None
    depth = len(getattr(config.model_spec.model, "layers", ()))
    few, more = (_planned(config, plan, layers) for layers in (_FEW, _MORE))
    times = (depth - _FEW) / (_MORE - _FEW) if depth > _MORE else 1.0

    def line(a: float, b: float) -> float:
        return a + (b - a) * times

    seconds = line(few.step_seconds, more.step_seconds)
    return _Estimate(
        line(few.reserved_bytes, more.reserved_bytes),
        more.tokens_per_step / more.ranks_per_batch / seconds,
    )


def _planned(config: GraphTrainer.Config, plan: Plan, layers: int) -> Plan:
    """The plan of the first layers of a model; of all where it has no list of layers."""
    spec = config.model_spec
    assert spec is not None
    model = copy.deepcopy(spec.model)
    if hasattr(model, "layers"):
        model.layers = model.layers[:layers]
    shallow = copy.copy(config)
    shallow.model_spec = replace(spec, model=model)
    return make_plan(
        shallow,
        plan.world_size,
        plan.hardware,
        rank=plan.rank,
        runtime=plan.simulation.runtime,
    )


def changes(config: Any, world_size: int) -> list[tuple[str, ...]]:
    """Settings that save memory and are not used to the full yet, as flags."""
    found: list[tuple[str, ...]] = []
    training, parallelism = config.training, config.parallelism
    if parallelism.fsdp_reshard_after_forward != "always":
        found.append(("--parallelism.fsdp_reshard_after_forward", "always"))
    kind = type(config.activation_checkpoint).__qualname__ if config.activation_checkpoint else ""
    if "Full" not in kind:
        found.append(("--activation_checkpoint.type", "full"))
    if not kind:
        found.append(("--activation_checkpoint.type", "selective"))
    if "Chunked" not in type(config.loss).__qualname__:
        found.append(("--loss.type", "chunked_cross_entropy"))
    if training.local_batch_size > 1:
        found.append(("--training.local_batch_size", str(training.local_batch_size // 2)))
    if config.compile.backend != "inductor":
        found.append(("--compile.backend", "inductor"))
    tensor = parallelism.tensor_parallel_degree * 2
    if parallelism.data_parallel_shard_degree == -1 and world_size % tensor == 0:
        found.append(("--parallelism.tensor_parallel_degree", str(tensor)))
    if parallelism.data_parallel_replicate_degree > 1:
        found.append(
            ("--parallelism.data_parallel_replicate_degree", "1")
            + ("--parallelism.data_parallel_shard_degree", "-1")
        )
    found.append(("--training.seq_len", str(training.seq_len // 2)))
    return found
