"""Ranks that decide together in training, and are captured one after the other here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.passes.context import AllReduceMax, fingerprint

T = TypeVar("T")
Passes = tuple[object, ...]
"""Those that ran and were not rolled back, and what they decided by simulation."""


def decided_by(joint: JointGraph) -> Passes:
    """What a rank has decided that all must decide alike."""
    found: list[object] = [*joint.history]
    for name, decision in joint.decisions.items():
        if isinstance(decision, Mapping):  # MiB of a bucket by process group
            found.append((name, *sorted(decision.items())))
    moved = [n.name for n in joint.graph.nodes if is_collective(n) or is_wait(n)]
    return (*found, fingerprint(moved))


def as_agreed(
    ranks: Sequence[int],
    run: Callable[[int, AllReduceMax], tuple[T, Passes]],
    on_progress: Callable[[str], None],
) -> dict[int, T]:
    """What comes of each rank when all run the same passes, as they do in training.

    Training makes of a number that decides which passes run the largest of all ranks. Here each
    rank decides for itself, behind the numbers that are agreed already: where all decide alike,
    so would their largest number; where they do not, all are run again behind one number more.

    Arguments:
        run: captures a rank and runs its passes, with this to agree on numbers.
        on_progress: called before each further round.
    """
    agreed: list[int] = []
    while True:
        said: dict[int, list[int]] = {rank: [] for rank in ranks}
        found: dict[int, T] = {}
        decided: set[Passes] = set()
        for rank in ranks:
            found[rank], passes = run(rank, _agree(agreed, said[rank]))
            decided.add(passes)
        open_ = [numbers[len(agreed)] for numbers in said.values() if len(numbers) > len(agreed)]
        if len(decided) == 1 or not open_:
            return found
        agreed.append(max(open_))
        on_progress(
            "The ranks decide otherwise alone: once more, as they would agree on the "
            f"{'first number' if len(agreed) == 1 else f'first {len(agreed)} numbers'}, "
            f"{agreed[-1]:,} at last (bytes of a peak, or nanoseconds of a step)"
        )


def _agree(agreed: Sequence[int], said: list[int]) -> AllReduceMax:
    def agree(mine: int) -> int:
        said.append(mine)
        return agreed[len(said) - 1] if len(said) <= len(agreed) else mine

    return agree
