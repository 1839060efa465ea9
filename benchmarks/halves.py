"""The memory of the two graphs of a partitioned step."""

import operator

from torch import fx

from graph_trainer.core.analysis.lifetimes import lifetimes, live_bytes
from graph_trainer.core.graph.ops import Storage, storage_roots, storages_in, value_storages
from graph_trainer.core.graph.signature import OutputKind
from graph_trainer.core.partition.exported_step import half_of


def peaks_of(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[int, int]:
    """Return the most bytes alive at once in the two graphs of a partitioned step. Linear in nodes.

    Inputs of forward and scratch memory are not counted. A saved value is alive until its last
    reader.
    """
    first = lifetimes(half_of(forward, OutputKind.SAVED))
    made = lifetimes(half_of(backward, OutputKind.GRADIENT)).live_bytes
    results, roots = value_storages(forward.graph), storage_roots(backward.graph)
    saved = {node.name: node for node in forward.graph.nodes if node.op == "call_function"}
    last: dict[Storage, int] = {}
    for place, node in enumerate(backward.graph.nodes):
        for root, _ in map(roots.__getitem__, node.all_input_nodes):
            if root.op == "placeholder" and root.name in saved:
                last |= dict.fromkeys(storages_in(results[saved[root.name]]), place)
    lifespans = ((0, place, first.size.get(s, 0)) for s, place in last.items())
    kept = live_bytes(len(made), lifespans)
    return first.peak_bytes, max(map(operator.add, kept, made))
