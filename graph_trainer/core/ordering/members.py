"""What the members of a process group must agree on: the check that both front ends share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.ordering.sequences import Issued
from graph_trainer.errors import VerificationError

REMEDY = (
    "Look for code in the model or the loss that depends on the rank, and for different configs "
    "or versions on the ranks."
)

G = TypeVar("G")


def check_member(issued: Issued, rank: int) -> None:
    """Refuse, with a VerificationError, a collective of a rank on a group that it is not in."""
    if rank not in issued.ranks:
        raise VerificationError(
            f"rank {rank} issues {issued.line} and is not a member of that group: let each rank "
            "communicate in its own groups only"
        )


def disagreeing_members(
    members: Mapping[G, Ranks], issued_on: Callable[[int, G], object]
) -> dict[G, tuple[int, int]]:
    """Find the groups whose members do not all issue the same. Linear in the sizes of the groups.

    Args:
        members: by group, the ranks to compare.
        issued_on: returns what a rank issues on a group, or a digest of that.

    Returns:
        By group, the first member and the first other member that differs from it.
    """
    pairs = {}
    for group, (first, *others) in members.items():
        expected = issued_on(first, group)
        other = next((rank for rank in others if issued_on(rank, group) != expected), None)
        if other is not None:
            pairs[group] = (first, other)
    return pairs


def first_difference(one: Sequence[object], two: Sequence[object]) -> int:
    """Return the first place at which two unequal lists differ."""
    for place, (entry, other) in enumerate(itertools.zip_longest(one, two)):
        if entry != other:
            return place
    raise ValueError("the lists are equal")


def refuse_order(place: str, one: int, line: str, two: int, other_line: str) -> NoReturn:
    """Raise a VerificationError that shows what two ranks issue at the first difference."""
    raise VerificationError(
        "the ranks' graphs do not issue the same collectives in the same order; running them "
        f"would hang. First difference, collective {place}: rank {one} issues {line}; rank {two} "
        f"issues {other_line}. {REMEDY}"
    )
