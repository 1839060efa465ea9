"""What to change where a run does not fit: each setting tried, the one that saves most first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    tokens_per_second_per_gpu: float
    fits: bool

    def words(self) -> str:
        """The flags as one would type them."""
        return " ".join(self.flags)


def advise(plan: Plan, load: LoadConfig, on_progress: OnProgress) -> list[Advice]:
    """Plan the run again with one setting changed at a time.

    Arguments:
        load: the config of the same command line with more flags behind it, checked.

    Returns:
        the changes that need less memory, the one that needs least first; what cannot be
        combined with the config is left out.
    """
    found = []
    for flags in changes(plan.config, plan.world_size):
        on_progress(f"trying {' '.join(flags)}")
        try:
            other = make_plan(
                load(flags),
                plan.world_size,
                plan.hardware,
                rank=plan.rank,
                runtime=plan.simulation.runtime,
            )
        except GraphTrainerError:  # this config excludes the change
            continue
        if other.reserved_bytes < plan.reserved_bytes:
            speed = other.tokens_per_second_per_gpu
            found.append(Advice(flags, other.reserved_bytes, speed, other.fits))
    return sorted(found, key=lambda a: a.reserved_bytes)


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
