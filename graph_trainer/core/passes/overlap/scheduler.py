"""A list scheduler with a clock and an account of memory, which follows a graph's own order."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from graph_trainer.core.passes.overlap.headroom import Headroom
from graph_trainer.core.passes.overlap.schedule_graph import Kind, Stored, Unit, View
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.timeline import stretched

_WINDOW = 256
"""Nodes that are looked at to fill one gap."""
_PATH = 256
"""Nodes that a path to a collective may have to be run before others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a schedule may take."""

    prefetch_depth: int
    """Gathers in flight beyond the one that is used."""
    max_in_flight: int
    """Bytes of gathers that are under way or not used yet, and bytes of what is put off."""
    max_growth: float
    """Part of the graph's own peak by which it may grow."""
    max_consecutive_compute: int
    """Heavy nodes that a heavy node may overtake."""


@dataclass(slots=True, eq=False)
class _Late:
    """A wait, and what follows it, that are put off."""

    ends: float
    """When its collective is done."""
    places: list[int]
    bytes: int = 0
    counted: set[Stored] = field(default_factory=set)
    """What they make, and what is held for them."""
    over: bool = False


class Scheduler:
    """Puts the nodes of a view in order. `run` returns the places in their new order.

    Nodes run in the order in which they stand, except that

    - gathers start ahead of their place, with what prepares them; reductions as soon as all that
      they read is there;
    - waits, and what follows a reduction, run when the collective is done by the clock, when
      something reads them, when memory is short, or at the end;
    - what leads to the next other collective runs before heavy nodes that do not;
    - where compute would stand still, what does not depend on the wait runs first.

    The account: `headroom` has, by place, the bytes that may be alive there beyond what the
    graph holds in its own order, less what has been made ahead of its place. What is put off
    holds bytes as well; it runs when they no longer fit. Nothing is ever subtracted for what is
    freed early, so that the account is an upper bound.
    """

    def __init__(self, view: View, hardware: Hardware, limits: Limits) -> None:
        self.view = view
        self.hardware = hardware
        self.limits = limits
        left = [[num + int(peak * limits.max_growth) for num in fewer] for peak, fewer in view.left]
        self.headroom = Headroom([min(several) for several in zip(*left, strict=True)])
        self.order: list[int] = []
        self.done = [False] * len(view.nodes)
        self.now = 0.0
        self.free: dict[tuple[int, ...], float] = defaultdict(float)
        self.ends: dict[int, float] = {}
        self.num_heavy = 0
        self.heavy_until = [0]
        for heavy in view.heavy:
            self.heavy_until.append(self.heavy_until[-1] + heavy)
        # what is put off
        self.late: dict[int, _Late] = {}
        self.owed = 0
        self.by_end: list[tuple[float, int, _Late]] = []
        # gathers
        self.next_gather = 0
        self.in_flight: set[int] = set()
        self.gathered = 0
        self.refused_at = (-1, -1, -1)
        self.prepares = {place for unit in view.gathers for place in unit.places[:-1]}
        self.bytes_of = {unit.start: unit.bytes for unit in view.gathers}
        # reductions
        self.next_reduction = 0
        self.missing = [self._inputs_of(unit) for unit in view.reductions]
        self.waiting: dict[int, list[int]] = defaultdict(list)
        for index, inputs in enumerate(self.missing):
            for place in inputs:
                self.waiting[place].append(index)
        self.ready: set[int] = set()
        # others
        self.next_other = 0
        self.path: list[int] | None = None
        self.path_of = -1

    def run(self) -> list[int]:
        """The places, each once, in their new order."""
        for place in range(len(self.view.nodes)):
            if self.done[place]:
                continue
            if place in self.prepares or self._put_off(place):
                continue
            if self.view.nodes[place].op == "output":
                self._run_all_late(place)
            if self.view.own[place]:  # nothing is decided where other ranks have no node
                self._run_with_what_it_reads(place)
                continue
            self._make_room(place)
            self._run_what_is_done(place)
            self._prefetch(place)
            self._hurry(place)
            if not self.done[place]:
                self._run_inputs(place)
                self._emit(place)
            self._reduce(place)
        return self.order

    # --- the clock -------------------------------------------------------------------------

    def _emit(self, place: int) -> None:
        view = self.view
        assert not self.done[place] and all(self.done[p] for p in view.reads[place])
        self.done[place] = True
        self.order.append(place)
        seconds = view.seconds[place]
        if place in view.group:
            group = view.group[place]
            self.free[group] = self.ends[place] = max(self.now, self.free[group]) + seconds
            if place in self.bytes_of:
                self.in_flight.add(place)
                self.gathered += self.bytes_of[place]
        elif place in view.issuer:
            start = view.issuer[place]
            self.now = max(self.now, self.ends[start])
            if start in self.in_flight:
                self.in_flight.discard(start)
                self.gathered -= self.bytes_of[start]
        elif seconds:
            communicating = max(self.free.values(), default=0.0) - self.now
            self.now += stretched(seconds, communicating, self.hardware)
            self.num_heavy += view.heavy[place]
        for index in self.waiting.pop(place, ()):
            self.missing[index].discard(place)
            if not self.missing[index]:
                self.ready.add(index)

    # --- later -----------------------------------------------------------------------------

    def _put_off(self, place: int) -> bool:
        """Whether a node is to run later."""
        view, kind = self.view, self.view.kind[place]
        if kind is Kind.WAIT:
            start = view.issuer[place]
            if self.done[start] and self.ends[start] <= self.now:
                return False
            if self.done[start]:
                self._owe(_Late(self.ends[start], []), place)
                return True
        if kind not in (Kind.FREE, Kind.TAIL, Kind.WAIT):
            return False
        owners = [self.late[p] for p in sorted(view.reads[place]) if p in self.late]
        if not owners:
            return False
        if kind is Kind.FREE and len(owners) < len(view.reads[place]):
            return False
        self._owe(max(owners, key=lambda each: each.ends), place)
        return True

    def _owe(self, late: _Late, place: int) -> None:
        """Put a node off, with those of `late`, and account for what it holds."""
        late.places.append(place)
        self.late[place] = late
        new = {*self.view.makes[place], *self.view.holds[place]} - late.counted
        late.counted |= new
        added = sum(s.bytes for s in new)
        late.bytes += added
        self.owed += added
        if len(late.places) == 1:
            heapq.heappush(self.by_end, (late.ends, place, late))

    def _run_late(self, late: _Late) -> None:
        """Run what was put off; a second collective in it, and its wait, put off the rest."""
        if late.over:
            return
        late.over = True
        self.owed -= late.bytes
        for place in late.places:
            del self.late[place]
        for index, place in enumerate(late.places):
            if self.done[place]:  # another that was put off, and that this one reads, read it
                continue
            start = self.view.issuer.get(place)
            if index and start is not None and self.ends[start] > self.now:
                rest = _Late(self.ends[start], [])
                for behind in late.places[index:]:
                    if not self.done[behind]:
                        self._owe(rest, behind)
                return
            self._run_with_what_it_reads(place)

    def _run_with_what_it_reads(self, place: int) -> None:
        self._run_what_it_reads(place)
        if not self.done[place]:
            self._emit(place)

    def _run_what_it_reads(self, place: int) -> None:
        for source in sorted(self.view.reads[place]):
            while source in self.late:
                self._run_late(self.late[source])
            if not self.done[source]:  # prepares a gather, or is being run with what was put off
                self._run_with_what_it_reads(source)

    def _run_what_is_done(self, place: int) -> None:
        while self.by_end and (self.by_end[0][2].over or self.by_end[0][0] <= self.now):
            self._run_late(heapq.heappop(self.by_end)[2])

    def _run_oldest(self) -> bool:
        while self.by_end:
            late = heapq.heappop(self.by_end)[2]
            if not late.over:
                self._run_late(late)
                return True
        return False

    def _run_all_late(self, place: int) -> None:
        while self._run_oldest():
            pass

    def _make_room(self, place: int) -> None:
        while self.owed and self.owed > min(
            self.limits.max_in_flight, self.headroom.least(place, place + 1)
        ):
            self._run_oldest()

    def _run_inputs(self, place: int) -> None:
        """Run what a node reads and what was put off; fill the time until it is there."""
        for source in sorted(self.view.reads[place]):
            while source in self.late:
                self._fill(place, self.late[source].ends)
                self._run_late(self.late[source])
        self._run_what_it_reads(place)
        if place in self.view.issuer:
            self._fill(place, self.ends[self.view.issuer[place]])

    # --- earlier ---------------------------------------------------------------------------

    def _pull(self, places: Sequence[int], place: int, aside: int = 0) -> bool:
        """Run nodes before `place`, if memory allows. `places` are in order, `aside` bytes that
        running them takes beside what they make."""
        inside = set(places)
        alive = peak = 0
        stay: list[Stored] = []
        gone: dict[int, int] = defaultdict(int)
        for each in places:
            for stored in self.view.makes[each]:
                alive += stored.bytes
                if stored.last in inside and stored.readers <= inside:
                    gone[stored.last] += stored.bytes
                elif stored.born > place:
                    stay.append(stored)
            peak = max(peak, alive)
            alive -= gone[each]
        if peak + aside > self.headroom.least(place, place + 1) - self.owed:
            return False
        total = sum(stored.bytes for stored in stay)
        if stay and total > self.headroom.least(place, max(s.born for s in stay)):
            return False
        for stored in stay:
            self.headroom.take(place, stored.born, stored.bytes)
        for each in places:
            self._emit(each)
        return True

    def _prefetch(self, place: int) -> None:
        gathers = self.view.gathers
        while self.next_gather < len(gathers):
            unit = gathers[self.next_gather]
            if self.done[unit.start]:
                self.next_gather += 1
                continue
            if (
                unit.backward is not self.view.backward[place]
                or len(self.in_flight) >= self.limits.prefetch_depth
                or self.gathered + unit.bytes > self.limits.max_in_flight
            ):
                return
            asked = (self.next_gather, len(self.in_flight), self.num_heavy)
            if asked == self.refused_at:
                return
            if not self._pull_unit(unit, place):
                self.refused_at = asked
                return

    def _reduce(self, place: int) -> None:
        """Start the reductions whose inputs are there, in their order."""
        reductions = self.view.reductions
        while self.next_reduction < len(reductions):
            unit = reductions[self.next_reduction]
            if self.done[unit.start]:
                self.ready.discard(self.next_reduction)
                self.next_reduction += 1
                continue
            if self.next_reduction not in self.ready:
                return
            self._make_room(place)
            while not self._pull_unit(unit, place):
                if not self._run_oldest():
                    return

    def _inputs_of(self, unit: Unit) -> set[int]:
        inside = set(unit.places)
        return {p for each in unit.places for p in self.view.reads[each]} - inside

    def _pull_unit(self, unit: Unit, place: int) -> bool:
        places = [p for p in unit.places if not self.done[p]]
        inside = set(places)
        if any(p in self.late for p in places):
            return False
        if any(not self.done[p] and p not in inside for e in places for p in self.view.reads[e]):
            return False
        return self._pull(places, place, unit.aside)

    # --- other collectives -----------------------------------------------------------------

    def _hurry(self, place: int) -> None:
        """Run what leads to the next other collective before a node that does not."""
        view = self.view
        if not view.seconds[place] or place in view.group or self.ready:
            return
        while self.next_other < len(view.others) and self.done[view.others[self.next_other]]:
            self.next_other += 1
        if self.next_other == len(view.others):
            return
        start = view.others[self.next_other]
        if start < place or start not in view.group:
            return
        if self.path_of != start:
            self.path_of, self.path = start, self._path_to(start)
        if self.path is None or self.heavy_until[start] - self.heavy_until[place] > (
            2 * self.limits.max_consecutive_compute
        ):
            return
        path = [p for p in self.path if not self.done[p]]
        self.path = path
        if place in path or any(p in self.late for p in path):
            return
        movable = all(
            (view.kind[p] in (Kind.PLAIN, Kind.FREE) or self._is_over(p))
            and view.backward[p] is view.backward[place]
            for p in path[:-1]
        )
        heavy = sum(view.heavy[p] for p in path)
        over = self.heavy_until[start] - self.heavy_until[place] - heavy
        light = not any(view.seconds[p] for p in path[:-1])
        # no reduction starts while the path runs, and this node
        together = heavy + view.heavy[place]
        if not movable or max(together, over) > self.limits.max_consecutive_compute:
            return
        if (view.heavy[place] or light) and view.backward[start] is view.backward[place]:
            self._pull(path, place)

    def _is_over(self, place: int) -> bool:
        """Whether a wait would not wait."""
        start = self.view.issuer.get(place)
        if self.view.kind[place] is not Kind.WAIT or start is None:
            return False
        return self.done[start] and self.ends[start] <= self.now

    def _path_to(self, start: int) -> list[int] | None:
        """What has not run of all that a collective needs, in order; None if it is much."""
        found = {start}
        stack = [start]
        while stack:
            for source in self.view.reads[stack.pop()]:
                if source not in found and not self.done[source]:
                    found.add(source)
                    stack.append(source)
                    if len(found) > _PATH:
                        return None
        return sorted(found)

    def _fill(self, place: int, until: float) -> None:
        """Run what comes later and is ready, where compute would stand still."""
        if until <= self.now or self.ready:
            return
        view = self.view
        ready: set[int] = set()
        passed = 0
        for later in range(place, min(place + _WINDOW, len(view.nodes))):
            if self.done[later] or later in self.late:
                continue
            passed += view.heavy[later]
            if passed > self.limits.max_consecutive_compute:
                return
            if later == place or view.kind[later] not in (Kind.PLAIN, Kind.FREE):
                continue
            if view.backward[later] is not view.backward[place]:
                continue
            reads = view.reads[later]
            if not all(self.done[p] or p in ready for p in reads):
                continue
            if not view.seconds[later]:
                ready.add(later)
                continue
            if self._pull(self._with_inputs(later), place):
                passed -= view.heavy[later]
                if self.now >= until or self.ready:
                    return

    def _with_inputs(self, place: int) -> list[int]:
        """A node and what of its inputs has not run, in order."""
        found = {place}
        stack = [place]
        while stack:
            for source in self.view.reads[stack.pop()]:
                if not self.done[source] and source not in found:
                    found.add(source)
                    stack.append(source)
        return sorted(found)
