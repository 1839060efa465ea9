"""The order check at run time: each rank has its own graph, and the ranks exchange digests."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import torch.distributed as dist

from graph_trainer.core.analysis.collective_purpose import Traffic, data_parallel_groups, traffic_of
from graph_trainer.core.analysis.collectives import Collective, collectives
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

Summary = dict[str, tuple[int, str]]
"""By a digest of a group's ranks, of which there may be thousands: their number, and a digest of
what one rank issues on the group and at which places of its whole sequence."""

_PAIRS_SHOWN = 4

_ONE_BATCH = (Traffic.TENSOR_PARALLEL, Traffic.CONTEXT_PARALLEL)
"""Traffic within groups whose members have the same sequences."""


def check_order_across_ranks(joint: JointGraph, agreement: Agreement | None = None) -> None:
    """Refuse a graph unless it cannot hang. Every member of the agreement calls it.

    For each of its groups a rank sends a digest of what it issues on that group and at which
    place of its whole sequence. Where all members of every group agree, each place of the
    sequence is one collective that all its members reach after the same earlier places, so no
    ranks wait for each other in a cycle. Only where members differ are sequences exchanged.
    Costs one small exchange of objects.

    Args:
        agreement: the ranks whose graphs communicate with this one; None for all of them.

    Raises:
        VerificationError: on every rank alike, with the first differing entry of two ranks; or
            with the error of another rank.
    """
    agreement = agreement or Agreement()
    ranks = agreement.ranks
    if len(ranks) == 1:
        return
    rank = dist.get_rank()
    with agreement.errors_sent():
        mine = issued_by(joint, dist.get_world_size())
        for each in mine:
            check_member(each, rank)
        summary = summary_of(mine)
    summaries = agreement.gather(summary)
    if do_agree(summaries):
        return
    local = {_short(each.entry[1]): each.entry[1] for each in mine}
    members = {group: ranks for each in agreement.gather(local) for group, ranks in each.items()}
    summary_by_rank = dict(zip(ranks, summaries, strict=True))
    disagreeing = disagreeing_members(members, lambda rank, group: summary_by_rank[rank].get(group))
    # The sequences of all ranks would be gigabytes on thousands of ranks. Every rank knows the
    # same pairs, so only the ranks in these pairs send their sequences.
    pairs = list(dict.fromkeys(disagreeing.values()))[:_PAIRS_SHOWN]
    named = {rank for pair in pairs for rank in pair}
    sequences = dict(zip(ranks, agreement.gather(mine if rank in named else []), strict=True))
    # the first place at which two ranks differ on a group of both
    differences = []
    for pair in pairs:
        in_common: list[list[tuple[int, object, object]]] = [[], []]
        for entries, member in zip(in_common, pair, strict=True):
            for place, each in enumerate(sequences[member]):
                if set(pair) <= set(each.entry[1]):
                    entries.append((place, each.entry, each.waited_after))
        at = first_difference(*in_common)
        differences.append(
            (min(entries[at][0] for entries in in_common if at < len(entries)), *pair)
        )
    place, first, second = min(differences)
    lines = [_line(sequences[rank], place) for rank in (first, second)]
    refuse_order(str(place), first, lines[0], second, lines[1])


def check_same_collectives(first: JointGraph, later: JointGraph) -> None:
    """Refuse a graph captured for another batch shape if only this rank might issue it.

    A rank captures again without the others, so it cannot exchange anything with them. Therefore
    the collectives must be of the same kinds on the same groups in the same order. Their sizes
    must be the same too, unless all members of the group surely got a batch of this shape: that
    holds for groups that share no two ranks with a data-parallel group of the first graph, as
    in tensor parallelism, and for context parallelism's. Without FSDP nothing tells which ranks
    share a batch, so every size must stay. Waits may move: they concern this rank alone.

    Raises:
        VerificationError: with the first collective that differs.
    """
    before, after = collectives(first), collectives(later)
    sharded, traffic = bool(data_parallel_groups(before)), traffic_of(before)
    for a, b in zip(before, after, strict=False):
        if _without_sizes(a) != _without_sizes(b) or (
            a.entry() != b.entry() and not (sharded and traffic[a.node] in _ONE_BATCH)
        ):
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


def _without_sizes(c: Collective) -> object:
    return (c.kind, c.ranks, [dtype for dtype, _ in c.inputs], c.reduction)


def summary_of(sequence: Sequence) -> Summary:
    """Digest what a rank issues on each of its groups. Linear in collectives."""
    by_group: dict[Ranks, list[object]] = defaultdict(list)
    for place, each in enumerate(sequence):
        by_group[each.entry[1]].append((place, each.entry, each.waited_after))
    return {_short(ranks): (len(ranks), _sha256(each)) for ranks, each in by_group.items()}


def do_agree(summaries: list[Summary]) -> bool:
    """Tell, alike on all ranks, from all ranks' summaries, whether the members of each group agree:
    the summary of each of them contains the group, with equal digests."""
    by_group: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for groups in summaries:
        for group, summary in groups.items():
            by_group[group].append(summary)
    return all(len(of) == of[0][0] and len(set(of)) == 1 for of in by_group.values())


def _sha256(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _short(ranks: Ranks) -> str:
    return _sha256(ranks)[:32]


def _line(sequence: Sequence, place: int) -> str:
    if place >= len(sequence):
        return "nothing more"
    return f"{sequence[place].line}, {waited_text(sequence[place])}"
