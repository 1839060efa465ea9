"""Build the schedule graph of a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

from torch import fx

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.analysis.collectives import Collective, collectives
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import Role, is_backward, role_of, tensors_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    Storage,
    has_effect,
    is_collective,
    is_getitem,
    is_random,
    is_wait,
    storages_in,
    subgraphs,
    value_storages,
    written_arguments,
)
from graph_trainer.core.ordering.sequences import may_communicate
from graph_trainer.core.passes.overlap.schedule_graph import (
    Kind,
    LaunchGroup,
    ScheduleGraph,
    Stored,
)
from graph_trainer.core.simulation.collective_costs import collective_seconds, scratch_bytes
from graph_trainer.core.simulation.fusion import NO_FUSION, fuse
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.op_costs import Cost, costs
from graph_trainer.core.simulation.op_costs import Kind as CostKind


def build_schedule_graph(joint: JointGraph, hardware: Hardware, fused: bool) -> ScheduleGraph:
    """Find what a schedule needs to know of a graph. Linear in nodes.

    Args:
        fused: whether the backend fuses ops.

    Raises:
        VerificationError: a collective that cannot be described (see `collectives`).
    """
    return _Builder(joint, hardware, fused).build()


class _Builder:
    def __init__(self, joint: JointGraph, hardware: Hardware, fused: bool) -> None:
        self.joint = joint
        self.hardware = hardware
        self.fused = fused
        self.nodes = list(joint.graph.nodes)
        self.at = {node: place for place, node in enumerate(self.nodes)}
        self.storages = value_storages(joint.graph)
        self.issued = collectives(joint)
        self.collective = {c.node: c for c in self.issued}
        self.fsdp_groups = set() if self._gathers_twice() else _fsdp_groups(self.issued)
        self.issuer = self._issuers()
        self.written = {
            storage
            for node in self.nodes
            for target in written_arguments(node)
            for storage in storages_in(self.storages[target])
        }
        self.elements = self._elements_of_tails()
        self.gathers = self._gathers()
        self.prepares = self._prepares()

    def build(self) -> ScheduleGraph:
        kind = [self._kind(node) for node in self.nodes]
        reductions = self._reductions(kind)
        # ranks with fewer rows have other FSDP nodes, which must not change what fuses
        whole = fuse(self.joint, looks_through=_is_fsdp) if self.fused else NO_FUSION
        cost = costs(self.joint, self.hardware, whole)
        stored, makes, left = self._memory(whole.kept_inside)
        return ScheduleGraph(
            nodes=self.nodes,
            kind=kind,
            reads=self._reads(),
            seconds=[self._seconds(n, cost) for n in self.nodes],
            local=[
                n in self.prepares or (n in self.elements and not made)
                for n, made in zip(self.nodes, makes, strict=True)
            ],
            heavy=[
                n in cost and cost[n].kind in (CostKind.MATMUL, CostKind.ATTENTION)
                for n in self.nodes
            ],
            backward=[is_backward(n) for n in self.nodes],
            group={self.at[c.node]: c.ranks for c in self.issued if c.node in self.at},
            issuer={self.at[wait]: self.at[start] for wait, start in self.issuer.items()},
            makes=makes,
            keeps_alive=[self._keeps_alive(n, stored) for n in self.nodes],
            left=left,
            issued=self.issued,
            cost=cost,
            gathers=[self._launch_group(chain) for chain in self.gathers],
            reductions=[self._launch_group(chain) for chain in reductions],
            others=[place for place, each in enumerate(kind) if each is Kind.OTHER],
        )

    def _gathers_twice(self) -> bool:
        """Return whether a parameter is gathered along one axis after another. How much the first
        gather sends may then differ among the ranks of the second, and so the simulated time."""
        inside: set[fx.Node] = set()
        for node in self.nodes:
            continues = any(n in inside for n in node.all_input_nodes)
            if role_of(node) is Role.UNSHARD and (continues or node in self.collective):
                if continues and node in self.collective:
                    return True
                inside.add(node)
        return False

    # --- what may move ---------------------------------------------------------------------

    def _issuers(self) -> dict[fx.Node, fx.Node]:
        """Return the collective by wait, where only the wait reads it."""
        waits = [node for node in self.nodes if is_wait(node) and not has_effect(node)]
        return {wait: wait.all_input_nodes[0] for wait in waits}

    def _kind(self, node: fx.Node) -> Kind:
        if node.op != "call_function":
            return Kind.FIXED
        if node in self.collective:
            c = self.collective[node]
            if has_effect(node) or c.ranks not in self.fsdp_groups:
                return Kind.OTHER
            if node in self.elements:
                return Kind.TAIL
            return Kind.GATHER if c.role is Role.UNSHARD else Kind.REDUCTION
        if may_communicate(node) or next(subgraphs(node), None) is not None:
            return Kind.OTHER
        if is_wait(node):
            later = node in self.issuer and role_of(node) is not Role.UNSHARD
            return Kind.WAIT if later else Kind.FIXED
        if node in self.elements and not has_effect(node) and not self._touches_written(node):
            return Kind.TAIL
        if _is_random_or_effect(node):
            return Kind.FIXED
        shares = all(storage[0] is not node for storage in storages_in(self.storages[node]))
        if shares and not written_arguments(node) and not self._touches_written(node):
            return Kind.FREE
        return Kind.PLAIN

    def _touches_written(self, node: fx.Node) -> bool:
        return any(
            s in self.written
            for n in (node, *node.all_input_nodes)
            for s in storages_in(self.storages[n])
        )

    def _reads(self) -> list[set[int]]:
        """Return by place what must run before: what a node reads, the node before it that used the
        same written storage, and the one before it that had an effect."""
        found: list[set[int]] = []
        touched: dict[Storage, int] = {}
        effect: int | None = None
        for place, node in enumerate(self.nodes):
            reads = {self.at[n] for n in node.all_input_nodes}
            for source in (node, *node.all_input_nodes):
                for storage in storages_in(self.storages[source]):
                    if storage in self.written:
                        if storage in touched:
                            reads.add(touched[storage])
                        touched[storage] = place
            if _is_random_or_effect(node):
                if effect is not None:
                    reads.add(effect)
                effect = place
            reads.discard(place)
            found.append(reads)
        return found

    def _gathers(self) -> list[list[fx.Node]]:
        """Return every gather that may move, after the nodes that prepare it from parameters."""
        found = []
        for c in self.issued:
            if c.role is Role.UNSHARD and c.ranks in self.fsdp_groups and not has_effect(c.node):
                chain = self._ancestors(c.node, lambda n: n.op == "call_function")
                fixed = any(
                    is_wait(n) or n is not c.node and n in self.collective
                    or is_backward(n) is not is_backward(c.node)
                    or _is_random_or_effect(n) or self._touches_written(n)
                    for n in chain
                )  # fmt: skip
                found.append([c.node] if fixed else chain)
        return found

    def _prepares(self) -> set[fx.Node]:
        """Return the nodes that turn shards into what is sent."""
        found = {n for chain in self.gathers for n in chain[:-1]}
        for chain in self.gathers:
            found.update(self._ancestors(chain[-1], _is_fsdp)[:-1])
        return found

    def _reductions(self, kind: list[Kind]) -> list[list[fx.Node]]:
        return [
            self._ancestors(c.node, lambda n: role_of(n) is Role.REDUCE_GRAD)
            for c in self.issued
            if c.node in self.at and kind[self.at[c.node]] is Kind.REDUCTION
        ]

    def _ancestors(self, node: fx.Node, belongs: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """Return a node and the nodes that lead to it and belong to it, in order."""
        found = {node}
        stack = [node]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source not in found and belongs(source):
                    found.add(source)
                    stack.append(source)
        return sorted(found, key=self.at.__getitem__)

    def _launch_group(self, chain: list[fx.Node]) -> LaunchGroup:
        collective = self.collective[chain[-1]]
        scratch = collective.input_bytes if collective.role is Role.UNSHARD else 0
        both = collective.input_bytes + collective.output_bytes
        return LaunchGroup([self.at[n] for n in chain], is_backward(chain[-1]), both, scratch)

    # --- what it takes ---------------------------------------------------------------------

    def _elements_of_tails(self) -> dict[fx.Node, int]:
        """Return the elements of every node after a reduction: as many as the node reads, though
        this rank may store fewer rows."""
        found: dict[fx.Node, int] = {}
        for node in self.nodes:
            if role_of(node) is not Role.REDUCE_GRAD:
                continue
            sources = [n for n in node.all_input_nodes if n in found or n in self.issuer]
            sources = [n for n in sources if role_of(n) is Role.REDUCE_GRAD]
            if node in self.issuer and self.issuer[node] not in found:
                continue  # the wait for the first reduction, whose result is padded
            if sources:
                most = max(found.get(n, _elements(n)) for n in sources)
                if node in self.collective and _scatters(self.collective[node]):
                    most = -(-most // len(self.collective[node].ranks))
                found[node] = _elements(node) if is_getitem(node) else max(_elements(node), most)
        return found

    def _seconds(self, node: fx.Node, cost: dict[fx.Node, Cost]) -> float:
        if node in self.collective:
            return collective_seconds(self._as_on_every_rank(node), self.hardware)
        if node in self.elements or node in self.prepares:
            return 0.0
        return cost[node].seconds

    def _as_on_every_rank(self, node: fx.Node) -> Collective:
        c = self.collective[node]
        first = min(c.ranks)
        c = replace(c, ranks=tuple(rank - first for rank in c.ranks))
        if node in self.elements:
            received = _itemsize(node) * self.elements[node]
            sent = received * (len(c.ranks) if _scatters(c) else 1)
            c = replace(c, input_bytes=sent, output_bytes=received)
        return c

    def _memory(
        self, kept_inside: set[Storage]
    ) -> tuple[dict[Storage, Stored], list[list[Stored]], list[tuple[int, list[int]]]]:
        lives = lifetimes(self.joint, scratch=scratch_bytes(self.joint, self.hardware.device))
        stored: dict[Storage, Stored] = {}
        makes: list[list[Stored]] = [[] for _ in self.nodes]
        change = [[0] * (len(self.nodes) + 1) for _ in range(2 if kept_inside else 1)]
        for storage, size in lives.size.items():
            node = storage[0]
            if node in self.prepares:
                size = 0
            elif node in self.elements:
                size = max(size, self.elements[node] * _itemsize(node))
            entry = Stored(size, lives.born[storage], lives.last_use[storage])
            stored[storage] = entry
            makes[entry.born].append(entry)
            for series in change[:1] if storage in kept_inside else change:
                series[entry.born] += size
                series[entry.last + 1] -= size
        highest = [max(accumulate(series)) for series in change]
        for start, last in self._sent_until():
            # alive as a prepared copy or as the shard itself: counted for both cases
            entry = Stored(self.collective[start].input_bytes, self.at[start], last)
            makes[entry.born].append(entry)
            for series in change:
                series[entry.born] += 2 * entry.bytes  # once more while it is prepared
                series[entry.born + 1] -= entry.bytes
                series[entry.last + 1] -= entry.bytes
        for place, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                for storage in storages_in(self.storages[source]):
                    if storage in stored:
                        stored[storage].readers.add(place)
        left = [
            (most, [most - num for num in accumulate(series[:-1])])
            for most, series in zip(highest, change, strict=True)
        ]
        return stored, makes, left

    def _sent_until(self) -> Iterator[tuple[fx.Node, int]]:
        """Yield every gather with the place up to which it keeps its input alive."""
        waits = {start: self.at[wait] for wait, start in self.issuer.items()}
        for chain in self.gathers:
            yield chain[-1], waits.get(chain[-1], len(self.nodes) - 1)

    def _keeps_alive(self, node: fx.Node, stored: dict[Storage, Stored]) -> list[Stored]:
        sources = [*node.all_input_nodes]
        if node in self.issuer:
            sources += self.issuer[node].all_input_nodes
        found = {s for n in sources for s in storages_in(self.storages[n])}
        if node in self.issuer:
            found |= {(self.issuer[node], -1)}
        return [stored[s] for s in found if s in stored]


def _fsdp_groups(issued: list[Collective]) -> set[tuple[int, ...]]:
    """Return the groups over which only parameters and gradients are communicated."""
    mixed = {c.ranks for c in issued if c.role is None}
    return {c.ranks for c in issued} - mixed


def _is_fsdp(node: fx.Node) -> bool:
    return role_of(node) is not None


def _is_random_or_effect(node: fx.Node) -> bool:
    if node.op != "call_function" or is_wait(node):
        return False
    if is_collective(node):
        return has_effect(node)
    return is_random(node) or (has_effect(node) and not written_arguments(node))


def _scatters(collective: Collective) -> bool:
    return collective.row.result is Result.SCATTERED


def _elements(node: fx.Node) -> int:
    return sum(t.numel() for t in tensors_of(node))


def _itemsize(node: fx.Node) -> int:
    return max((t.dtype.itemsize for t in tensors_of(node)), default=0)
