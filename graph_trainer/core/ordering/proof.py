"""The order check of all ranks at once: proof that they cannot wait for each other for ever."""

# The idea: ranks hang in two ways. Two members of a group issue different collectives on it, which
# a comparison of their lists shows. Or every group agrees, and ranks wait in a cycle over several
# groups: the check runs all ranks as far as they come, and a rank that is then stuck waits in a
# cycle. One rank represents its class, and one group all parallel groups along the same axes, so
# that the work does not grow with the number of ranks.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from graph_trainer.core.analysis.collectives import Inputs
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.ordering.members import (
    REMEDY,
    check_member,
    disagreeing_members,
    first_difference,
    refuse_order,
)
from graph_trainer.core.ordering.sequences import Issued, Sequence
from graph_trainer.errors import VerificationError


@dataclass(frozen=True, slots=True)
class OrderProof:
    """What was proved, and from what."""

    representatives: Mapping[int, int]
    """By rank whose graph was read, how many ranks it represents."""
    collectives: tuple[int, int]
    """The fewest and the most collectives of one rank."""
    groups: int
    """Number of groups of more than one rank on which anything is issued."""
    unknown_ops: tuple[str, ...]
    """Ops that were taken for communication."""

    @property
    def ranks(self) -> int:
        """Number of all ranks that the proof is about."""
        return sum(self.representatives.values())

    def __str__(self) -> str:
        classes, ranks = len(self.representatives), self.ranks
        fewest, most = self.collectives
        number = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        groups = f"{self.groups:,} group{'s' if self.groups != 1 else ''}"
        lines = [
            f"Order proved: {ranks:,} ranks, {number} collectives a rank, {groups}. "
            "Every group's members issue the same in the same order, and no ranks wait for each "
            "other in a cycle."
        ]
        if self.unknown_ops:
            lines.append(
                "Taken for communication among all ranks, because these ops are unknown: "
                f"{', '.join(self.unknown_ops)}."
            )
        if classes == ranks:
            lines.append("Every rank's graph was captured.")
        else:
            shown = ", ".join(f"{r} (for {n:,})" for r, n in self.representatives.items())
            lines.append(
                f"Captured: {classes} of {ranks:,} ranks, one for each class: {shown}. Code that "
                "reads the rank's number can differ within a class, and only --all-ranks "
                "sees it."
            )
        return "\n".join(lines)


def prove_order(
    sequences: Mapping[int, Sequence], classes: RankClasses | None = None
) -> OrderProof:
    """Prove that the ranks cannot hang, or show which ranks would wait for each other.

    1. All members of every group issue the same entries on it, in the same order. A group is
       its ranks: two communicators over the same ranks count as one. Of an all-to-all the size of
       a row counts, and not its splits, which depend on data.
    2. The ranks are run to the end, each blocking in every collective until all members have
       arrived. When all ranks end, the collectives have one order that every rank keeps, so no
       placement of waits can hang, on one stream or many. NCCL requires just this of programs
       with several communicators. When they do not end, a second run, with one stream a group
       and the waits where they are, tells whether the ranks hang even so.

    Linear in the length of all sequences and the size of all groups, never in the ranks that
    are represented.

    Args:
        sequences: by rank, what it issues: of all ranks, or of one rank a class.
        classes: the classes, where a rank stands for others. The groups of a rank then stand for
            the parallel groups through the other ranks of its class, along the same mesh axes.

    Raises:
        VerificationError: with two ranks, their group and the first entry that differs; or with
            the ranks that would wait for each other in a cycle, and for what.
    """
    representatives = classes.representatives() if classes else dict.fromkeys(sequences, 1)
    assert set(representatives) == set(sequences), "one sequence for each rank that is read"
    programs = {rank: _program(rank, sequences, classes) for rank in sequences}
    groups = list(dict.fromkeys(g for program in programs.values() for g in program.on_group))
    _check_groups(programs, groups)
    if cycle := _cycle(programs, blocking=True):
        if sure := _cycle(programs, blocking=False):
            raise VerificationError(
                "the ranks would wait for each other in a cycle; running them would hang: "
                f"{'; '.join(sure)}. Let every rank issue them in the same order. {REMEDY}"
            )
        raise VerificationError(
            "the ranks' collectives on several groups cannot be put in one order; running them "
            "would hang wherever a collective holds up the next one until all its ranks have come, "
            f"as NCCL may: {'; '.join(cycle)}. Let every rank issue them in the same order. "
            f"{REMEDY}"
        )
    lengths = [len(program.steps) for program in programs.values()]
    unknown = {s.entry[0] for sequence in sequences.values() for s in sequence if not s.entry[2]}
    return OrderProof(
        representatives=representatives,
        collectives=(min(lengths, default=0), max(lengths, default=0)),
        groups=sum(classes.num_groups(g[1][0], g[0]) if classes else 1 for g in groups),
        unknown_ops=tuple(sorted(unknown)),
    )


_Group = tuple[tuple[int, ...], Ranks]
"""Mesh axes (none without classes) and the members whose graphs were read."""
_Step = tuple[_Group, int]
"""A collective of a group: how many its members issue on the group before it."""


@dataclass(frozen=True, slots=True)
class _Program:
    """What one rank issues on groups of more than one rank."""

    on_group: dict[_Group, list[Issued]]
    events: list[tuple[_Step, bool]]
    """Steps in order, each with whether it is waited for there; else it is issued."""

    @property
    def steps(self) -> list[_Step]:
        """Steps in the order in which they are issued."""
        return [step for step, is_wait in self.events if not is_wait]


_Programs = Mapping[int, _Program]


def _program(rank: int, sequences: Mapping[int, Sequence], classes: RankClasses | None) -> _Program:
    groups: dict[Ranks, _Group] = {}
    on_group: dict[_Group, list[Issued]] = defaultdict(list)
    events: list[tuple[_Step, bool]] = []
    waits: dict[int, list[_Step]] = defaultdict(list)  # by the number of collectives issued before
    for place, issued in enumerate(sequences[rank]):
        events += [(step, True) for step in waits[place]]
        ranks = issued.entry[1]
        if ranks not in groups:
            groups[ranks] = _group_of(issued, rank, sequences, classes)
        if len(ranks) > 1:  # nothing waits in a group of one
            step = (groups[ranks], len(on_group[groups[ranks]]))
            on_group[groups[ranks]].append(issued)
            events.append((step, False))
            if issued.waited_after is not None:
                waits[issued.waited_after].append(step)
    events += [(step, True) for step in waits[len(sequences[rank])]]
    return _Program(on_group, events)


def _group_of(
    issued: Issued, rank: int, sequences: Mapping[int, Sequence], classes: RankClasses | None
) -> _Group:
    ranks = issued.entry[1]
    check_member(issued, rank)
    if classes is None:
        missing = next((r for r in ranks if r not in sequences), None)
        if missing is not None:
            raise VerificationError(
                f"rank {rank} issues {issued.line}, and there is no rank {missing} among the "
                f"{len(sequences)} whose graphs were read; give the graphs of all ranks"
            )
        return (), ranks
    axes = classes.axes_of_group(ranks, rank)
    if axes is None:
        raise VerificationError(
            f"rank {rank} issues {issued.line}, a group that does not lie along axes of the mesh "
            f"({', '.join(classes.names)}), so one rank cannot speak for others; read the graph "
            "of every rank: --all-ranks"
        )
    return axes, classes.classes_in_group(rank, axes)


def _check_groups(programs: _Programs, groups: list[_Group]) -> None:
    """Refuse a group whose members do not all issue the same on it."""

    def issued_on(rank: int, group: _Group) -> list[tuple[str, Inputs, str]]:
        entries = (issued.entry for issued in programs[rank].on_group.get(group, ()))
        # without the ranks: the parallel groups of other classes have other ranks
        return [(kind, inputs, reduction) for kind, _, inputs, reduction in entries]

    def line(rank: int, group: _Group, place: int) -> str:
        issued = programs[rank].on_group.get(group, [])
        return issued[place].line if place < len(issued) else "nothing more"

    differences: list[tuple[int, int, int, _Group, int]] = []
    disagreeing = disagreeing_members({group: group[1] for group in groups}, issued_on)
    for group, (one, two) in disagreeing.items():
        place = first_difference(issued_on(one, group), issued_on(two, group))
        steps = programs[one].steps
        at = steps.index((group, place)) if (group, place) in steps else len(steps)
        differences.append((at, one, two, group, place))
    if differences:
        _, one, two, group, place = min(differences)
        where = f"{place} of ranks {one} and {two} on a group of both"
        refuse_order(where, one, line(one, group, place), two, line(two, group, place))


def _cycle(programs: _Programs, *, blocking: bool) -> list[str]:
    """Run all ranks as far as they can, where all members of a group issue the same on it.

    With `blocking` each collective is waited for at once, and not where its wait is. Returns what
    each rank of a cycle waits for, the last for the first; nothing if all ranks end, which does
    not depend on the order in which they run. Linear in the steps and waits.
    """
    events = {}
    for rank, program in programs.items():
        at_once = [(step, is_wait) for step in program.steps for is_wait in (False, True)]
        events[rank] = iter(at_once if blocking else program.events)
    arrived: dict[_Step, set[int]] = defaultdict(set)
    waiting: dict[_Step, list[int]] = defaultdict(list)
    stuck: dict[int, _Step] = {}
    ready = list(programs)
    while ready:
        rank = ready.pop()
        stuck.pop(rank, None)
        for step, is_wait in events[rank]:
            members = step[0][1]
            if not is_wait:
                arrived[step].add(rank)
                if len(arrived[step]) == len(members):
                    ready += waiting.pop(step, ())
            elif len(arrived[step]) < len(members):
                waiting[step].append(rank)
                stuck[rank] = step
                break
    # a stuck rank waits for a member that is stuck too: follow these until a rank repeats
    path: dict[int, str] = {}
    rank = min(stuck, default=-1)
    while stuck and rank not in path:
        group, place = stuck[rank]
        other = next(r for r in group[1] if r not in arrived[group, place])
        line = programs[rank].on_group[group][place].line
        path[rank] = f"rank {rank} waits until rank {other} comes to {line}"
        rank = other
    return list(path.values())[list(path).index(rank) :] if stuck else []
