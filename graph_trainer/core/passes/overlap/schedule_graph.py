"""A graph as it is scheduled: nodes by place, with what a schedule may know of them.

Ranks of one group must issue the same collectives in the same order. A schedule that decides by
simulated time and memory gives them the same order only if both are the same on each rank. What
differs from rank to rank is left out or replaced:

- A rank may store fewer rows of a parameter than others, or none. Preparing a shard to be gathered
  costs nothing, and counts as the padded bytes that are sent. Nodes after a reduction cost nothing
  and have as many elements as the ranks receive.
- The links of a group are those of the group that begins with rank 0: whether a group lies within
  one machine or a parallel group across two must not change the order.
- A parameter that is gathered along one axis after another makes every group one of the following
  kind: `fuse_chained_all_gathers` gathers such parameters at once.
- Groups over which anything but parameters and gradients is communicated may join ranks that
  compute different things, as tensor parallelism over an uneven number of heads does. The
  collectives over them keep their order, whatever the simulated time is (`Kind.OTHER`).

Ranks along all other groups compute on tensors of the same shapes, each on a batch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from torch import fx

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.analysis.lifetimes import lifetimes, live_bytes
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
    """What starts one gather or reduction: the nodes that prepare it, and the collective."""

    places: list[int]
    backward: bool
    scratch_bytes: int
    """Bytes that preparing it takes at most, beside what is counted node by node."""

    @property
    def start(self) -> int:
        """The place of the collective."""
        return self.places[-1]


@dataclass(slots=True, eq=False)
class Stored:
    """One storage that the graph allocates. Equal to itself alone."""

    bytes: int
    born: int
    """The place of the node that allocates it."""
    last: int
    """The place of the last node that uses it."""
    readers: set[int] = field(default_factory=set)


class ScheduleGraph:
    """The nodes of a graph by place; lists have one entry a place. `fused` says whether the backend
    fuses ops. Errors are those of `collectives`. Linear in nodes to build."""

    def __init__(self, joint: JointGraph, hardware: Hardware, fused: bool) -> None:
        self.nodes: list[fx.Node] = list(joint.graph.nodes)
        self.issued = collectives(joint)
        self._joint = joint
        self.hardware = hardware
        self.at = {node: place for place, node in enumerate(self.nodes)}
        self._storages = value_storages(joint.graph)
        self._writes, self._runs_once = written_by_node(joint.graph), once_nodes(joint.graph)
        self._collective = {c.node: c for c in self.issued}
        # Context parallelism's groups may have the ranks of FSDP's, but they are other groups.
        others = [c for c in self.issued if c.role is None]
        mixed = {c.ranks for c in others if not is_context_parallel(c.node)}
        self._fsdp_groups = {c.ranks for c in self.issued} - mixed
        if self._gathers_twice():
            self._fsdp_groups = set()
        waits = [node for node in self.nodes if is_wait(node) and not has_effect(node)]
        self._issuer = {wait: wait.all_input_nodes[0] for wait in waits}
        self._written = {
            storage
            for targets in self._writes.values()
            for target in targets
            for storage in storages_in(self._storages[target])
        }
        self._elements = self._elements_of_tails()
        self._random_or_effect = set(filter(self._is_random_or_effect, self.nodes))
        chains = self._chains_of_gathers()
        self._prepares = {n for chain in chains for n in chain[:-1]}
        for *_, start in chains:
            self._prepares.update(ancestors(start, _is_fsdp))
        # ranks with fewer rows have other FSDP nodes, which must not change what fuses
        whole = fuse(joint, looks_through=_is_fsdp) if fused else NO_FUSION

        self.kind = [self._kind(node) for node in self.nodes]
        self.gathers = [self._launch_group(chain) for chain in chains]
        self.reductions = [
            self._launch_group([*ancestors(node, lambda n: role_of(n) is Role.REDUCE_GRAD), node])
            for node, kind in zip(self.nodes, self.kind, strict=True)
            if kind is Kind.REDUCTION
        ]
        self.cost = costs(joint, hardware, whole)
        """What this rank's nodes cost: for remarks alone, never for a decision."""
        self.reads = self._reads()
        """What must run before: what a node reads, and what it may not overtake."""
        self.seconds = [self._seconds(node) for node in self.nodes]
        """Simulated time; of a collective the time on its group."""
        heavy = (CostKind.MATMUL, CostKind.ATTENTION)
        self.heavy = [self.cost[n].kind in heavy for n in self.nodes]
        """Whether the node is a matrix product or attention."""
        self.backward = [is_backward(n) for n in self.nodes]
        self.group = {self.at[c.node]: c.ranks for c in self.issued if c.node in self.at}
        """By collective, the ranks of its group."""
        self.issuer = {self.at[wait]: self.at[start] for wait, start in self._issuer.items()}
        """By wait, the collective that it waits for."""
        stored, self.makes, self.headroom = self._memory(whole.kept_inside)
        self.local = [
            n in self._prepares or (n in self._elements and not made)
            for n, made in zip(self.nodes, self.makes, strict=True)
        ]
        """Whether other ranks may not have the node: it prepares a shard, or is a view of the rows
        of a gradient that this rank stores."""
        self.keeps_alive: list[list[Stored]] = []
        """What stays allocated while a node is deferred: what it reads, or its collective does, and
        the scratch memory, storage -1, that the collective takes until the wait for it."""
        for node in self.nodes:
            read = {s for n in self._uses(node)[1:] for s in storages_in(self._storages[n])}
            if node in self._issuer:
                read.add((self._issuer[node], -1))
            self.keeps_alive.append([stored[s] for s in read if s in stored])

    def _gathers_twice(self) -> bool:
        """Return whether a parameter is gathered along one axis after another.

        How much the first gather sends may then differ among the ranks of the second, and so the
        simulated time.
        """
        inside: set[fx.Node] = set()
        for node in self.nodes:
            continues = any(n in inside for n in node.all_input_nodes)
            if role_of(node) is Role.UNSHARD and (continues or node in self._collective):
                if continues and node in self._collective:
                    return True
                inside.add(node)
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
            later = node in self._issuer and role_of(node) is not Role.UNSHARD
            return Kind.WAIT if later else Kind.FIXED
        if node in self._elements and not has_effect(node) and not self._touches_written(node):
            return Kind.TAIL
        if node in self._random_or_effect:
            return Kind.FIXED
        shares = all(storage[0] is not node for storage in storages_in(self._storages[node]))
        if shares and not self._writes[node] and not self._touches_written(node):
            return Kind.FREE
        return Kind.PLAIN

    def _is_random_or_effect(self, node: fx.Node) -> bool:
        if node.op != "call_function" or is_wait(node):
            return False
        if is_collective(node):
            return has_effect(node)
        return self._runs_once[node] or (has_effect(node) and not self._writes[node])

    def _touches_written(self, node: fx.Node) -> bool:
        return any(
            s in self._written for n in self._uses(node) for s in storages_in(self._storages[n])
        )

    def _uses(self, node: fx.Node) -> list[fx.Node]:
        """Return a node and what it reads: for a wait also what its collective reads until then."""
        issuer = self._issuer.get(node)
        return [node, *node.all_input_nodes, *([] if issuer is None else issuer.all_input_nodes)]

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
        """Return every gather that may move, after the nodes that prepare it from parameters."""
        chains = []
        for c in self.issued:
            if c.role is Role.UNSHARD and c.ranks in self._fsdp_groups and not has_effect(c.node):
                chain = [*ancestors(c.node, lambda n: n.op == "call_function"), c.node]
                fixed = any(
                    is_wait(n) or n is not c.node and n in self._collective
                    or is_backward(n) is not is_backward(c.node)
                    or n in self._random_or_effect or self._touches_written(n)
                    for n in chain
                )  # fmt: skip
                chains.append([c.node] if fixed else chain)
        return chains

    def _launch_group(self, chain: list[fx.Node]) -> LaunchGroup:
        collective = self._collective[chain[-1]]
        scratch = collective.input_bytes if collective.role is Role.UNSHARD else 0
        return LaunchGroup([self.at[n] for n in chain], is_backward(chain[-1]), scratch)

    # --- what it takes ---------------------------------------------------------------------

    def _elements_of_tails(self) -> dict[fx.Node, int]:
        """Return the elements of every node after a reduction: as many as the node reads, though
        this rank may store fewer rows."""
        elements: dict[fx.Node, int] = {}
        for node in self.nodes:
            if role_of(node) is not Role.REDUCE_GRAD:
                continue
            sources = [n for n in node.all_input_nodes if n in elements or n in self._issuer]
            sources = [n for n in sources if role_of(n) is Role.REDUCE_GRAD]
            if node in self._issuer and self._issuer[node] not in elements:
                continue  # the wait for the first reduction, whose result is padded
            if sources:
                most = max(elements.get(n, _elements(n)) for n in sources)
                c = self._collective.get(node)
                if c is not None and c.row.result is Result.SCATTERED:
                    most = -(-most // len(c.ranks))
                elements[node] = _elements(node) if is_getitem(node) else max(_elements(node), most)
        return elements

    def _seconds(self, node: fx.Node) -> float:
        if node not in self._collective:
            alike = node not in self._elements and node not in self._prepares
            return self.cost[node].seconds if alike else 0.0
        c = self._collective[node]
        first = min(c.ranks)
        c = replace(c, ranks=tuple(rank - first for rank in c.ranks))
        if node in self._elements:
            received = _itemsize(node) * self._elements[node]
            sent = received * (len(c.ranks) if c.row.result is Result.SCATTERED else 1)
            c = replace(c, input_bytes=sent, output_bytes=received)
        return collective_seconds(c, self.hardware)

    def _memory(
        self, kept_inside: set[Storage]
    ) -> tuple[dict[Storage, Stored], list[list[Stored]], list[int]]:
        """Return the storages; by place, those that the node allocates; and by place, how many
        bytes fewer than at the peak are alive: the least of as the ops run one by one, and as they
        run fused."""
        lives = lifetimes(self._joint, scratch=scratch_bytes(self._joint, self.hardware.device))
        stored: dict[Storage, Stored] = {}
        makes: list[list[Stored]] = [[] for _ in self.nodes]
        spans: list[list[tuple[int, int, int]]] = [[] for _ in range(2 if kept_inside else 1)]
        for storage, size in lives.size.items():
            node = storage[0]
            if node in self._prepares:
                size = 0
            elif node in self._elements:
                size = max(size, self._elements[node] * _itemsize(node))
            entry = Stored(size, lives.born[storage], lives.last_use[storage])
            stored[storage] = entry
            makes[entry.born].append(entry)
            for each in spans[:1] if storage in kept_inside else spans:
                each.append((entry.born, entry.last, size))
        gathering: list[tuple[int, int, int]] = []
        waits = {start: self.at[wait] for wait, start in self._issuer.items()}
        for start in [self.nodes[group.start] for group in self.gathers]:
            # alive until the wait as a prepared copy or as the shard itself: counted for both
            last = waits.get(start, len(self.nodes) - 1)
            entry = Stored(self._collective[start].input_bytes, self.at[start], last)
            makes[entry.born].append(entry)
            # once more while it is prepared
            gathering += [(entry.born, end, entry.bytes) for end in (entry.born, entry.last)]
        for place, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                for storage in storages_in(self._storages[source]):
                    if storage in stored:
                        stored[storage].readers.add(place)
        headroom = []
        for each in spans:
            most = max(live_bytes(len(self.nodes), each))
            alive = live_bytes(len(self.nodes), [*each, *gathering])
            headroom.append([most - num for num in alive])
        return stored, makes, list(map(min, zip(*headroom, strict=True)))


def _is_fsdp(node: fx.Node) -> bool:
    return role_of(node) is not None


def _elements(node: fx.Node) -> int:
    return sum(map(numel_of, tensors_of(node)))


def _itemsize(node: fx.Node) -> int:
    return max((t.dtype.itemsize for t in tensors_of(node)), default=0)
