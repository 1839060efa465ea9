"""The order check at run time: each rank has its own graph, and the ranks exchange digests."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist

from graph_trainer.core.analysis.collective_purpose import Traffic, data_parallel_groups, traffic_of
from graph_trainer.core.analysis.collectives import Collective, Entry, collectives
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.ordering.members import (
    check_member,
    disagreeing_members,
    first_difference,
    refuse_order,
)
from graph_trainer.core.ordering.sequences import Sequence, issued_by, waited_text
from graph_trainer.errors import VerificationError


class GroupSummary(NamedTuple):
    """What one rank issues on a group."""

    size: int
    """The number of ranks of the group."""
    digest: str
    """Of what the rank issues on the group, and at which places of its sequence."""


Summary = dict[str, GroupSummary]
"""By a digest of a group's ranks, of which there may be thousands."""

_PAIRS_SHOWN = 4

_ONE_BATCH = (Traffic.TENSOR_PARALLEL, Traffic.CONTEXT_PARALLEL)
"""Traffic within groups whose members have the same sequences."""


def check_order_across_ranks(joint: JointGraph, agreement: Agreement | None = None) -> None:
    """Refuse a graph unless it cannot hang. Every member of the agreement calls it.

    For each of its groups a rank sends a digest of what it issues on that group and at which
    places of its sequence. If all members of every group agree, each place of the sequence is one
    collective that all its members reach after the same earlier places, so no ranks wait for each
    other in a cycle. Sequences are exchanged only if members differ. Costs one small exchange of
    objects.

    Args:
        agreement: the ranks whose graphs communicate with this one; None for all ranks.

    Raises:
        VerificationError: on every rank, with the first differing entry of two ranks; or with the
            error of another rank.
    """
    agreement = agreement or Agreement()
    ranks = agreement.ranks
    if len(ranks) == 1:
        return
    rank = dist.get_rank()
    with agreement.errors_sent():
        mine = issued_by(joint, dist.get_world_size())
        for issued in mine:
            check_member(issued, rank)
        summary = summary_of(mine)
    summaries = agreement.gather(summary)
    if do_agree(summaries):
        return
    groups = {_short(issued.ranks): issued.ranks for issued in mine}
    members: dict[str, Ranks] = {}
    for groups_of_rank in agreement.gather(groups):
        members.update(groups_of_rank)
    summary_by_rank = dict(zip(ranks, summaries, strict=True))
    disagreeing = disagreeing_members(members, lambda rank, group: summary_by_rank[rank].get(group))
    # The sequences of all ranks would be gigabytes on thousands of ranks. Every rank knows the
    # same pairs, so only the ranks in these pairs send their sequences.
    pairs = list(dict.fromkeys(disagreeing.values()))[:_PAIRS_SHOWN]
    shown = {rank for pair in pairs for rank in pair}
    sequences = dict(zip(ranks, agreement.gather(mine if rank in shown else []), strict=True))
    places = {pair: _first_differing_place(sequences, pair) for pair in pairs}
    place, (one, two) = min((place, pair) for pair, place in places.items())
    refuse_order(str(place), one, _line(sequences[one], place), two, _line(sequences[two], place))


def _first_differing_place(sequences: Mapping[int, Sequence], pair: tuple[int, int]) -> int:
    """Return the first place at which two ranks differ on a group of both."""
    one, two = (_on_common_groups(sequences[rank], pair) for rank in pair)
    index = first_difference(one, two)
    return min(entries[index][0] for entries in (one, two) if index < len(entries))


def _on_common_groups(
    sequence: Sequence, pair: tuple[int, int]
) -> list[tuple[int, Entry, int | None]]:
    """List what a rank issues on groups of both ranks, with its places in the sequence."""
    return [
        (place, issued.entry, issued.waited_after)
        for place, issued in enumerate(sequence)
        if set(pair) <= set(issued.ranks)
    ]


def check_same_collectives(first: JointGraph, later: JointGraph) -> None:
    """Refuse a graph captured for another batch shape if only this rank might issue it.

    A rank captures again without the others, so it cannot exchange anything with them. Therefore
    the collectives must be of the same kinds on the same groups in the same order. Their sizes
    must be the same too, unless all members of the group certainly have a batch of this shape:
    groups of tensor parallelism, which share no two ranks with a data-parallel group of the first
    graph, and groups of context parallelism. Without FSDP the graph does not show which ranks share
    a batch, so every size must stay. Waits may move: they concern this rank alone.

    Raises:
        VerificationError: with the first collective that differs.
    """
    before = collectives(first)
    after = collectives(later)
    traffic = traffic_of(before)
    is_sharded = bool(data_parallel_groups(before))
    for expected, actual in zip(before, after, strict=False):
        share_batch = is_sharded and traffic[expected.node] in _ONE_BATCH
        same_sizes = expected.entry() == actual.entry()
        if _without_sizes(expected) != _without_sizes(actual) or not (same_sizes or share_batch):
            raise VerificationError(
                "the graph of this batch's shape issues other collectives than the first graph: "
                f"{actual.describe()} instead of {expected.describe()}. Other ranks may have a "
                "batch of another shape, so all batches of a run must lead to the same "
                "communication: pad them to one shape"
            )
    if len(before) != len(after):
        raise VerificationError(
            f"the graph of this batch's shape issues {len(after)} collectives and the first "
            f"graph {len(before)}; all batches of a run must lead to the same communication: pad "
            "them to one shape"
        )


def _without_sizes(c: Collective) -> object:
    return (c.kind, c.ranks, [dtype for dtype, _ in c.inputs], c.reduction)


def summary_of(sequence: Sequence) -> Summary:
    """Digest what a rank issues on each of its groups. Linear in collectives."""
    by_group: dict[Ranks, list[object]] = defaultdict(list)
    for place, issued in enumerate(sequence):
        by_group[issued.ranks].append((place, issued.entry, issued.waited_after))
    return {
        _short(ranks): GroupSummary(len(ranks), _sha256(entries))
        for ranks, entries in by_group.items()
    }


def do_agree(summaries: list[Summary]) -> bool:
    """Return whether the members of each group agree, the same on every rank.

    They agree if the summaries of all of them contain the group, with equal digests.
    """
    by_group: dict[str, list[GroupSummary]] = defaultdict(list)
    for summary in summaries:
        for group, summary_of_group in summary.items():
            by_group[group].append(summary_of_group)
    for members in by_group.values():
        if len(members) != members[0].size or len(set(members)) != 1:
            return False
    return True


def _sha256(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _short(ranks: Ranks) -> str:
    return _sha256(ranks)[:32]


def _line(sequence: Sequence, place: int) -> str:
    if place >= len(sequence):
        return "nothing more"
    return f"{sequence[place].line}, {waited_text(sequence[place])}"
