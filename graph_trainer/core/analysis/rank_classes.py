"""Ranks of a mesh that run the same graph, class by class."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

Ranks = tuple[int, ...]
Axes = tuple[int, ...]
"""Places of mesh axes, in the order in which ranks are counted, fastest at the end."""


@dataclass(frozen=True, slots=True)
class RankClasses:
    """The ranks of a mesh, those whose graphs are alike in one class.

    Each axis has its own classes of coordinates, and a class of ranks is one of each axis:
    then every group that lies along some axes has members of the same classes as the parallel
    groups through other ranks of a class, and one rank can stand for its class.
    """

    names: tuple[str, ...]
    """Of the axes. Ranks are counted along the last one first."""
    labels: tuple[tuple[int, ...], ...]
    """For every axis the class of each coordinate."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple(map(len, self.labels))

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(self.sizes)

    def representatives(self) -> dict[int, int]:
        """The first rank of every class, and how many ranks the class has."""
        firsts = [dict.fromkeys(labels) for labels in self.labels]
        return {
            self._rank([labels.index(k) for labels, k in zip(self.labels, kinds, strict=True)]): (
                math.prod(labels.count(k) for labels, k in zip(self.labels, kinds, strict=True))
            )
            for kinds in itertools.product(*firsts)
        }

    def representative_of(self, rank: int) -> int:
        """The first rank of a rank's class."""
        places = zip(self.labels, self.coordinates(rank), strict=True)
        return self._rank([labels.index(labels[place]) for labels, place in places])

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """A rank's place along each axis."""
        place = []
        for size in reversed(self.sizes):
            rank, coordinate = divmod(rank, size)
            place.append(coordinate)
        return tuple(reversed(place))

    def axes_of_group(self, ranks: Ranks, rank: int) -> Axes | None:
        """The axes of more than one rank along which a group through `rank` lies, the one along
        which it counts first at the end; None for any other set of ranks, or another order."""
        ends = zip(self.coordinates(ranks[0]), self.coordinates(ranks[-1]), strict=True)
        axes = tuple(axis for axis, (first, last) in enumerate(ends) if first != last)
        orders = itertools.permutations(axes)
        return next((order for order in orders if ranks == self._through(rank, order)), None)

    def classes_in_group(self, rank: int, axes: Axes) -> Ranks:
        """The representatives of a group's classes, for a representative and the axes along
        which the group lies. All of them are in the group themselves."""
        own = self.coordinates(rank)
        choices = [
            [labels.index(kind) for kind in dict.fromkeys(labels)] if axis in axes else [own[axis]]
            for axis, labels in enumerate(self.labels)
        ]
        return tuple(sorted(self._rank(list(place)) for place in itertools.product(*choices)))

    def num_groups(self, rank: int, axes: Axes) -> int:
        """How many groups are alike: the parallel ones through all ranks of a class."""
        own = self.coordinates(rank)
        return math.prod(
            labels.count(labels[own[axis]])
            for axis, labels in enumerate(self.labels)
            if axis not in axes
        )

    def _rank(self, place: list[int]) -> int:
        rank = 0
        for size, coordinate in zip(self.sizes, place, strict=True):
            rank = rank * size + coordinate
        return rank

    def _through(self, rank: int, axes: Axes) -> Ranks:
        own = self.coordinates(rank)
        through = []
        for place in itertools.product(*(range(self.sizes[axis]) for axis in axes)):
            at = dict(zip(axes, place, strict=True))
            through.append(self._rank([at.get(axis, own[axis]) for axis in range(len(own))]))
        return tuple(through)
