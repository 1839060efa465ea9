"""Proof that ranks cannot wait for each other for ever, from what their graphs issue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn

from graph_trainer.core.analysis.collectives import Inputs
from graph_trainer.core.analysis.rank_classes import RankClasses, Ranks
from graph_trainer.core.ordering.all_to_all import first_mismatch
from graph_trainer.core.ordering.sequences import Issued, Sequence
from graph_trainer.errors import VerificationError


@dataclass(frozen=True, slots=True)
class OrderProof:
    """What was proved, and from what."""

    representatives: Mapping[int, int]
    """By rank whose graph was read, how many ranks it stands for."""
    collectives: tuple[int, int]
    """The fewest and the most of one rank."""
    groups: int
    """Of more than one rank, on which anything is issued."""
    unknown_ops: tuple[str, ...]
    """Those that were taken for communication."""

    @property
    def ranks(self) -> int:
        """All ranks that the proof is about."""
        return sum(self.representatives.values())

    def __str__(self) -> str:
        classes, ranks = len(self.representatives), self.ranks
        fewest, most = self.collectives
        number = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        groups = f"{self.groups:,} group{'s' if self.groups != 1 else ''}"
        lines = [
            f"Order proved: {ranks:,} ranks, {number} collectives a rank, {groups}. "
            "Every group's members issue the same in the same order, and no ranks wait for each "
            "other in a circle."
        ]
        if self.unknown_ops:
            lines.append(
                "Taken for communication among all ranks, because nobody here knows them: "
                f"{', '.join(self.unknown_ops)}."
            )
        if classes == ranks:
            lines.append("Every rank's graph was captured.")
        else:
            shown = ", ".join(f"{r} (for {n:,})" for r, n in self.representatives.items())
            lines.append(
                f"Captured: {classes} of {ranks:,} ranks, one for each class: {shown}. Code that "
                "asks for the rank's own number can differ within a class, and only --all-ranks "
                "sees it."
            )
        return "\n".join(lines)


def prove_order(
    sequences: Mapping[int, Sequence], classes: RankClasses | None = None
) -> OrderProof:
    """Show that the ranks cannot hang, or say who would wait for whom.

    1. All members of every group issue the same entries on it, in the same order. A group is
       its ranks: two communicators over the same ranks count as one. In an all-to-all, each
       expects of the others what they send it.
    2. The ranks are played to the end, each one blocking in every collective until all members
       have come. When that ends, all collectives stand in one order that every rank keeps to,
       so no placement of waits can hang, one stream or many. NCCL asks for just this of
       programs with several communicators. When it does not end, a second play, with a stream
       a group and waits where they stand, tells whether it hangs even so.

    Linear in the length of all sequences and the size of all groups, never in the ranks that
    are represented.

    Arguments:
        sequences: by rank, what it issues: of all ranks, or of one a class.
        classes: the classes, where a rank stands for others. In their place, its groups are
            the parallel groups through them, along the same axes of the mesh.

    Raises:
        VerificationError: with two ranks, their group and the first entry that differs; or with
            the ranks that would wait for each other in a circle, and for what.
    """
    programs = _programs(sequences, classes)
    _check_groups(programs)
    _check_splits(programs, classes)
    _check_circles(programs)
    lengths = [len(steps) for steps in programs.steps.values()]
    unknown = {s.entry[0] for sequence in sequences.values() for s in sequence if not s.entry[2]}
    return OrderProof(
        representatives=classes.representatives() if classes else dict.fromkeys(sequences, 1),
        collectives=(min(lengths, default=0), max(lengths, default=0)),
        groups=programs.num_groups,
        unknown_ops=tuple(sorted(unknown)),
    )


_Group = tuple[tuple[int, ...], Ranks]
"""Axes (none where every rank speaks for itself) and those members whose graphs were read."""


@dataclass(frozen=True, slots=True)
class _Step:
    group: _Group
    place: int
    """How many this rank has issued on the group before."""
    issued: Issued


@dataclass(frozen=True, slots=True)
class _Programs:
    """What is issued on groups of more than one rank, by rank."""

    steps: dict[int, list[_Step]]
    waits: dict[int, list[list[int]]]
    """By rank and by number of steps done: the steps that must be over before the next."""
    on_group: dict[int, dict[_Group, list[int]]]
    """By rank and group, the places of its steps."""
    num_groups: int

    @property
    def groups(self) -> list[_Group]:
        return list(dict.fromkeys(group for own in self.on_group.values() for group in own))


def _programs(sequences: Mapping[int, Sequence], classes: RankClasses | None) -> _Programs:
    wanted = classes.representatives() if classes else sequences
    assert set(wanted) == set(sequences), "one sequence for each rank that is spoken for"
    steps: dict[int, list[_Step]] = {}
    waits: dict[int, list[list[int]]] = {}
    on_group: dict[int, dict[_Group, list[int]]] = {}
    for rank, sequence in sequences.items():
        known: dict[Ranks, _Group] = {}
        own: list[_Step] = []
        places: dict[_Group, list[int]] = defaultdict(list)
        waited: list[tuple[int, int]] = []
        before = [0]  # steps among the first so many of the sequence
        for issued_ in sequence:
            ranks = issued_.entry[1]
            if ranks not in known:
                known[ranks] = _group_of(issued_, rank, sequences, classes)
            group = known[ranks]
            if len(ranks) > 1:  # a group of one waits for no one
                if issued_.waited_after is not None:
                    waited.append((len(own), issued_.waited_after))
                places[group].append(len(own))
                own.append(_Step(group, len(places[group]) - 1, issued_))
            before.append(len(own))
        steps[rank], on_group[rank] = own, dict(places)
        waits[rank] = [[] for _ in range(len(own) + 1)]
        for step, after in waited:
            waits[rank][before[after]].append(step)
    groups = {group for places in on_group.values() for group in places}
    num_groups = sum(
        classes.num_groups(members[0], axes) if classes else 1 for axes, members in groups
    )
    return _Programs(steps, waits, on_group, num_groups)


def _group_of(
    issued_: Issued, rank: int, sequences: Mapping[int, Sequence], classes: RankClasses | None
) -> _Group:
    ranks = issued_.entry[1]
    check_member(issued_, rank)
    if classes is None:
        missing = next((r for r in ranks if r not in sequences), None)
        if missing is not None:
            raise VerificationError(
                f"rank {rank} issues {issued_.line}, and there is no rank {missing} among the "
                f"{len(sequences)} whose graphs were read; give the graphs of all ranks"
            )
        return (), ranks
    axes = classes.axes_of_group(ranks, rank)
    if axes is None:
        raise VerificationError(
            f"rank {rank} issues {issued_.line}, a group that does not lie along axes of the mesh "
            f"({', '.join(classes.names)}), so one rank cannot speak for others; read the graph "
            "of every rank: --all-ranks"
        )
    return axes, classes.classes_in_group(rank, axes)


def _check_groups(programs: _Programs) -> None:
    """Whether all members of each group issue the same on it."""
    found: list[tuple[int, int, int, _Group, int]] = []
    for group in programs.groups:
        first, *others = group[1]
        expected = _on(programs, first, group)
        for other in others:
            entries = _on(programs, other, group)
            if entries != expected:
                pairs = enumerate(zip_longest(expected, entries))
                place = next(place for place, (a, b) in pairs if a != b)
                steps = programs.on_group[first].get(group, [])
                at = steps[place] if place < len(steps) else len(programs.steps[first])
                found.append((at, first, other, group, place))
                break
    if not found:
        return
    _, one, two, group, place = min(found)
    raise VerificationError(
        "the ranks' graphs do not issue the same collectives in the same order; running them "
        f"would hang. First difference, collective {place} of ranks {one} and {two} on a group of "
        f"both: rank {one} issues {_line(programs, one, group, place)}; rank {two} issues "
        f"{_line(programs, two, group, place)}. {REMEDY}"
    )


def check_member(issued_: Issued, rank: int) -> None:
    """Raises VerificationError where a rank communicates in a group that it is not in."""
    if rank not in issued_.entry[1]:
        raise VerificationError(
            f"rank {rank} issues {issued_.line} and is no member of that group; a rank can "
            "communicate in its own groups only"
        )


REMEDY = (
    "Look for code in the model or the loss that depends on the rank, and for different configs "
    "or versions on the ranks."
)


def refuse_splits(one: int, line: str, two: int, other_line: str) -> NoReturn:
    """Raises VerificationError: two ranks of an all-to-all do not fit."""
    raise VerificationError(
        f"rank {two} does not expect of an all-to-all what rank {one} sends it; running them would "
        f"hang, or mix up rows: rank {one} issues {line}; rank {two} issues {other_line}. {REMEDY}"
    )


def _check_splits(programs: _Programs, classes: RankClasses | None) -> None:
    """Whether in each all-to-all every member expects of every other what that sends, where all
    issue the same. Looks at every size once for each rank that speaks."""
    for group in programs.groups:
        members = group[1]
        for place, step in enumerate(programs.on_group[members[0]][group]):
            issued_ = programs.steps[members[0]][step].issued
            if issued_.splits is None:
                continue
            splits = {r: _step(programs, r, group, place).issued.splits for r in members}
            known = {rank: each for rank, each in splits.items() if each is not None}
            speaks = [classes.representative_of(r) if classes else r for r in issued_.entry[1]]
            found = first_mismatch(known, speaks)
            if found:
                lines = [_line(programs, rank, group, place) for rank in found]
                refuse_splits(found[0], lines[0], found[1], lines[1])


def _step(programs: _Programs, rank: int, group: _Group, place: int) -> _Step:
    return programs.steps[rank][programs.on_group[rank][group][place]]


def _on(programs: _Programs, rank: int, group: _Group) -> list[tuple[str, Inputs, str]]:
    steps = programs.steps[rank]
    entries = (steps[step].issued.entry for step in programs.on_group[rank].get(group, []))
    # which ranks is what the group says: other ones for each class
    return [(kind, inputs, reduction) for kind, _, inputs, reduction in entries]


def _line(programs: _Programs, rank: int, group: _Group, place: int) -> str:
    steps = programs.on_group[rank].get(group, [])
    return programs.steps[rank][steps[place]].issued.line if place < len(steps) else "nothing more"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A rank that cannot go on before another one has come."""

    rank: int
    step: int
    other: int


class _Play:
    """All ranks run as far as they can, where all members of a group issue the same on it.

    Each step and each wait is looked at once more than it blocks, so the play is linear. What
    can go on does not depend on the order in which the ranks are tried.
    """

    def __init__(self, programs: _Programs, *, blocking: bool) -> None:
        self._programs = programs
        self._waits = {
            rank: [[], *([step] for step in range(len(steps)))]
            if blocking
            else [list(waits) for waits in programs.waits[rank]]
            for rank, steps in programs.steps.items()
        }
        self._done = dict.fromkeys(programs.steps, 0)
        self._come: dict[tuple[_Group, int], int] = defaultdict(int)
        self._stuck: dict[int, int] = {}
        waiting: dict[tuple[_Group, int], list[int]] = defaultdict(list)
        ready = list(programs.steps)
        while ready:
            self._advance(ready.pop(), ready, waiting)

    def _advance(
        self, rank: int, ready: list[int], waiting: dict[tuple[_Group, int], list[int]]
    ) -> None:
        self._stuck.pop(rank, None)
        steps = self._programs.steps[rank]
        while True:
            waits = self._waits[rank][self._done[rank]]
            while waits:
                step = steps[waits[-1]]
                key = (step.group, step.place)
                if self._come[key] < len(step.group[1]):
                    waiting[key].append(rank)
                    self._stuck[rank] = waits[-1]
                    return
                waits.pop()
            if self._done[rank] == len(steps):
                return
            step = steps[self._done[rank]]
            key = (step.group, step.place)
            self._come[key] += 1
            self._done[rank] += 1
            if self._come[key] == len(step.group[1]):
                ready += waiting.pop(key, ())

    def circle(self) -> list[_Waiting]:
        """Ranks each of which waits for the next, the last for the first; none if all ended."""
        if not self._stuck:
            return []
        path: dict[int, _Waiting] = {}
        rank = min(self._stuck)
        while rank not in path:
            path[rank] = self._waiting(rank)
            rank = path[rank].other
        ranks = list(path)
        return [path[each] for each in ranks[ranks.index(rank) :]]

    def _waiting(self, rank: int) -> _Waiting:
        at = self._stuck[rank]
        step = self._programs.steps[rank][at]
        for other in step.group[1]:
            if self._programs.on_group[other][step.group][step.place] >= self._done[other]:
                return _Waiting(rank, at, other)
        raise AssertionError("a rank waits for a collective to which all members have come")


def _check_circles(programs: _Programs) -> None:
    """Whether the ranks come to the end."""
    circle = _Play(programs, blocking=True).circle()
    if not circle:
        return
    sure = _Play(programs, blocking=False).circle()
    if sure:
        raise VerificationError(
            "the ranks would wait for each other in a circle; running them would hang: "
            f"{_told(programs, sure)}. Let every rank issue them in the same order. {REMEDY}"
        )
    raise VerificationError(
        "the ranks' collectives on several groups cannot be put in one order; running them would "
        "hang wherever a collective holds up the next one until all its ranks have come, as NCCL "
        f"may: {_told(programs, circle)}. Let every rank issue them in the same order. {REMEDY}"
    )


def _told(programs: _Programs, circle: list[_Waiting]) -> str:
    return "; ".join(
        f"rank {w.rank} waits until rank {w.other} comes to "
        f"{programs.steps[w.rank][w.step].issued.line}"
        for w in circle
    )
