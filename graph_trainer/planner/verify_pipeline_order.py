"""`graph-trainer plan --verify-order` of a pipeline: its stages, and what they send each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from graph_trainer.core.analysis.collectives import Entry
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.ordering.proof import OrderProof, prove_order
from graph_trainer.core.ordering.sequences import Sequence, issued_by
from graph_trainer.core.passes.pipeline import pass_by_pass
from graph_trainer.core.pipeline.simulate_schedule import StageSeconds, simulate_schedule
from graph_trainer.core.torch_private_pipelining import actions_of, ranks_of_stages
from graph_trainer.errors import GraphTrainerError, VerificationError
from graph_trainer.planner.fake_stages import FakeStages, modules_of_stages
from graph_trainer.planner.pipeline_plan import what_is_captured_of
from graph_trainer.planner.simulated_agreement import AsFarAsKnown, Passes, as_agreed, decided_by
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.planner.verify_order import announcement, check_shapes_of, classes_of
from graph_trainer.titan.captured_stages import passed_on_by
from graph_trainer.titan.config.check_pipeline import schedule_of
from graph_trainer.titan.config.core_settings import config_keys_in_errors
from graph_trainer.titan.config.run_config import GraphTrainerConfig


@config_keys_in_errors()
def verify_pipeline_order(
    config: GraphTrainerConfig,
    world_size: int,
    *,
    all_ranks: bool = False,
    device: str = "cuda",
    processes: int = 1,
    on_progress: OnProgress = lambda line: None,
) -> Iterator[str]:
    """Prove that the ranks of a pipeline cannot wait for each other forever; yield each part.

    Sends and receives are those of the schedule: they are run to the end, where every transfer
    needs both of its ranks, in the order of both. Collectives are of the ranks that have the same
    stage, and are proved as those of a run without a pipeline; stages with the same layers once.
    A program of a stage ends before the rank's next action, so that no send waits within one.

    Args: as of `verify_order`.

    Raises:
        VerificationError: the ranks can hang; or a rank has no graph, with its error.
    """
    parallelism, training = config.parallelism, config.training
    first = FakeStages(config, world_size, 0, device)
    degree, num_stages = parallelism.pipeline_parallel_degree, first.num_stages
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    actions = actions_of(schedule_of(config), num_stages, degree, microbatches)
    no_time = StageSeconds(0.0, 0.0)
    timeline = simulate_schedule(actions, dict.fromkeys(range(num_stages), no_time))
    yield (
        f"The schedule ends: {degree} ranks, {num_stages} stages, {microbatches} microbatches, "
        f"{len(timeline.transfers):,} sends, each with its receive in the order of both ranks."
    )
    rank_of, stride = ranks_of_stages(actions), world_size // degree
    alike: dict[object, list[int]] = defaultdict(list)
    for index, names in enumerate(modules_of_stages(config, first)):
        alike[what_is_captured_of(config, names)].append(index)
    for index, *others in alike.values():
        first_rank = rank_of[index] * stride
        run = FakeStages(config, world_size, first_rank, device)
        stage = _Stage(config, world_size, index, range(first_rank, first_rank + stride), device)
        classes = classes_of(run.parallel_dims, run.modules[index].parameters())
        ranks = range(stride) if all_ranks else classes.representatives()
        on_progress(f"stage {index}: {announcement(None if all_ranks else classes, stride)}")
        sequences = as_agreed(
            [*ranks], partial(stage.issued, classes=classes), on_progress, processes
        )
        proof = prove_order(sequences, None if all_ranks else classes)
        stages = ", ".join(map(str, (index, *others)))
        yield f"Stage{'s' if others else ''} {stages}: {_of_stage(proof)}"


def _of_stage(proof: OrderProof) -> str:
    text = str(proof)
    return text[0].lower() + text[1:]


class _Stage:
    """A stage on the ranks that have it, which follow each other.

    Args:
        ranks: these, of the world.
    """

    def __init__(
        self, config: GraphTrainerConfig, world_size: int, index: int, ranks: range, device: str
    ) -> None:
        self._config, self._world_size, self._device = config, world_size, device
        self._index, self._ranks = index, ranks

    def issued(
        self, rank: int, agreement: AsFarAsKnown, classes: RankClasses
    ) -> tuple[Sequence, Passes]:
        """Capture the stage on a rank, and list what it issues.

        Args:
            rank: of the ranks with the stage, which the groups are counted by too.
        """
        fake = partial(FakeStages, self._config, self._world_size, device=self._device)
        try:
            received = None
            if self._index:
                received = passed_on_by(fake(rank=rank).capture(0, None))
            run = fake(rank=self._ranks[rank])
            check_shapes_of(run.modules[self._index], rank, classes)
            joint = run.capture(self._index, received)
            list(pass_by_pass(joint, run.pass_config(), agreement=agreement))
            sequence = [
                replace(issued, entry=_counted_in(self._ranks, issued.entry))
                for issued in issued_by(joint, self._world_size)
            ]
        except GraphTrainerError as error:
            raise VerificationError(
                f"rank {self._ranks[rank]} could not capture stage {self._index}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return sequence, decided_by(joint)


def _counted_in(ranks: range, entry: Entry) -> Entry:
    """Return the entry of a collective with its ranks by their places among those of a stage."""
    name, group, inputs, reduction = entry
    return name, tuple(ranks.index(rank) for rank in group if rank in ranks), inputs, reduction
