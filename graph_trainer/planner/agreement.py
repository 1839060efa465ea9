"""All-reduce decisions of ranks that are captured one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.ordering.agreement import Agreement, OneRank
from graph_trainer.core.passes.plan_memory.table import MemoryTable
from graph_trainer.planner.console import OnProgress

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
            decisions.append((name, *sorted(decision.items())))
        elif isinstance(decision, MemoryTable):
            decisions.append((name, decision))
    moved = [n.name for n in joint.graph.nodes if is_collective(n) or is_wait(n)]
    return (*decisions, *moved)


def as_agreed(
    ranks: Sequence[int],
    run: Callable[[int, Agreement], tuple[T, Passes]],
    on_progress: OnProgress,
    step_of: Callable[[int], object] = lambda rank: rank,
) -> dict[int, T]:
    """Run the ranks until all run the same passes, as in training; return each rank's result.

    In training the ranks all-reduce (max) each number that decides which passes run. Here each
    rank uses the maxima that are known so far, and its own number for each later one. Where all
    ranks decide alike, they would with the maximum too; where they do not, the next maximum is
    taken from all ranks and all ranks run again.

    Args:
        ranks: the ranks to run.
        run: captures a rank and runs its passes with this agreement.
        on_progress: called before each further round.
        step_of: what decides all that `run` returns for a rank: of ranks with equal steps the first
            is run.
    """
    maxima: list[int] = []
    steps: dict[int, object] = {}
    while True:
        numbers: dict[object, list[int]] = {}
        agreed: dict[object, T] = {}
        decided: set[Passes] = set()
        for rank in ranks:
            if rank not in steps:
                steps[rank] = step_of(rank)
            if (step := steps[rank]) not in agreed:
                numbers[step] = []
                agreed[step], passes = run(rank, _AsFarAsKnown(maxima, numbers[step]))
                decided.add(passes)
        unknown = [each[len(maxima)] for each in numbers.values() if len(each) > len(maxima)]
        if len(decided) == 1 or not unknown:
            return {rank: agreed[steps[rank]] for rank in ranks}
        maxima.append(max(unknown))
        # agreed_on of plan_memory all-reduces all costs as one number
        number = f"{maxima[-1]:,} at last (bytes of a peak, or nanoseconds of a step)"
        last = number if maxima[-1] < _COSTS else "the costs of all ops at last"
        on_progress(
            "The ranks decide otherwise alone: once more, as they would agree on the "
            f"{'first number' if len(maxima) == 1 else f'first {len(maxima)} numbers'}, {last}"
        )


class _AsFarAsKnown(OneRank):
    """Takes the known maxima in order, then this rank's own numbers, and notes the latter."""

    def __init__(self, maxima: Sequence[int], numbers: list[int]) -> None:
        super().__init__()
        self._maxima, self._numbers = maxima, numbers

    def all_reduce_max(self, number: int) -> int:
        self._numbers.append(number)
        place = len(self._numbers) - 1
        return self._maxima[place] if place < len(self._maxima) else number
