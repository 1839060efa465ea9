"""The order check of all ranks at once: a proof that they cannot wait for each other forever."""

# The idea: ranks hang in two ways. Two members of a group issue different collectives on it, which
# a comparison of their lists shows. Or every group agrees, and ranks wait in a cycle over several
# groups: the check runs all ranks as far as they can go, and a rank that is stuck then waits in a
# cycle. One rank represents its class, and one group all parallel groups along the same axes, so
# that the work does not grow with the number of ranks.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
    """The result of a proof, and the graphs that it read."""

    representatives: Mapping[int, int]
    """The ranks whose graphs were read, with the number of ranks that each represents."""
    collectives: tuple[int, int]
    """The fewest and the most collectives of one rank."""
    groups: int
    """Number of groups of more than one rank on which anything is issued."""
    unknown_ops: tuple[str, ...]
    """Ops that counted as communication."""

    @property
    def ranks(self) -> int:
        """Number of ranks that the proof covers."""
        return sum(self.representatives.values())

    def __str__(self) -> str:
        fewest, most = self.collectives
        number = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        groups = "1 group" if self.groups == 1 else f"{self.groups:,} groups"
        lines = [
            f"Order proved: {self.ranks:,} ranks, {number} collectives a rank, {groups}. "
            "Every group's members issue the same in the same order, and no ranks wait for each "
            "other in a cycle."
        ]
        if self.unknown_ops:
            lines.append(
                "Taken for communication among all ranks, because these ops are unknown: "
                f"{', '.join(self.unknown_ops)}."
            )
        if len(self.representatives) == self.ranks:
            lines.append("Every rank's graph was captured.")
        else:
            shown = ", ".join(f"{r} (for {n:,})" for r, n in self.representatives.items())
            lines.append(
                f"Captured: {len(self.representatives)} of {self.ranks:,} ranks, one for each "
                f"class: {shown}. Code that reads the rank's number can differ within a class, and "
                "only --all-ranks sees it."
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
       with several communicators. If they do not end, a second run, with one stream a group and
       the waits where they are in the graphs, shows whether the ranks hang in any case.

    Linear in the length of all sequences and the size of all groups, never in the ranks that
    are represented.

    Args:
        sequences: by rank, what it issues; for all ranks, or for one rank of each class.
        classes: the classes, if a rank represents others. The groups of a rank then represent the
            parallel groups through the other ranks of its class, along the same mesh axes.

    Raises:
        VerificationError: with two ranks, their group and the first entry that differs; or with
            the ranks that would wait for each other in a cycle, and for what.
    """
    representatives = classes.representatives() if classes else dict.fromkeys(sequences, 1)
    assert set(representatives) == set(sequences), "one sequence for each rank that is read"
    programs = {rank: _program(rank, sequences, classes) for rank in sequences}
    groups = list(dict.fromkeys(g for program in programs.values() for g in program.on_group))
    _check_groups(programs, groups)
    cycle = _cycle(programs, blocking=True)
    if cycle:
        certain_cycle = _cycle(programs, blocking=False)
        if certain_cycle:
            raise VerificationError(
                "the ranks would wait for each other in a cycle; running them would hang: "
                f"{'; '.join(certain_cycle)}. Let every rank issue them in the same order. {REMEDY}"
            )
        raise VerificationError(
            "the ranks' collectives on several groups cannot be put in one order. Running them "
            "would hang where a collective blocks the next one until all its ranks have come, as "
            f"NCCL may: {'; '.join(cycle)}. Let every rank issue them in the same order. {REMEDY}"
        )
    lengths = [len(program.steps) for program in programs.values()]
    unknown_ops: set[str] = set()
    for sequence in sequences.values():
        # an unknown op has no inputs, as `issued_by` lists it
        unknown_ops.update(issued.entry[0] for issued in sequence if not issued.entry[2])
    num_groups = len(groups)
    if classes is not None:
        num_groups = sum(classes.num_groups(group.members[0], group.axes) for group in groups)
    return OrderProof(
        representatives=representatives,
        collectives=(min(lengths, default=0), max(lengths, default=0)),
        groups=num_groups,
        unknown_ops=tuple(sorted(unknown_ops)),
    )


class _Group(NamedTuple):
    """A group, or all parallel groups along the same mesh axes."""

    axes: tuple[int, ...]
    """Empty without classes."""
    members: Ranks
    """The members whose graphs were read."""


class _Step(NamedTuple):
    """A collective of a group."""

    group: _Group
    place: int
    """How many collectives its members issue on the group before it."""


class _Event(NamedTuple):
    """A rank issues a collective, or waits for it."""

    step: _Step
    is_wait: bool


@dataclass(frozen=True, slots=True)
class _Program:
    """What one rank issues on groups of more than one rank."""

    on_group: dict[_Group, list[Issued]]
    events: list[_Event]
    """In the order in which the rank runs them."""

    @property
    def steps(self) -> list[_Step]:
        """Steps in the order in which they are issued."""
        return [event.step for event in self.events if not event.is_wait]


_Programs = Mapping[int, _Program]


def _program(rank: int, sequences: Mapping[int, Sequence], classes: RankClasses | None) -> _Program:
    groups: dict[Ranks, _Group] = {}
    on_group: dict[_Group, list[Issued]] = defaultdict(list)
    events: list[_Event] = []
    waits: dict[int, list[_Step]] = defaultdict(list)  # by the number of collectives issued before
    for place, issued in enumerate(sequences[rank]):
        events += [_Event(step, is_wait=True) for step in waits[place]]
        if issued.ranks not in groups:
            groups[issued.ranks] = _group_of(issued, rank, sequences, classes)
        if len(issued.ranks) == 1:
            continue  # a rank never waits in a group of one
        group = groups[issued.ranks]
        step = _Step(group, len(on_group[group]))
        on_group[group].append(issued)
        events.append(_Event(step, is_wait=False))
        if issued.waited_after is not None:
            waits[issued.waited_after].append(step)
    events += [_Event(step, is_wait=True) for step in waits[len(sequences[rank])]]
    return _Program(on_group, events)


def _group_of(
    issued: Issued, rank: int, sequences: Mapping[int, Sequence], classes: RankClasses | None
) -> _Group:
    check_member(issued, rank)
    if classes is None:
        missing = next((r for r in issued.ranks if r not in sequences), None)
        if missing is not None:
            raise VerificationError(
                f"rank {rank} issues {issued.line}, and there is no rank {missing} among the "
                f"{len(sequences)} whose graphs were read: pass the graphs of all ranks"
            )
        return _Group((), issued.ranks)
    axes = classes.axes_of_group(issued.ranks, rank)
    if axes is None:
        raise VerificationError(
            f"rank {rank} issues {issued.line}, a group that does not lie along axes of the mesh "
            f"({', '.join(classes.names)}), so one rank cannot represent others: read the graph "
            "of every rank with --all-ranks"
        )
    return _Group(axes, classes.classes_in_group(rank, axes))


def _check_groups(programs: _Programs, groups: list[_Group]) -> None:
    """Refuse a group whose members do not all issue the same on it."""

    def issued_on(rank: int, group: _Group) -> list[tuple[str, Inputs, str]]:
        entries = (issued.entry for issued in programs[rank].on_group.get(group, ()))
        # without the ranks: the parallel groups of other classes have other ranks
        return [(kind, inputs, reduction) for kind, _, inputs, reduction in entries]

    def line(rank: int, group: _Group, place: int) -> str:
        issued = programs[rank].on_group.get(group, [])
        return issued[place].line if place < len(issued) else "nothing more"

    # the earliest in the sequence of its first rank comes first
    differences: list[tuple[int, int, int, _Step]] = []
    disagreeing = disagreeing_members({group: group.members for group in groups}, issued_on)
    for group, (one, two) in disagreeing.items():
        place = first_difference(issued_on(one, group), issued_on(two, group))
        step = _Step(group, place)
        steps = programs[one].steps
        position = steps.index(step) if step in steps else len(steps)
        differences.append((position, one, two, step))
    if differences:
        _, one, two, (group, place) = min(differences)
        where = f"{place} of ranks {one} and {two} on a group of both"
        refuse_order(where, one, line(one, group, place), two, line(two, group, place))


def _cycle(programs: _Programs, *, blocking: bool) -> list[str]:
    """Run all ranks as far as they can go, where all members of a group issue the same on it.

    Args:
        blocking: whether a rank waits for each collective at once, and not where its wait is.

    Returns:
        What each rank of a cycle waits for, the last for the first; nothing if all ranks end. This
        does not depend on the order in which ranks run. Linear in the steps and waits.
    """
    events = {}
    for rank, program in programs.items():
        run = program.events
        if blocking:
            run = []
            for step in program.steps:
                run += [_Event(step, is_wait=False), _Event(step, is_wait=True)]
        events[rank] = iter(run)
    arrived: dict[_Step, set[int]] = defaultdict(set)
    waiting: dict[_Step, list[int]] = defaultdict(list)
    stuck: dict[int, _Step] = {}
    ready = list(programs)
    while ready:
        rank = ready.pop()
        stuck.pop(rank, None)
        for step, is_wait in events[rank]:
            num_members = len(step.group.members)
            if not is_wait:
                arrived[step].add(rank)
                if len(arrived[step]) == num_members:
                    ready += waiting.pop(step, ())
            elif len(arrived[step]) < num_members:
                waiting[step].append(rank)
                stuck[rank] = step
                break
    if not stuck:
        return []
    # a stuck rank waits for a member that is stuck too: follow these until a rank repeats
    path: dict[int, str] = {}
    rank = min(stuck)
    while rank not in path:
        step = stuck[rank]
        other = next(r for r in step.group.members if r not in arrived[step])
        line = programs[rank].on_group[step.group][step.place].line
        path[rank] = f"rank {rank} waits until rank {other} comes to {line}"
        rank = other
    first = list(path).index(rank)
    return list(path.values())[first:]
