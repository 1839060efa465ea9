"""The schedule graph: nodes by place, with the facts that a schedule may use.

Ranks of one group must issue the same collectives in the same order. A schedule that decides by
simulated time and memory gives them the same order only if both are the same on each rank. Facts
that differ between ranks are left out or replaced:

- A rank may store fewer rows of a parameter than others, or none. Preparing a shard to be gathered
  costs nothing, and counts as the padded bytes that are sent. Nodes after a reduction cost nothing
  and have as many elements as the ranks receive.
- The links of a group are those of the parallel group that begins with rank 0: a group may lie
  within one machine and a parallel one across two, and the order must be the same.
- If a parameter is gathered along one axis after another, every group counts as one of the next
  kind; `fuse_chained_all_gathers` gathers such parameters at once.
- Groups that communicate other tensors than parameters and gradients may join ranks that compute
  different things, as tensor parallelism over an uneven number of heads does. The collectives over
  them keep their order at any simulated time (`Kind.OTHER`).

Ranks along all other groups compute on tensors of the same shapes, each on a different batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import fx

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.lifetimes import SCRATCH, lifetimes, live_bytes
from graph_trainer.core.graph.annotations import (
    Role,
    is_backward,
    is_context_parallel,
    role_of,
    tensors_of,
)
from graph_trainer.core.graph.collective_kinds import Result
from graph_trainer.core.graph.data_sizes import numel_of
from graph_trainer.core.graph.host_copies import is_host_copy
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    Storage,
    ancestors,
    has_effect,
    is_collective,
    is_getitem,
    is_wait,
    once_nodes,
    storages_in,
    subgraphs,
    value_storages,
    written_by_node,
)
from graph_trainer.core.ordering.sequences import may_communicate
from graph_trainer.core.simulation.collective_costs import collective_seconds, scratch_bytes
from graph_trainer.core.simulation.fusion import NO_FUSION, fuse
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.op_costs import CostKind, costs


class Kind(Enum):
    """What a schedule may do with a node."""

    PLAIN = "plain"
    """Computes; may run earlier."""
    FREE = "free"
    """Takes no time and no memory; may also run later."""
    TAIL = "tail"
    """Between a reduction and the gradients that the graph returns; may run later."""
    WAIT = "wait"
    """Waits for a collective; may run later."""
    GATHER = "gather"
    """Starts a gather of parameters; may start earlier."""
    REDUCTION = "reduction"
    """Starts a reduction of gradients; may start earlier."""
    OTHER = "other"
    """Starts another collective; keeps its order among nodes of this kind; may start earlier."""
    FIXED = "fixed"
    """Keeps its place."""


@dataclass(slots=True)
class LaunchGroup:
    """The nodes that start one gather or reduction: those that prepare it, then the collective."""

    places: list[int]
    backward: bool
    scratch_bytes: int
    """The most bytes that preparing it takes, beside those that are counted node by node."""

    @property
    def start(self) -> int:
        """The place of the collective."""
        return self.places[-1]


@dataclass(slots=True, eq=False)
class Stored:
    """One storage that the graph allocates. Compared by identity."""

    bytes: int
    born: int
    """The place of the node that allocates it."""
    last: int
    """The place of the last node that uses it."""
    readers: set[int] = field(default_factory=set)


class ScheduleGraph:
    """The nodes of a graph by place; lists have one entry for each place.

    Raises as `collectives` does. Linear in nodes to build.

    Args:
        fused: whether the backend fuses ops.
    """

    def __init__(self, joint: JointGraph, hardware: Hardware, fused: bool) -> None:
        self.nodes: list[fx.Node] = list(joint.graph.nodes)
        self.issued = collectives(joint)
        self._joint = joint
        self.hardware = hardware
        self.at = {node: place for place, node in enumerate(self.nodes)}
        self._storages = value_storages(joint.graph)
        self._writes = written_by_node(joint.graph)
        self._runs_once = once_nodes(joint.graph)
        self._collective = {c.node: c for c in self.issued}
        # Context parallelism's groups may have the ranks of FSDP's, but they are other groups.
        others = [c for c in self.issued if c.role is None]
        mixed = {c.ranks for c in others if not is_context_parallel(c.node)}
        self._fsdp_groups = {c.ranks for c in self.issued} - mixed
        if self._gathers_twice():
            self._fsdp_groups = set()
        waits = [node for node in self.nodes if is_wait(node) and not has_effect(node)]
        self._issuer = {wait: wait.all_input_nodes[0] for wait in waits}
        self._written: set[Storage] = set()
        for targets in self._writes.values():
            for target in targets:
                self._written.update(storages_in(self._storages[target]))
        self._elements = self._elements_of_tails()
        self._random_or_effect = set(filter(self._is_random_or_effect, self.nodes))
        chains = self._chains_of_gathers()
        self._prepares: set[fx.Node] = set()
        for chain in chains:
            self._prepares.update(chain[:-1])
            self._prepares.update(ancestors(chain[-1], _is_fsdp))
        # ranks with fewer rows have other FSDP nodes, which must not change what fuses
        fusion = fuse(joint, looks_through=_is_fsdp) if fused else NO_FUSION

        self.kind = [self._kind(node) for node in self.nodes]
        self.gathers = [self._launch_group(chain) for chain in chains]
        self.reductions = [
            self._launch_group([*ancestors(node, _reduces_gradient), node])
            for node, kind in zip(self.nodes, self.kind, strict=True)
            if kind is Kind.REDUCTION
        ]
        self.cost = costs(joint, hardware, fusion)
        """The costs of this rank's nodes: for remarks, never for decisions."""
        self.reads = self._reads()
        """The nodes that must run before a node: its inputs, and nodes that it must not overtake.
        """
        self.seconds = [self._seconds(node) for node in self.nodes]
        """Simulated time; for a collective the time on its group."""
        heavy = (CostKind.MATMUL, CostKind.ATTENTION)
        self.heavy = [self.cost[n].kind in heavy for n in self.nodes]
        """Whether the node is a matrix product or attention."""
        self.backward = [is_backward(n) for n in self.nodes]
        self.group = {self.at[c.node]: c.ranks for c in self.issued if c.node in self.at}
        """By collective, the ranks of its group."""
        self.issuer = {self.at[wait]: self.at[start] for wait, start in self._issuer.items()}
        """By wait, the collective that it waits for."""
        stored = self._stored()
        self.makes: list[list[Stored]] = [[] for _ in self.nodes]
        """The storages that a node allocates."""
        copies = self._copies_of_shards()
        for storage in (*stored.values(), *copies):
            self.makes[storage.born].append(storage)
        self.local = [
            node in self._prepares or (node in self._elements and not storages)
            for node, storages in zip(self.nodes, self.makes, strict=True)
        ]
        """Whether other ranks may not have the node: it prepares a shard, or is a view of the rows
        of a gradient that this rank stores."""
        self.headroom = self._headroom(stored, copies, fusion.kept_inside)
        """How many bytes fewer than at the peak are alive: the fewer of without and with fusion."""
        self.keeps_alive: list[list[Stored]] = []
        """The storages that stay allocated while a node is deferred: its inputs and those of its
        collective, and the scratch memory that the collective needs until its wait."""
        for node in self.nodes:
            kept: set[Storage] = set()
            for source in self._uses(node)[1:]:
                kept.update(storages_in(self._storages[source]))
            if node in self._issuer:
                kept.add((self._issuer[node], SCRATCH))
            self.keeps_alive.append([stored[storage] for storage in kept if storage in stored])

    def _gathers_twice(self) -> bool:
        """Return whether a parameter is gathered along one axis after another.

        The bytes that the first gather sends may then differ between the ranks of the second, and
        so the simulated time.
        """
        gathered: set[fx.Node] = set()  # gathers, and nodes of their unshards after them
        for node in self.nodes:
            if role_of(node) is not Role.UNSHARD:
                continue
            after_gather = not gathered.isdisjoint(node.all_input_nodes)
            if after_gather and node in self._collective:
                return True
            if after_gather or node in self._collective:
                gathered.add(node)
        return False

    # --- what may move ---------------------------------------------------------------------

    def _kind(self, node: fx.Node) -> Kind:
        if node.op != "call_function" or is_host_copy(node):
            return Kind.FIXED
        if node in self._collective:
            c = self._collective[node]
            if has_effect(node) or c.role is None or c.ranks not in self._fsdp_groups:
                return Kind.OTHER
            if node in self._elements:
                return Kind.TAIL
            return Kind.GATHER if c.role is Role.UNSHARD else Kind.REDUCTION
        if may_communicate(node) or next(subgraphs(node), None) is not None:
            return Kind.OTHER
        if is_wait(node):
            may_defer = node in self._issuer and role_of(node) is not Role.UNSHARD
            return Kind.WAIT if may_defer else Kind.FIXED
        if node in self._elements and not has_effect(node) and not self._touches_written(node):
            return Kind.TAIL
        if node in self._random_or_effect:
            return Kind.FIXED
        allocates = any(storage[0] is node for storage in storages_in(self._storages[node]))
        if not allocates and not self._writes[node] and not self._touches_written(node):
            return Kind.FREE
        return Kind.PLAIN

    def _is_random_or_effect(self, node: fx.Node) -> bool:
        if node.op != "call_function" or is_wait(node):
            return False
        if is_collective(node):
            return has_effect(node)
        return self._runs_once[node] or (has_effect(node) and not self._writes[node])

    def _touches_written(self, node: fx.Node) -> bool:
        """Return whether a node uses a storage that a node of the graph writes in place."""
        for used in self._uses(node):
            if not self._written.isdisjoint(storages_in(self._storages[used])):
                return True
        return False

    def _uses(self, node: fx.Node) -> list[fx.Node]:
        """Return a node and its inputs; for a wait also those of its collective, which reads them
        until then."""
        uses = [node, *node.all_input_nodes]
        if node in self._issuer:
            uses += self._issuer[node].all_input_nodes
        return uses

    def _reads(self) -> list[set[int]]:
        """Return, by place, the nodes that must run before a node: its inputs, the last node before
        it that used the same written storage, and the last one before it that had an effect."""
        reads_of: list[set[int]] = []
        touched: dict[Storage, int] = {}
        effect: int | None = None
        for place, node in enumerate(self.nodes):
            reads = {self.at[n] for n in node.all_input_nodes}
            for source in self._uses(node):
                for storage in storages_in(self._storages[source]):
                    if storage in self._written:
                        if storage in touched:
                            reads.add(touched[storage])
                        touched[storage] = place
            if node in self._random_or_effect:
                if effect is not None:
                    reads.add(effect)
                effect = place
            reads.discard(place)
            reads_of.append(reads)
        return reads_of

    def _chains_of_gathers(self) -> list[list[fx.Node]]:
        """Return every gather that may move, each after the nodes that prepare it from parameters.

        Alone if one of these nodes may not move.
        """
        chains = []
        for c in self.issued:
            if c.role is Role.UNSHARD and c.ranks in self._fsdp_groups and not has_effect(c.node):
                before = ancestors(c.node, lambda n: n.op == "call_function")
                chain = [*before, c.node]
                if any(node in self._collective for node in before) or not all(
                    self._may_move_with(node, c.node) for node in chain
                ):
                    chain = [c.node]
                chains.append(chain)
        return chains

    def _may_move_with(self, node: fx.Node, gather: fx.Node) -> bool:
        """Return whether a node that prepares a gather may move with it."""
        return not (
            is_wait(node)
            or is_backward(node) is not is_backward(gather)
            or node in self._random_or_effect
            or self._touches_written(node)
        )

    def _launch_group(self, chain: list[fx.Node]) -> LaunchGroup:
        collective = self._collective[chain[-1]]
        scratch = collective.input_bytes if collective.role is Role.UNSHARD else 0
        return LaunchGroup([self.at[n] for n in chain], is_backward(chain[-1]), scratch)

    # --- what it takes ---------------------------------------------------------------------

    def _elements_of_tails(self) -> dict[fx.Node, int]:
        """Return the elements of every node after a reduction: as many as its inputs have, although
        this rank may store fewer rows."""
        elements: dict[fx.Node, int] = {}
        for node in self.nodes:
            if role_of(node) is not Role.REDUCE_GRAD:
                continue
            sources = [n for n in node.all_input_nodes if n in elements or n in self._issuer]
            sources = [n for n in sources if role_of(n) is Role.REDUCE_GRAD]
            if node in self._issuer and self._issuer[node] not in elements:
                continue  # the wait for the first reduction, whose result is padded
            if not sources:
                continue
            if is_getitem(node):
                elements[node] = _elements(node)
                continue
            most = max(elements.get(n, _elements(n)) for n in sources)
            c = self._collective.get(node)
            if c is not None and c.row.result is Result.SCATTERED:
                most = -(-most // len(c.ranks))
            elements[node] = max(_elements(node), most)
        return elements

    def _seconds(self, node: fx.Node) -> float:
        if node not in self._collective:
            is_same_on_all_ranks = node not in self._elements and node not in self._prepares
            return self.cost[node].seconds if is_same_on_all_ranks else 0.0
        c = self._collective[node]
        first = min(c.ranks)
        c = replace(c, ranks=tuple(rank - first for rank in c.ranks))
        if node in self._elements:
            received = _itemsize(node) * self._elements[node]
            sent = received * len(c.ranks) if c.row.result is Result.SCATTERED else received
            c = replace(c, input_bytes=sent, output_bytes=received)
        return collective_seconds(c, self.hardware)

    def _stored(self) -> dict[Storage, Stored]:
        """Return the storages of the graph and the scratch memory of collectives."""
        lives = lifetimes(self._joint, scratch=scratch_bytes(self._joint, self.hardware.device))
        stored: dict[Storage, Stored] = {}
        for storage, size in lives.size.items():
            node = storage[0]
            if node in self._prepares:
                size = 0
            elif node in self._elements:
                size = max(size, self._elements[node] * _itemsize(node))
            stored[storage] = Stored(size, lives.born[storage], lives.last_use[storage])
        for place, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                for storage in storages_in(self._storages[source]):
                    if storage in stored:
                        stored[storage].readers.add(place)
        return stored

    def _copies_of_shards(self) -> list[Stored]:
        """Return the tensor that each gather sends, alive until its wait.

        It is a prepared copy on some ranks and the shard itself on others, and counts for all.
        """
        waits = {start: self.at[wait] for wait, start in self._issuer.items()}
        copies = []
        for group in self.gathers:
            start = self.nodes[group.start]
            last = waits.get(start, len(self.nodes) - 1)
            copies.append(Stored(self._collective[start].input_bytes, self.at[start], last))
        return copies

    def _headroom(
        self, stored: dict[Storage, Stored], copies: list[Stored], kept_inside: set[Storage]
    ) -> list[int]:
        """Return, by place, how many bytes fewer than at the peak of the graph are alive.

        The fewer of two counts: of all storages, and without those that fused kernels keep inside.
        """
        lifespans_of_copies = []
        for copy in copies:
            lifespans_of_copies.append((copy.born, copy.last, copy.bytes))
            lifespans_of_copies.append((copy.born, copy.born, copy.bytes))  # while it is prepared
        lifespans = {s: (entry.born, entry.last, entry.bytes) for s, entry in stored.items()}
        fused = [lifespan for s, lifespan in lifespans.items() if s not in kept_inside]

        def headroom(lifespans: Sequence[tuple[int, int, int]]) -> list[int]:
            peak = max(live_bytes(len(self.nodes), lifespans))
            alive = live_bytes(len(self.nodes), [*lifespans, *lifespans_of_copies])
            return [peak - num for num in alive]

        return list(map(min, headroom(list(lifespans.values())), headroom(fused)))


def _is_fsdp(node: fx.Node) -> bool:
    return role_of(node) is not None


def _reduces_gradient(node: fx.Node) -> bool:
    return role_of(node) is Role.REDUCE_GRAD


def _elements(node: fx.Node) -> int:
    return sum(map(numel_of, tensors_of(node)))


def _itemsize(node: fx.Node) -> int:
    return max((t.dtype.itemsize for t in tensors_of(node)), default=0)
