"""A graph as a schedule sees it: only what all ranks of a group see alike.

Ranks of one group must issue the same collectives in the same order, and a schedule that asks a
clock and an account of memory gives them the same order only if these say the same on each. What
differs from rank to rank is left out or replaced:

- A rank may hold fewer rows of a parameter than others, or none. What prepares a shard to be
  gathered costs nothing, and counts by the padded bytes that are sent. What follows a reduction
  costs nothing and has as many elements as what the ranks receive.
- The links of a group are those of the group that begins with rank 0: that one group lies within
  a node and its twin across two is none of the order's business.
- A parameter that is gathered along one axis after another makes every group one of those below:
  `fuse_chained_all_gathers` gathers such parameters at once.
- Groups on which anything but parameters and gradients travels may join ranks that compute
  different things, as tensor parallelism over an uneven number of heads does. What is issued on
  them keeps its order, whatever the clock says (`Kind.OTHER`).

Ranks along all other groups compute on tensors of the same shapes, each on its own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate

from torch import fx

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.analysis.collectives import Collective, collectives
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import (
    Role,
    is_backward,
    role_of,
    tensors_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    Held,
    Storage,
    has_effect,
    held_storages,
    is_collective,
    is_getitem,
    is_random,
    is_wait,
    storages_in,
    subgraphs,
    written_arguments,
)
from graph_trainer.core.ordering.sequences import may_communicate
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.fusion import fuse, no_fusion
from graph_trainer.core.simulation.gloo_buffers import gloo_scratch
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.op_costs import Cost, costs
from graph_trainer.core.simulation.op_costs import Kind as CostKind


class Kind(Enum):
    """What a schedule may do with a node."""

    PLAIN = "plain"
    """Computes; may run earlier."""
    FREE = "free"
    """Takes no time and no memory; may also run later."""
    TAIL = "tail"
    """Between a reduction and the gradients that the graph returns; may run later."""
    WAIT = "wait"
    """May run later."""
    GATHER = "gather"
    """Starts a gather of parameters; may start earlier."""
    REDUCTION = "reduction"
    """Starts a reduction of gradients; may start earlier."""
    OTHER = "other"
    """Communicates otherwise, and keeps its order among its like; may start earlier."""
    FIXED = "fixed"
    """Stays where it is among the others."""


@dataclass(slots=True)
class Unit:
    """What starts one gather or reduction: the nodes that prepare it, and it."""

    places: list[int]
    backward: bool
    bytes: int
    """What it sends and receives."""
    aside: int
    """Bytes that preparing it takes at most, beside what is accounted node by node."""

    @property
    def start(self) -> int:
        """The collective itself."""
        return self.places[-1]


@dataclass(slots=True, eq=False)
class Stored:
    """One storage that the graph makes; another of the same size is another."""

    bytes: int
    born: int
    last: int
    readers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class View:
    """The nodes of a graph by place, and all that a schedule may know of them."""

    nodes: list[fx.Node]
    kind: list[Kind]
    reads: list[set[int]]
    """What must have run before: what a node reads, and what it may not overtake."""
    seconds: list[float]
    """Of a collective: what it takes on its group."""
    own: list[bool]
    """Not there on all ranks, perhaps: prepares a shard, or is a view of a gradient's own rows."""
    heavy: list[bool]
    """A matrix product or attention."""
    backward: list[bool]
    group: dict[int, tuple[int, ...]]
    """By collective, the ranks of its group."""
    issuer: dict[int, int]
    """By wait, the collective that it waits for."""
    makes: list[list[Stored]]
    holds: list[list[Stored]]
    """What running a node later keeps alive: what it reads, or its collective does."""
    left: list[tuple[int, list[int]]]
    """The peak, and how many bytes fewer are alive at every place: as the ops run one by one, and
    as they run fused."""
    issued: list[Collective]
    cost: dict[fx.Node, Cost]
    """What this rank's own nodes take: for remarks, and for nothing that is decided."""
    gathers: list[Unit]
    reductions: list[Unit]
    others: list[int]


def view_of(joint: JointGraph, hardware: Hardware, fused: bool) -> View:
    """Look at a graph. Linear in nodes.

    Raises:
        VerificationError: a collective of which nothing can be said (see `collectives`).
    """
    return _Looking(joint, hardware, fused).view()


class _Looking:
    def __init__(self, joint: JointGraph, hardware: Hardware, fused: bool) -> None:
        self.joint = joint
        self.hardware = hardware
        self.fused = fused
        self.nodes = list(joint.graph.nodes)
        self.at = {node: place for place, node in enumerate(self.nodes)}
        self.held = held_storages(joint.graph)
        self.issued = collectives(joint)
        self.collective = {c.node: c for c in self.issued}
        self.alike = set() if self._gathers_twice() else _groups_alike(self.issued)
        self.issuer = self._issuers()
        self.written = {
            storage
            for node in self.nodes
            for target in written_arguments(node)
            for storage in storages_in(self.held[target])
        }
        self.elements = self._elements_of_tails()
        self.gathers = self._gathers()
        self.prepares = self._prepares()

    def view(self) -> View:
        kind = [self._kind(node) for node in self.nodes]
        communicates = [n for n in self.nodes if kind[self.at[n]] is Kind.OTHER]
        reductions = self._reductions(kind)
        # ranks with fewer rows have other nodes of FSDP's, which must not change what fuses
        whole = fuse(self.joint, looks_through=_is_fsdp) if self.fused else no_fusion()
        cost = costs(self.joint, self.hardware, whole)
        stored, makes, left = self._memory(whole.kept_inside)
        return View(
            nodes=self.nodes,
            kind=kind,
            reads=self._reads(),
            seconds=[self._seconds(n, cost) for n in self.nodes],
            own=[
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
            holds=[self._holds(n, stored) for n in self.nodes],
            left=left,
            issued=self.issued,
            cost=cost,
            gathers=[self._unit(chain) for chain in self.gathers],
            reductions=[self._unit(chain) for chain in reductions],
            others=[self.at[n] for n in communicates],
        )

    def _gathers_twice(self) -> bool:
        """Whether a parameter is gathered along one axis after another. How much the first
        gather sends may differ among the ranks of the second, so that no clock is theirs."""
        inside: set[fx.Node] = set()
        for node in self.nodes:
            behind = any(n in inside for n in node.all_input_nodes)
            if role_of(node) is Role.UNSHARD and (behind or node in self.collective):
                if behind and node in self.collective:
                    return True
                inside.add(node)
        return False

    # --- what may move ---------------------------------------------------------------------

    def _issuers(self) -> dict[fx.Node, fx.Node]:
        """By wait, its collective, where no one else reads that."""
        found = {}
        for node in self.nodes:
            if is_wait(node) and not has_effect(node):
                (source,) = node.all_input_nodes
                found[node] = source
        return found

    def _kind(self, node: fx.Node) -> Kind:
        if node.op != "call_function":
            return Kind.FIXED
        if node in self.collective:
            c = self.collective[node]
            if has_effect(node) or c.ranks not in self.alike:
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
        shares = all(storage[0] is not node for storage in storages_in(self.held[node]))
        if shares and not written_arguments(node) and not self._touches_written(node):
            return Kind.FREE
        return Kind.PLAIN

    def _touches_written(self, node: fx.Node) -> bool:
        return any(
            s in self.written for n in (node, *node.all_input_nodes) for s in _storages(self, n)
        )

    def _reads(self) -> list[set[int]]:
        """What a node reads; who touched a written storage before; what had an effect before."""
        found: list[set[int]] = []
        touched: dict[Storage, int] = {}
        effect: int | None = None
        for place, node in enumerate(self.nodes):
            reads = {self.at[n] for n in node.all_input_nodes}
            for source in (node, *node.all_input_nodes):
                for storage in storages_in(self.held[source]):
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
        """For every gather that may move, what prepares it from parameters alone, and it."""
        found = []
        for c in self.issued:
            if c.role is Role.UNSHARD and c.ranks in self.alike and not has_effect(c.node):
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
        """What turns shards into what is sent."""
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
        """A node and those in front of it that belong to it, in order."""
        found = {node}
        stack = [node]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source not in found and belongs(source):
                    found.add(source)
                    stack.append(source)
        return sorted(found, key=self.at.__getitem__)

    def _unit(self, chain: list[fx.Node]) -> Unit:
        collective = self.collective[chain[-1]]
        aside = collective.input_bytes if collective.role is Role.UNSHARD else 0
        both = collective.input_bytes + collective.output_bytes
        return Unit([self.at[n] for n in chain], is_backward(chain[-1]), both, aside)

    # --- what it takes ---------------------------------------------------------------------

    def _elements_of_tails(self) -> dict[fx.Node, int]:
        """Elements of everything behind a reduction: as many as of what it reads, though a
        rank's own rows may be fewer."""
        found: dict[fx.Node, int] = {}
        for node in self.nodes:
            if role_of(node) is not Role.REDUCE_GRAD:
                continue
            behind = [n for n in node.all_input_nodes if n in found or n in self.issuer]
            behind = [n for n in behind if role_of(n) is Role.REDUCE_GRAD]
            if node in self.issuer and self.issuer[node] not in found:
                continue  # the wait for the first reduction, what it receives is padded
            if behind:
                most = max(found.get(n, _elements(n)) for n in behind)
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
        scratch = gloo_scratch(self.joint) if self.hardware.device == "cpu" else None
        lives = lifetimes(self.joint, scratch=scratch)
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
            # held as something that was prepared or as the shard itself, and counted for both
            entry = Stored(self.collective[start].input_bytes, self.at[start], last)
            makes[entry.born].append(entry)
            for series in change:
                series[entry.born] += 2 * entry.bytes  # once more while it is prepared
                series[entry.born + 1] -= entry.bytes
                series[entry.last + 1] -= entry.bytes
        for place, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                for storage in storages_in(self.held[source]):
                    if storage in stored:
                        stored[storage].readers.add(place)
        left = [
            (most, [most - num for num in accumulate(series[:-1])])
            for most, series in zip(highest, change, strict=True)
        ]
        return stored, makes, left

    def _sent_until(self) -> Iterator[tuple[fx.Node, int]]:
        """Every gather, and the place up to which it holds what it sends."""
        waits = {start: self.at[wait] for wait, start in self.issuer.items()}
        for chain in self.gathers:
            yield chain[-1], waits.get(chain[-1], len(self.nodes) - 1)

    def _holds(self, node: fx.Node, stored: dict[Storage, Stored]) -> list[Stored]:
        sources = [*node.all_input_nodes]
        if node in self.issuer:
            sources += self.issuer[node].all_input_nodes
        found = {s for n in sources for s in storages_in(self.held[n])}
        if node in self.issuer:
            found |= {(self.issuer[node], -1)}
        return [stored[s] for s in found if s in stored]


def _storages(looking: _Looking, node: fx.Node) -> Iterable[Storage]:
    held: Held = looking.held[node]
    return storages_in(held)


def _groups_alike(issued: list[Collective]) -> set[tuple[int, ...]]:
    """Groups on which only parameters and gradients travel."""
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
