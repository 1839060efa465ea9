"""Order a graph so that communication overlaps with compute, within a memory limit."""

# The idea: run the nodes in the order of the graph with a simulated clock. A collective occupies
# its group and not the clock; a wait moves the clock to the collective's end. At each node, start
# early what may start (the next gathers, a reduction whose inputs have run, nodes that lead to the
# next other collective), defer what may run later (waits, and nodes that only lead to gradients),
# and where compute would wait, run later nodes that do not depend on the wait. Memory is an account
# by place: nodes that run early or late take from the headroom of the places in between.

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from graph_trainer.core.passes.overlap.schedule_graph import (
    Kind,
    LaunchGroup,
    ScheduleGraph,
    Stored,
)
from graph_trainer.core.simulation.timeline import stretched
from graph_trainer.core.units import MIB
from graph_trainer.errors import PassError

_WINDOW = 256
"""The number of later nodes that may run while compute would wait once."""
_PATH = 256
"""The most nodes that may run before others because they lead to a collective."""
_UNBOUNDED = 1 << 62
"""More bytes than any device has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOverlapOptions:
    """How far collectives and compute may move, and what that may cost."""

    prefetch_depth: int = 2
    """How many gathers, of one bucket each, are in flight beyond the one that is being used."""

    max_in_flight_mib: float | None = None
    """MiB that may be alive, at any node, beyond the bytes that are alive there without this pass:
    parameters gathered ahead, gradients being reduced, results computed early. None for as many as
    the memory limit allows; see `schedule_overlap`."""

    max_consecutive_compute: int = 8
    """How many matrix products or attentions may run between the moment when a reduction could
    start and its start, if memory allows that start, and how many a node that is run early may
    overtake."""

    def __post_init__(self) -> None:
        if self.prefetch_depth < 0:
            self._refuse("prefetch_depth", "0 (no gather ahead of its place) or more")
        if self.max_in_flight_mib is not None and not 0 < self.max_in_flight_mib < math.inf:
            self._refuse("max_in_flight_mib", "a number of MiB above 0")
        if self.max_consecutive_compute < 1:
            self._refuse("max_consecutive_compute", "at least 1")

    def _refuse(self, name: str, valid: str) -> NoReturn:
        value = f"{getattr(self, name):g}"
        raise PassError(f"ScheduleOverlapOptions.{name} is {value}; it must be {valid}")


@dataclass(slots=True, eq=False)
class Deferred:
    """A wait, and the nodes after it, that run later than in the graph."""

    ends: float
    """The simulated time at which the collective ends."""
    places: list[int]
    bytes: int = 0
    counted: set[Stored] = field(default_factory=set)
    """The storages that the nodes allocate, and those that stay allocated for them."""
    has_run: bool = False


class _Attempt(NamedTuple):
    """A try to start a gather."""

    gather: int
    num_in_flight: int
    num_heavy: int
    """The heavy nodes that have run before."""


class Scheduler:
    """A list scheduler with simulated time. `run` returns the places in their new order.

    Nodes run in the order of the graph, except that

    - gathers start ahead of their place, with the nodes that prepare them, and reductions as soon
      as their inputs have run;
    - waits, and the nodes after a reduction, run when the collective has ended, when another node
      reads them, when memory is short, or at the end;
    - nodes that lead to the next other collective run before heavy nodes that do not;
    - where compute would wait, nodes that do not depend on the wait run first.

    `headroom` has, by place, the bytes that may be alive there in addition to those that are alive
    in the order of the graph, without the bytes that have been allocated ahead of their place.
    Deferred nodes keep bytes alive as well (`deferred_bytes`) and run when these no longer fit.
    Memory that is freed early is never subtracted, so that the account is an upper bound.

    Args:
        growth: bytes by which the peak of the graph's allocations may grow. None for an order
            without any bound of memory, also without that of `options`.
    """

    def __init__(
        self, graph: ScheduleGraph, options: ScheduleOverlapOptions, growth: int | None
    ) -> None:
        self.graph = graph
        self.options = options
        self.headroom = [_UNBOUNDED] * len(graph.nodes)
        if growth is not None:
            max_bytes = _UNBOUNDED
            if options.max_in_flight_mib is not None:
                max_bytes = int(options.max_in_flight_mib * MIB)
            self.headroom = [min(headroom + growth, max_bytes) for headroom in graph.headroom]
        self.order: list[int] = []
        self.done = [False] * len(graph.nodes)
        self.now = 0.0
        self.ends: dict[int, float] = {}
        """By collective, the time at which it ends."""
        self.num_heavy = 0
        self.deferred: dict[int, Deferred] = {}
        self.deferred_bytes = 0
        self.in_flight: set[int] = set()
        """Gathers that have started and are not waited for yet."""
        self.ready: set[int] = set()
        """Indices of the reductions whose inputs have all run."""
        self._group_ends: dict[tuple[int, ...], float] = defaultdict(float)
        self._by_end: list[tuple[float, int, Deferred]] = []
        self._gathers = {group.start for group in graph.gathers}
        self._missing: list[set[int]] = []
        """By index of a reduction, its inputs that have not run."""
        for group in graph.reductions:
            inputs: set[int] = set()
            for place in group.places:
                inputs |= graph.reads[place]
            self._missing.append(inputs.difference(group.places))
        self._waiting: dict[int, list[int]] = defaultdict(list)
        """By place, the indices of the reductions that need it."""
        for index, inputs in enumerate(self._missing):
            for place in inputs:
                self._waiting[place].append(index)
        self.heavy_until = list(itertools.accumulate(graph.heavy, initial=0))
        """By place, the number of heavy nodes before it."""
        self.prepares = {place for group in graph.gathers for place in group.places[:-1]}
        self.next_gather = 0
        self.refused: _Attempt | None = None
        """The last gather for which there was no memory. It is not tried again until more or fewer
        gathers are in flight, or another heavy node has run."""
        self.next_reduction = 0
        self.others = [place for place, kind in enumerate(graph.kind) if kind is Kind.OTHER]
        self.next_other = 0
        self.path: list[int] | None = None
        """The nodes that lead to the other collective `path_of` and have not run; None if they are
        too many."""
        self.path_of: int | None = None

    def run(self) -> list[int]:
        """Return the places, each once, in their new order."""
        for place in range(len(self.graph.nodes)):
            if self.done[place] or place in self.prepares or self.defer(place):
                continue
            if self.graph.nodes[place].op == "output":
                while self.run_oldest():
                    pass
            if self.graph.local[place]:  # other ranks may not have the node: no decisions here
                self.run_with_inputs(place)
                continue
            self.run_beyond_limit(place)
            self.run_ended()
            self._prefetch(place)
            self._advance_collective(place)
            if not self.done[place]:
                # fill the time until the node's inputs have been computed
                for source in sorted(self.graph.reads[place]):
                    while source in self.deferred:
                        self._fill(place, self.deferred[source].ends)
                        self.run_deferred(self.deferred[source])
                self.run_inputs(place)
                if place in self.graph.issuer:
                    self._fill(place, self.ends[self.graph.issuer[place]])
                self.emit(place)
            self._reduce(place)
        return self.order

    # --- one node --------------------------------------------------------------------------

    def emit(self, place: int) -> None:
        """Run a node now: append it to the order and advance the time."""
        graph = self.graph
        assert not self.done[place] and all(self.done[p] for p in graph.reads[place])
        self.done[place] = True
        self.order.append(place)
        seconds = graph.seconds[place]
        if place in graph.group:
            group = graph.group[place]
            self.ends[place] = max(self.now, self._group_ends[group]) + seconds
            self._group_ends[group] = self.ends[place]
            if place in self._gathers:
                self.in_flight.add(place)
        elif place in graph.issuer:
            start = graph.issuer[place]
            self.now = max(self.now, self.ends[start])
            self.in_flight.discard(start)
        elif seconds:
            communicating = max(self._group_ends.values(), default=0.0) - self.now
            self.now += stretched(seconds, communicating, graph.hardware)
            self.num_heavy += graph.heavy[place]
        for index in self._waiting.pop(place, ()):
            self._missing[index].discard(place)
            if not self._missing[index]:
                self.ready.add(index)

    def has_ended(self, wait: int) -> bool:
        """Return whether the collective of a wait has ended."""
        start = self.graph.issuer[wait]
        return self.done[start] and self.ends[start] <= self.now

    # --- later -----------------------------------------------------------------------------

    def defer(self, place: int) -> bool:
        """Defer a node whose collective has not ended, or that reads deferred nodes.

        Returns False if the node must run now.
        """
        graph = self.graph
        kind = graph.kind[place]
        if kind is Kind.WAIT:
            start = graph.issuer[place]
            if self.has_ended(place):
                return False
            if self.done[start]:
                self._add_deferred(Deferred(self.ends[start], []), place)
                return True
        if kind not in (Kind.FREE, Kind.TAIL, Kind.WAIT):
            return False
        sources = [self.deferred[p] for p in sorted(graph.reads[place]) if p in self.deferred]
        if not sources or (kind is Kind.FREE and len(sources) < len(graph.reads[place])):
            return False
        self._add_deferred(max(sources, key=lambda deferred: deferred.ends), place)
        return True

    def _add_deferred(self, deferred: Deferred, place: int) -> None:
        """Defer a node with others, and count the memory that this keeps alive."""
        deferred.places.append(place)
        self.deferred[place] = deferred
        storages = {*self.graph.makes[place], *self.graph.keeps_alive[place]} - deferred.counted
        deferred.counted |= storages
        num_bytes = sum(storage.bytes for storage in storages)
        deferred.bytes += num_bytes
        self.deferred_bytes += num_bytes
        if len(deferred.places) == 1:
            heapq.heappush(self._by_end, (deferred.ends, place, deferred))

    def run_deferred(self, deferred: Deferred) -> None:
        """Run deferred nodes up to a wait for a second collective; defer the rest until it ends."""
        if deferred.has_run:
            return
        deferred.has_run = True
        self.deferred_bytes -= deferred.bytes
        for place in deferred.places:
            del self.deferred[place]
        for index, place in enumerate(deferred.places):
            if self.done[place]:  # it ran as an input of other deferred nodes, which this one reads
                continue
            start = self.graph.issuer.get(place)
            if index and start is not None and self.ends[start] > self.now:
                rest = Deferred(self.ends[start], [])
                for later in deferred.places[index:]:
                    if not self.done[later]:
                        self._add_deferred(rest, later)
                return
            self.run_with_inputs(place)

    def run_with_inputs(self, place: int) -> None:
        """Run the inputs of a node, then the node."""
        self.run_inputs(place)
        if not self.done[place]:
            self.emit(place)

    def run_inputs(self, place: int) -> None:
        """Run the inputs of a node that have not run."""
        for source in sorted(self.graph.reads[place]):
            while source in self.deferred:
                self.run_deferred(self.deferred[source])
            if not self.done[source]:  # prepares a gather, or is about to run with deferred nodes
                self.run_with_inputs(source)

    def run_ended(self) -> None:
        """Run the deferred nodes whose collective has ended."""
        while self._by_end:
            ends, _, deferred = self._by_end[0]
            if not deferred.has_run and ends > self.now:
                return
            heapq.heappop(self._by_end)
            self.run_deferred(deferred)

    def run_oldest(self) -> bool:
        """Run the deferred nodes whose collective ends first. Returns whether there were any."""
        while self._by_end:
            _, _, deferred = heapq.heappop(self._by_end)
            if not deferred.has_run:
                self.run_deferred(deferred)
                return True
        return False

    def run_beyond_limit(self, place: int) -> None:
        """Run deferred nodes until those that remain fit into memory at a place."""
        while self.deferred_bytes and self.deferred_bytes > self.headroom[place]:
            self.run_oldest()

    # --- earlier ---------------------------------------------------------------------------

    def run_early(self, places: Sequence[int], place: int, scratch_bytes: int = 0) -> bool:
        """Run nodes before `place`, in order, if memory allows their allocations and
        `scratch_bytes` more. Returns whether they ran."""
        inside = set(places)
        alive = peak = 0
        kept: list[Stored] = []  # storages that are alive up to the place where they were made
        freed: dict[int, int] = defaultdict(int)
        for source in places:
            for storage in self.graph.makes[source]:
                alive += storage.bytes
                if storage.last in inside and storage.readers <= inside:
                    freed[storage.last] += storage.bytes
                elif storage.born > place:
                    kept.append(storage)
            peak = max(peak, alive)
            alive -= freed[source]
        if peak + scratch_bytes > self.headroom[place] - self.deferred_bytes:
            return False
        kept_bytes = sum(storage.bytes for storage in kept)
        if kept and kept_bytes > min(self.headroom[place : max(s.born for s in kept)]):
            return False
        for storage in kept:
            for between in range(place, storage.born):
                self.headroom[between] -= storage.bytes
        for source in places:
            self.emit(source)
        return True

    # --- gathers and reductions ------------------------------------------------------------

    def _prefetch(self, place: int) -> None:
        """Start the next gathers, in their order."""
        gathers = self.graph.gathers
        while self.next_gather < len(gathers):
            group = gathers[self.next_gather]
            if self.done[group.start]:
                self.next_gather += 1
                continue
            if (
                group.backward is not self.graph.backward[place]
                or len(self.in_flight) >= self.options.prefetch_depth
            ):
                return
            attempt = _Attempt(self.next_gather, len(self.in_flight), self.num_heavy)
            if attempt == self.refused:
                return
            if not self._launch(group, place):
                self.refused = attempt
                return

    def _reduce(self, place: int) -> None:
        """Start the reductions whose inputs have run, in their order."""
        reductions = self.graph.reductions
        while self.next_reduction < len(reductions):
            group = reductions[self.next_reduction]
            if self.done[group.start]:
                self.ready.discard(self.next_reduction)
                self.next_reduction += 1
                continue
            if self.next_reduction not in self.ready:
                return
            self.run_beyond_limit(place)
            while not self._launch(group, place):
                if not self.run_oldest():
                    return

    def _launch(self, group: LaunchGroup, place: int) -> bool:
        """Run a launch group before `place`, if its inputs have run and memory allows."""
        places = [p for p in group.places if not self.done[p]]
        inputs: set[int] = set()
        for source in places:
            inputs |= self.graph.reads[source]
        inputs.difference_update(places)
        if any(p in self.deferred for p in places) or not all(self.done[p] for p in inputs):
            return False
        return self.run_early(places, place, group.scratch_bytes)

    # --- other collectives -----------------------------------------------------------------

    def _advance_collective(self, place: int) -> None:
        """Run the nodes that lead to the next other collective before a node that does not."""
        graph = self.graph
        if not graph.seconds[place] or place in graph.group or self.ready:
            return
        while self.next_other < len(self.others) and self.done[self.others[self.next_other]]:
            self.next_other += 1
        if self.next_other == len(self.others):
            return
        start = self.others[self.next_other]
        if start < place or start not in graph.group:
            return
        if self.path_of != start:
            self.path_of = start
            self.path = self._path_to(start)
        num_heavy_before = self.heavy_until[start] - self.heavy_until[place]
        max_heavy = self.options.max_consecutive_compute
        if self.path is None or num_heavy_before > 2 * max_heavy:
            return
        path = self.path = [p for p in self.path if not self.done[p]]
        if place in path or any(p in self.deferred for p in path):
            return
        if not all(self._may_advance(p, place) for p in path[:-1]):
            return
        num_heavy = sum(graph.heavy[p] for p in path)
        # no reduction starts while the path and this node run, and the path overtakes the others
        if num_heavy + graph.heavy[place] > max_heavy or num_heavy_before - num_heavy > max_heavy:
            return
        takes_time = any(graph.seconds[p] for p in path[:-1])
        if takes_time and not graph.heavy[place]:
            return
        if graph.backward[start] is graph.backward[place]:
            self.run_early(path, place)

    def _may_advance(self, place: int, before: int) -> bool:
        """Return whether a node may overtake another: it computes, or its collective has ended."""
        kind = self.graph.kind[place]
        may_move = kind in (Kind.PLAIN, Kind.FREE) or (kind is Kind.WAIT and self.has_ended(place))
        return may_move and self.graph.backward[place] is self.graph.backward[before]

    def _path_to(self, place: int) -> list[int] | None:
        """Return a node and those of its inputs that have not run, in order; None if too many."""
        seen = {place}
        stack = [place]
        while stack:
            for source in self.graph.reads[stack.pop()]:
                if source not in seen and not self.done[source]:
                    seen.add(source)
                    stack.append(source)
                    if len(seen) > _PATH:
                        return None
        return sorted(seen)

    def _fill(self, place: int, until: float) -> None:
        """Run later nodes whose inputs have run, while compute would wait until a time."""
        if until <= self.now or self.ready:
            return
        graph = self.graph
        free: set[int] = set()  # later nodes that take no time and could run
        num_overtaken = 0  # heavy nodes
        for later in range(place, min(place + _WINDOW, len(graph.nodes))):
            if self.done[later] or later in self.deferred:
                continue
            num_overtaken += graph.heavy[later]
            if num_overtaken > self.options.max_consecutive_compute:
                return
            if later == place or graph.kind[later] not in (Kind.PLAIN, Kind.FREE):
                continue
            if graph.backward[later] is not graph.backward[place]:
                continue
            if not all(self.done[p] or p in free for p in graph.reads[later]):
                continue
            if not graph.seconds[later]:
                free.add(later)
                continue
            path = self._path_to(later)
            if path is not None and self.run_early(path, place):
                num_overtaken -= graph.heavy[later]
                if self.now >= until or self.ready:
                    return
