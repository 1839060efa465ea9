"""Before the first collective: do all ranks issue the same ones in the same order?"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from graph_trainer.core.analysis.collective_purpose import data_parallel_groups
from graph_trainer.core.analysis.collectives import Collective, collectives
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.ordering.all_to_all import MODULUS, balance, first_mismatch
from graph_trainer.core.ordering.proof import REMEDY, check_member, refuse_splits
from graph_trainer.core.ordering.sequences import Issued, Ranks, Sequence, issued_by
from graph_trainer.errors import VerificationError

Digests = dict[Ranks, str]
Short = dict[str, tuple[int, str, int]]
"""By a digest of a group's ranks: how many they are, the digest of what is issued, and the sum
of what `balance` says of its all-to-alls."""

_PAIRS_SHOWN = 4
_ERROR_SHOWN = 4000  # every rank receives as much from each

T = TypeVar("T")


def check_order_across_ranks(joint: JointGraph | Exception) -> None:
    """Refuse a graph unless it cannot hang.

    Every rank hands out, for each group it is in, a digest of what it issues on that group
    and at which place of its whole sequence. Where all members of every group agree, each
    place of the sequence is one collective that all its members reach after the same earlier
    places, so none can wait for another in a circle. Only where some differ are the
    sequences themselves exchanged. Costs one small exchange of objects on the default group.

    Arguments:
        joint: this rank's graph; or the error because of which there is none, which is raised
            here, when the other ranks have heard of it and need not wait.

    Raises:
        VerificationError: on every rank alike, with the first differing entry of two ranks; or
            with the error of another rank.
    """
    if _alone() and not isinstance(joint, Exception):
        return
    mine: Sequence | Exception
    try:
        mine = joint if isinstance(joint, Exception) else _of_members(joint)
    except Exception as error:  # whatever it is, the others wait to hear of it
        mine = error
    outcome = mine if isinstance(mine, Exception) else handed_out(mine, dist.get_rank())
    everyone = _exchange(outcome, "capture the step")
    assert not isinstance(mine, Exception)  # it would have been raised
    if all_agree(everyone):
        return
    digests: list[Digests] = [{}] * dist.get_world_size()
    dist.all_gather_object(digests, digests_of(mine))
    pairs = disagreeing_pairs(digests)
    if not pairs:
        _refuse_group(unbalanced(everyone)[0], mine)
    # Whole sequences of all ranks would be gigabytes on thousands of them. Every rank knows
    # the same pairs, so only those ranks need to say what they issue.
    pairs = pairs[:_PAIRS_SHOWN]
    named = {rank for pair in pairs for rank in pair}
    sequences: list[Sequence] = [[]] * dist.get_world_size()
    dist.all_gather_object(sequences, mine if dist.get_rank() in named else [])
    raise VerificationError(_refusal(sequences, pairs))


def _of_members(joint: JointGraph) -> Sequence:
    sequence = issued_by(joint, dist.get_world_size())
    for each in sequence:
        check_member(each, dist.get_rank())
    return sequence


def check_all_compiled(error: Exception | None) -> None:
    """Let no rank run a step that another one could not compile: it would wait for it.

    Arguments:
        error: why this rank could not, raised here when the others have heard of it.

    Raises:
        VerificationError: with the error of another rank.
    """
    _exchange(error, "compile the step")


class LargestOfAllRanks:
    """A number of this rank becomes the largest of all ranks; one small exchange each time.

    Every rank calls it equally often before `check_order_across_ranks`; one that fails before
    it has done so may go straight there with its error.

    Attributes:
        heard_of_failure: whether a call has raised because another rank failed. All ranks have
            heard of it then, and none waits for this one's error.
    """

    def __init__(self) -> None:
        self.heard_of_failure = False

    def __call__(self, mine: int) -> int:
        """Raises VerificationError with the error of another rank that had no number."""
        try:
            return max(_exchange(mine, "capture the step"))
        except VerificationError:
            self.heard_of_failure = True
            raise


def _exchange(mine: T | Exception, what: str) -> list[T]:
    """What every rank has, by rank; an error on all of them where one has an error."""
    if _alone():
        if isinstance(mine, Exception):
            raise mine
        return [mine]
    text = f"{type(mine).__name__}: {mine}"[:_ERROR_SHOWN] if isinstance(mine, Exception) else ""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (text, None if text else mine))
    if isinstance(mine, Exception):
        raise mine
    raise_first_failure([text for text, _ in everyone], what)
    values = [value for _, value in everyone]
    _refuse_unlike(values)
    return values


def _refuse_unlike(values: list[Any]) -> None:
    """Where one rank hands out its order and another one a number, for example, one of them is
    agreeing on what a pass does while the other one is done with its passes."""
    kinds = [type(value).__name__ for value in values]
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise VerificationError(
            f"the ranks' passes do not do the same: rank 0 hands out its {kinds[0]} and rank "
            f"{other} its {kinds[other]}, so one of them has something to agree on that the other "
            f"one has not. {REMEDY}"
        )


def _alone() -> bool:
    """Whether there is no one to ask: the members of a fake group say nothing."""
    return not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake"


def raise_first_failure(texts: list[str], what: str) -> None:
    """Raise what a rank says went wrong, if any does. Arguments: by rank, "" for nothing."""
    for rank, text in enumerate(texts):
        if text:
            raise VerificationError(f"rank {rank} could not {what}: {text}")


def check_sequences(sequences: list[Sequence]) -> None:
    """What `check_order_across_ranks` checks, for sequences that are all at hand.

    Arguments:
        sequences: by global rank.

    Raises:
        VerificationError: with the first differing entry of two ranks.
    """
    pairs = disagreeing_pairs([digests_of(sequence) for sequence in sequences])
    if pairs:
        raise VerificationError(_refusal(sequences, pairs[:_PAIRS_SHOWN]))
    for sequence in sequences:
        for place, each in enumerate(sequence):
            if each.splits is not None:
                _check_fit({rank: sequences[rank][place] for rank in each.entry[1]})


def check_same_collectives(first: JointGraph, later: JointGraph) -> None:
    """Refuse a graph captured for another batch shape if only this rank might issue it.

    A rank that captures again does so alone, so it may not talk to the others. It need not:
    the collectives must be of the same kinds on the same groups in the same order, and of the
    same sizes too, unless all members of the group surely got a batch of this shape. Those
    are groups that share no two ranks with a data-parallel group of the first graph: tensor
    parallelism's, say. Without FSDP no one knows which ranks
    share a batch, so every size must stay. Where waits stand concerns this rank alone.

    Raises:
        VerificationError: with the first collective that differs.
    """
    before, after = collectives(first), collectives(later)
    data_parallel = data_parallel_groups(before)

    def may_resize(c: Collective) -> bool:
        if c.role is not None or not data_parallel:
            return False
        return all(len(set(c.ranks) & set(group)) < 2 for group in data_parallel)

    for a, b in zip(before, after, strict=False):
        if _shapeless(a) != _shapeless(b) or (_sized(a) != _sized(b) and not may_resize(a)):
            raise VerificationError(
                "the graph of this batch's shape issues other collectives than the first graph: "
                f"{b.describe()} instead of {a.describe()}; other ranks may have a batch of "
                "another shape, so batches that change what is communicated cannot be mixed in "
                "one run: pad them to one shape"
            )
    if len(before) != len(after):
        raise VerificationError(
            f"the graph of this batch's shape issues {len(after)} collectives and the first "
            f"graph {len(before)}; batches that change what is communicated cannot be mixed"
        )


def _shapeless(c: Collective) -> object:
    return (c.kind, c.ranks, [dtype for dtype, _ in c.inputs], c.reduction)


def _sized(c: Collective) -> object:
    return (c.entry(), c.splits)


def digests_of(sequence: Sequence) -> Digests:
    """For each group that one rank communicates in, a digest of what it issues there and at
    which place of its whole sequence. Linear in collectives."""
    by_group: dict[Ranks, list[object]] = defaultdict(list)
    for place, each in enumerate(sequence):
        by_group[each.entry[1]].append((place, each.entry, each.waited_after))
    return {
        ranks: hashlib.sha256(repr(entries).encode()).hexdigest()
        for ranks, entries in by_group.items()
    }


def handed_out(sequence: Sequence, rank: int) -> Short:
    """What a rank says of its sequence: neither the groups' ranks, of which there may be
    thousands for each group, nor what it sends whom."""
    sums: dict[Ranks, int] = defaultdict(int)
    for (ranks, _), number in _balances(sequence, rank).items():
        sums[ranks] += number
    return {
        _short(ranks): (len(ranks), digest, sums[ranks] % MODULUS)
        for ranks, digest in digests_of(sequence).items()
    }


def _short(ranks: Ranks) -> str:
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:32]


def _balances(sequence: Sequence, rank: int) -> dict[tuple[Ranks, int], int]:
    """Of a rank's all-to-alls, by group and place."""
    return {
        (each.entry[1], place): balance(each.splits, each.entry[1].index(rank), place)
        for place, each in enumerate(sequence)
        if each.splits is not None
    }


def all_agree(everyone: list[Short]) -> bool:
    """Whether every group is known to all its members, with one digest, and all of them expect
    of its all-to-alls what the others send. By global rank."""
    said: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for groups in everyone:
        for group, (members, digest, _) in groups.items():
            said[group].append((members, digest))
    alike = all(len(set(es)) == 1 and len(es) == es[0][0] for es in said.values())
    return alike and not unbalanced(everyone)


def unbalanced(everyone: list[Short]) -> list[str]:
    """The groups whose members do not fit in an all-to-all, in an order that all ranks know."""
    sums: dict[str, int] = defaultdict(int)
    for groups in everyone:
        for group, (_, _, of_rank) in groups.items():
            sums[group] += of_rank
    return [group for group, total in sums.items() if total % MODULUS]


def _refuse_group(group: str, mine: Sequence) -> NoReturn:
    """Name two ranks that do not fit in an all-to-all of this group. All ranks call it, the
    members alone say something: first which of the all-to-alls it is, then its sizes."""
    own = {
        place: number
        for (ranks, place), number in _balances(mine, dist.get_rank()).items()
        if _short(ranks) == group
    }
    balances: list[dict[int, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(balances, own)
    sums: dict[int, int] = defaultdict(int)
    for of_rank in balances:
        for place, number in of_rank.items():
            sums[place] += number
    place = next(place for place in sorted(sums) if sums[place] % MODULUS)
    everyone: list[Issued | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine[place] if place in own else None)
    _check_fit({r: each for r, each in enumerate(everyone) if each is not None})
    raise AssertionError("sums differ and no sizes do")


def _check_fit(issued: Mapping[int, Issued]) -> None:
    """Check one all-to-all of all its members."""
    splits = {rank: each.splits for rank, each in issued.items() if each.splits is not None}
    found = first_mismatch(splits, next(iter(issued.values())).entry[1])
    if found:
        one, two = found
        refuse_splits(one, issued[one].line, two, issued[two].line)


def disagreeing_pairs(digests: list[Digests]) -> list[tuple[int, int]]:
    """For every group whose members do not all agree, two that differ. Linear in the sizes of
    the groups.

    Arguments:
        digests: by global rank.
    """
    pairs: dict[tuple[int, int], None] = {}
    for ranks in dict.fromkeys(ranks for groups in digests for ranks in groups):
        first = ranks[0]
        expected = digests[first].get(ranks)
        other = next((r for r in ranks if digests[r].get(ranks) != expected), None)
        if other is not None:
            pairs[(first, other)] = None
    return list(pairs)


def _refusal(sequences: list[Sequence], pairs: list[tuple[int, int]]) -> str:
    place, a, b = min((_first_difference(sequences[a], sequences[b], a, b), a, b) for a, b in pairs)
    detail = (
        f"rank {a} issues {_at(sequences[a], place)}; rank {b} issues {_at(sequences[b], place)}"
    )
    return (
        "the ranks' graphs do not issue the same collectives in the same order; running them "
        f"would hang. First difference, collective {place}: {detail}. {REMEDY}"
    )


def _first_difference(one: Sequence, two: Sequence, a: int, b: int) -> int:
    """The first place where either of two ranks issues on a group of both something else than
    the other."""
    for place, (left, right) in enumerate(zip_longest(one, two)):
        entries = [each.entry for each in (left, right) if each is not None]
        together = any({a, b} <= set(ranks) for _, ranks, *_ in entries)
        if together and _agreed(left) != _agreed(right):
            return place
    raise AssertionError("digests of the same group differ and its entries do not")


def _agreed(each: Issued | None) -> object:
    return each and (each.entry, each.waited_after)


def _at(sequence: Sequence, place: int) -> str:
    if place >= len(sequence):
        return "nothing more"
    after = sequence[place].waited_after
    waited = "never waited for" if after is None else f"waited for when {after} are issued"
    return f"{sequence[place].line}, {waited}"
