"""Where a graph writes its storages in place, and whether a change keeps the order of writes."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from torch import fx

from graph_trainer.core.graph.content import once_per_graph
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    Storage,
    is_wait,
    storage_roots,
    storages_in,
    value_storages,
    written_by_node,
)
from graph_trainer.core.graph.signature import with_parts
from graph_trainer.core.torch_private import inputs_of
from graph_trainer.errors import VerificationError


class Writes:
    """The nodes of a graph that write in place, by storage. Linear to build."""

    def __init__(self, graph: fx.Graph) -> None:
        self._roots = storage_roots(graph)
        self.writers: dict[Storage, list[fx.Node]] = {}
        """The nodes that write each storage, in order."""
        for node, written in written_by_node(graph).items():
            for target in written:
                self.writers.setdefault(self._roots[target], []).append(node)

    def between(self, first: fx.Node, last: fx.Node | None, source: fx.Node) -> fx.Node | None:
        """Return the last node after `first` and before `last` that writes the storage of `source`.

        None if there is no such node. If `last` is None, search to the end of the graph.
        Logarithmic in the number of nodes that write the storage.
        """
        writers = self.writers.get(self._roots[source], [])
        stop = len(writers) if last is None else bisect.bisect_left(writers, last)
        if stop == 0:
            return None
        writer = writers[stop - 1]
        return writer if first < writer else None

    def is_written(self, node: fx.Node) -> bool:
        """Return whether a node of the graph writes the storage of `node` in place."""
        return self._roots[node] in self.writers

    def touched_by(self, node: fx.Node) -> bool:
        """Return whether the storage of a node or of one of its inputs is written in place."""
        return any(self.is_written(n) for n in (node, *node.all_input_nodes))

    def written_inputs(self) -> set[fx.Node]:
        """Return the placeholders whose storage the graph writes."""
        return {root for root, _ in self.writers if root.op == "placeholder"}


writes_of = once_per_graph(Writes)
"""Find the nodes that write in place, by storage. Linear in nodes."""


@dataclass(slots=True)
class AccessOrder:
    """Which writes of a storage come before each of its readers. It does not change with the graph,
    so that it can be compared with a later order. Linear in nodes to build."""

    writers: dict[Storage, list[fx.Node]] = field(default_factory=dict)
    """As in `Writes`."""
    writes_before: dict[tuple[fx.Node, Storage], int] = field(default_factory=dict)
    """By reader and storage, how many writes of the storage come before the reader."""

    def check_kept(self, joint: JointGraph) -> None:
        """Refuse a graph in which a reader comes after more or fewer writes than in this order.

        Storages whose writers have changed are not checked: a pass that replaces a write must prove
        by itself that the replacement is right.

        Raises:
            VerificationError: with the reader, or with the input that is no longer written.
        """
        now = access_order(joint.graph)
        written = {root for root, _ in now.writers}
        for spec, nodes in with_parts(joint.signature.inputs, joint.placeholders()):
            if spec.mutated and written.isdisjoint(nodes):
                raise VerificationError(
                    f"the step writes {spec.kind.value} '{spec.name}', and the graph no longer has "
                    "a node that does: a pass must keep that node although its result is unused"
                )
        if now is self:  # nothing has changed
            return
        for (reader, storage), count in self.writes_before.items():
            after = now.writes_before.get((reader, storage), count)
            if after != count and self.writers[storage] == now.writers[storage]:
                writer = self.writers[storage][min(count, after)]
                position, required = ("before", "after") if after < count else ("after", "before")
                raise VerificationError(
                    f"node '{reader.name}' ({reader.target}) reads '{storage[0].name}' {position} "
                    f"'{writer.name}' writes it in place, and must read it {required} the write: a "
                    "pass must keep the order of the two"
                )


@once_per_graph
def access_order(graph: fx.Graph) -> AccessOrder:
    """Read the order from a graph. Empty if no op writes in place. Linear in nodes."""
    order = AccessOrder(writes_of(graph).writers)
    if not order.writers:
        return order
    storages = value_storages(graph)
    roots = storage_roots(graph)
    written = written_by_node(graph)
    num_writes = dict.fromkeys(order.writers, 0)
    for node in graph.nodes:
        sources = list(inputs_of(node))
        if is_wait(node):  # the collective reads its inputs until the wait
            for collective in inputs_of(node):
                sources += inputs_of(collective)
        for source in sources:
            for storage in storages_in(storages[source]):
                if storage in num_writes:
                    order.writes_before[node, storage] = num_writes[storage]
        for target in written[node]:
            num_writes[roots[target]] += 1
    return order
