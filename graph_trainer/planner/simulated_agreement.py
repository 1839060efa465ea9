"""All-reduce decisions of ranks that are captured one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.core.passes.memory_table import MemoryTable
from graph_trainer.planner.processes import in_processes
from graph_trainer.planner.terminal import OnProgress

T = TypeVar("T")
Passes = tuple[object, ...]
"""The passes that ran and were not rolled back, and what they decided by simulation."""

_COSTS = 1 << 64
"""Above this an all-reduced number is many in one."""


def decided_by(joint: JointGraph) -> Passes:
    """Return the decisions of this rank that all ranks must share."""
    decisions: list[object] = [*joint.history]
    for name, decision in joint.decisions.items():
        if isinstance(decision, Mapping):  # MiB of a bucket by process group
            decisions.append((name, *decision.values()))  # its groups have other names elsewhere
        elif isinstance(decision, MemoryTable):
            decisions.append((name, decision))
    moved = [n.name for n in joint.graph.nodes if is_collective(n) or is_wait(n)]
    return (*decisions, *moved)


def as_agreed(
    ranks: Sequence[int],
    run: Callable[[int, AsFarAsKnown], tuple[T, Passes]],
    on_progress: OnProgress,
    processes: int = 1,
    **callbacks: Any,
) -> dict[int, T]:
    """Run the ranks until all run the same passes, as in training; return each rank's result.

    In training the ranks all-reduce (max) each number that decides which passes run. Here each
    rank uses the maxima that are known so far, and its own number for each later one. Where all
    ranks decide alike, they would with the maximum too; where they do not, the next maximum is
    taken from all ranks and all ranks run again.

    Args:
        run: captures a rank and runs its passes with this agreement.
        on_progress: called before each further round.
        processes: how many at most run ranks at once; see `in_processes`, also for `callbacks`.
    """
    maxima: list[int] = []

    def of_rank(rank: int) -> tuple[T, Passes, list[int]]:
        agreement = AsFarAsKnown(maxima)
        return (*run(rank, agreement), agreement.numbers)

    while True:
        results = in_processes(of_rank, ranks, processes, **callbacks)
        unknown = [numbers[len(maxima)] for *_, numbers in results if len(numbers) > len(maxima)]
        if len({passes for _, passes, _ in results}) == 1 or not unknown:
            return dict(zip(ranks, (result for result, _, _ in results), strict=True))
        maxima.append(max(unknown))
        # agreed_on of plan_memory all-reduces all costs as one number
        latest = f"{maxima[-1]:,} (bytes of a peak, or nanoseconds of a step)"
        if maxima[-1] >= _COSTS:
            latest = "the costs of all ops"
        on_progress(
            "Run the ranks again, which decided differently, with the agreed maximum number "
            f"{len(maxima)}: {latest}"
        )


class AsFarAsKnown(OneRank):
    """Takes the known maxima in order, then this rank's own numbers, and notes its own."""

    def __init__(self, maxima: Sequence[int]) -> None:
        super().__init__()
        self._maxima = maxima
        self.numbers: list[int] = []

    def all_reduce_max(self, number: int) -> int:
        self.numbers.append(number)
        place = len(self.numbers) - 1
        return self._maxima[place] if place < len(self._maxima) else number
