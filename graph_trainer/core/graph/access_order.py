"""The order of reads and writes of every storage that a graph writes in place."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    Storage,
    is_wait,
    may_write,
    storage_roots,
    storages_in,
    value_storages,
    written_arguments,
)
from graph_trainer.core.graph.signature import with_parts
from graph_trainer.errors import VerificationError


@dataclass(slots=True)
class AccessOrder:
    """Which writes of a storage come before each of its readers. Linear in nodes to build."""

    writers: dict[Storage, list[fx.Node]] = field(default_factory=dict)
    """The nodes that write each storage, in order."""
    writes_before: dict[tuple[fx.Node, Storage], int] = field(default_factory=dict)
    """By reader and storage, how many writes of the storage come before the reader."""

    @classmethod
    def of(cls, joint: JointGraph) -> AccessOrder:
        """Read the order from a graph. Empty if no op writes in place."""
        order = cls()
        if not any(may_write(node.target) for node in joint.graph.nodes):
            return order
        storages, roots = value_storages(joint.graph), storage_roots(joint.graph)
        for node in joint.graph.nodes:
            for target in written_arguments(node):
                order.writers.setdefault(roots[target], []).append(node)
        done = dict.fromkeys(order.writers, 0)
        for node in joint.graph.nodes:
            sources = [*node.all_input_nodes]
            if is_wait(node):  # until then its collective reads
                sources += [n for start in sources for n in start.all_input_nodes]
            for read in {s for n in sources for s in storages_in(storages[n])}:
                if read in done:
                    order.writes_before[node, read] = done[read]
            for target in written_arguments(node):
                done[roots[target]] += 1
        return order

    def check_kept(self, joint: JointGraph) -> AccessOrder:
        """Refuse a graph that reads a storage before another of its writes than this order does.

        Storages whose writers are others than before are left out: whoever replaces a write says
        by its own test that it replaces it rightly.

        Returns:
            the order of the graph, for the check after its next change.

        Raises:
            VerificationError: with the reader, or with the input that is not written any more.
        """
        now = AccessOrder.of(joint)
        written = {root for root, _ in now.writers}
        placeholders = joint.graph.find_nodes(op="placeholder")
        for spec, nodes in with_parts(joint.signature.inputs, placeholders):
            if spec.mutated and written.isdisjoint(nodes):
                raise VerificationError(
                    f"{spec.kind.value} '{spec.name}' is written by the step and no node writes "
                    "it any more: keep the node that does, although nothing reads its result"
                )
        for (reader, storage), count in self.writes_before.items():
            after = now.writes_before.get((reader, storage), count)
            if after != count and self.writers[storage] == now.writers[storage]:
                moved = self.writers[storage][min(count, after)]
                raise VerificationError(
                    f"node '{reader.name}' ({reader.target}) reads '{storage[0].name}' "
                    f"{'before' if after < count else 'after'} '{moved.name}' writes it in place, "
                    "and it was the other way round: keep the order of the two"
                )
        return now
