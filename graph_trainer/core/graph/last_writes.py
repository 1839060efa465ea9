"""Where a graph writes its storages in place."""

from __future__ import annotations

import bisect

from torch import fx

from graph_trainer.core.graph.ops import Storage, storage_roots, written_arguments


class LastWrites:
    """Where each storage of a graph is written in place. Linear to build."""

    def __init__(self, graph: fx.Graph) -> None:
        self._roots = storage_roots(graph)
        self._writers: dict[Storage, list[fx.Node]] = {}
        for node in graph.nodes:
            for target in written_arguments(node):
                self._writers.setdefault(self._roots[target], []).append(node)

    def between(self, first: fx.Node, last: fx.Node | None, source: fx.Node) -> fx.Node | None:
        """Return the last node after `first` and before `last` that writes the storage of `source`.

        None if none does; a `last` of None is the end of the graph. Logarithmic in the number of
        nodes that write the storage.
        """
        writers = self._writers.get(self._roots[source], [])
        stop = len(writers) if last is None else bisect.bisect_left(writers, last)
        return writers[stop - 1] if stop and first < writers[stop - 1] else None

    def is_written(self, node: fx.Node) -> bool:
        """Tell whether a node of the graph writes the storage of `node` in place."""
        return self._roots[node] in self._writers

    def written_inputs(self) -> set[fx.Node]:
        """Return the placeholders whose storage the graph writes."""
        return {root for root, _ in self._writers if root.op == "placeholder"}
