"""Where a graph writes its storages in place."""

from __future__ import annotations

import bisect
import math

from torch import fx

from graph_trainer.core.graph.ops import Storage, storage_roots, written_arguments


class LastWrites:
    """Where each storage of a graph is written in place. Linear to build."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: index for index, node in enumerate(graph.nodes)}
        self._roots = storage_roots(graph)
        self._writers: dict[Storage, list[fx.Node]] = {}
        for node in graph.nodes:
            for target in written_arguments(node):
                self._writers.setdefault(self._roots[target], []).append(node)

    def between(self, first: fx.Node, last: fx.Node | None, source: fx.Node) -> fx.Node | None:
        """Return the last node that writes a storage within a part of the graph.

        Logarithmic in the number of nodes that write the storage.

        Args:
            first: the part begins after this node.
            last: the part ends before this node; None for the end of the graph.
            source: a node whose value lives in the storage.

        Returns:
            The node, None if none writes the storage there.
        """
        writers = self._writers.get(self._roots[source], ())
        end = math.inf if last is None else self._position[last]
        stop = bisect.bisect_left(writers, end, key=self._position.__getitem__)
        if stop == 0 or self._position[writers[stop - 1]] <= self._position[first]:
            return None
        return writers[stop - 1]

    def is_written(self, node: fx.Node) -> bool:
        """Tell whether a node of the graph writes the storage of `node` in place."""
        return self._roots[node] in self._writers

    def written_inputs(self) -> set[fx.Node]:
        """Return the placeholders whose storage the graph writes."""
        return {root for root, _ in self._writers if root.op == "placeholder"}
