"""Put a graph in an order in which communication overlaps with compute, within a memory limit."""

from __future__ import annotations

from graph_trainer.core.passes.overlap.schedule_graph import Kind, LaunchGroup, ScheduleGraph
from graph_trainer.core.passes.overlap.schedule_state import ScheduleOverlapOptions, ScheduleState

_WINDOW = 256
"""Nodes that are considered to fill one gap."""
_PATH = 256
"""Nodes that may run before others because they lead to a collective, at most."""


class Scheduler(ScheduleState):
    """A list scheduler with simulated time. `run` returns the places in their new order.

    Nodes run in the order of the graph, except that

    - gathers start ahead of their place, with the nodes that prepare them; reductions as soon as
      their inputs have run;
    - waits, and what follows a reduction, run when the collective has ended, when something reads
      them, when memory is short, or at the end;
    - nodes that lead to the next other collective run before heavy nodes that do not;
    - where compute would wait, nodes that do not depend on the wait run first.
    """

    def __init__(self, graph: ScheduleGraph, options: ScheduleOverlapOptions) -> None:
        super().__init__(graph, options)
        self.heavy_until = [0]
        for heavy in graph.heavy:
            self.heavy_until.append(self.heavy_until[-1] + heavy)
        self.prepares = {place for each in graph.gathers for place in each.places[:-1]}
        self.next_gather = 0
        self.refused_at = (-1, -1, -1)
        self.next_reduction = 0
        self.others = [place for place, kind in enumerate(graph.kind) if kind is Kind.OTHER]
        self.next_other = 0
        self.path: list[int] | None = None
        self.path_of = -1

    def run(self) -> list[int]:
        """Return the places, each once, in their new order."""
        for place in range(len(self.graph.nodes)):
            if self.done[place] or place in self.prepares or self.defer(place):
                continue
            if self.graph.nodes[place].op == "output":
                while self.run_oldest():
                    pass
            if self.graph.local[place]:  # other ranks may not have the node: decide nothing here
                self.run_with_inputs(place)
                continue
            self.run_beyond_limit(place)
            self.run_ended()
            self._prefetch(place)
            self._advance_collective(place)
            if not self.done[place]:
                self._wait_for_inputs(place)
                self.emit(place)
            self._reduce(place)
        return self.order

    def _wait_for_inputs(self, place: int) -> None:
        """Run what a node reads, and fill the time until it is there."""
        for source in sorted(self.graph.reads[place]):
            while source in self.deferred:
                self._fill(place, self.deferred[source].ends)
                self.run_deferred(self.deferred[source])
        self.run_inputs(place)
        if place in self.graph.issuer:
            self._fill(place, self.ends[self.graph.issuer[place]])

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
                or self.bytes_in_flight + group.bytes > self.max_in_flight
            ):
                return
            tried = (self.next_gather, len(self.in_flight), self.num_heavy)
            if tried == self.refused_at:
                return
            if not self._launch(group, place):
                self.refused_at = tried
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
        inside = set(places)
        if any(p in self.deferred for p in places):
            return False
        reads = {p for each in places for p in self.graph.reads[each]} - inside
        if not all(self.done[p] for p in reads):
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
            self.path_of, self.path = start, self._path_to(start)
        ahead = self.heavy_until[start] - self.heavy_until[place]
        if self.path is None or ahead > 2 * self.options.max_consecutive_compute:
            return
        path = self.path = [p for p in self.path if not self.done[p]]
        if place in path or any(p in self.deferred for p in path):
            return
        if not all(self._may_advance(p, place) for p in path[:-1]):
            return
        heavy = sum(graph.heavy[p] for p in path)
        # no reduction starts while the path and this node run
        together = heavy + graph.heavy[place]
        if max(together, ahead - heavy) > self.options.max_consecutive_compute:
            return
        light = not any(graph.seconds[p] for p in path[:-1])
        if (graph.heavy[place] or light) and graph.backward[start] is graph.backward[place]:
            self.run_early(path, place)

    def _may_advance(self, place: int, before: int) -> bool:
        """Return whether a node may overtake another: it computes, or waits for what has ended."""
        kind = self.graph.kind[place]
        movable = kind in (Kind.PLAIN, Kind.FREE) or (kind is Kind.WAIT and self.has_ended(place))
        return movable and self.graph.backward[place] is self.graph.backward[before]

    def _path_to(self, place: int) -> list[int] | None:
        """Return a node and what of its inputs has not run, in order; None if these are many."""
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
        """Run later nodes whose inputs have run, where compute would wait."""
        if until <= self.now or self.ready:
            return
        graph = self.graph
        ready: set[int] = set()
        passed = 0
        for later in range(place, min(place + _WINDOW, len(graph.nodes))):
            if self.done[later] or later in self.deferred:
                continue
            passed += graph.heavy[later]
            if passed > self.options.max_consecutive_compute:
                return
            if later == place or graph.kind[later] not in (Kind.PLAIN, Kind.FREE):
                continue
            if graph.backward[later] is not graph.backward[place]:
                continue
            if not all(self.done[p] or p in ready for p in graph.reads[later]):
                continue
            if not graph.seconds[later]:
                ready.add(later)
                continue
            path = self._path_to(later)
            if path is not None and self.run_early(path, place):
                passed -= graph.heavy[later]
                if self.now >= until or self.ready:
                    return
