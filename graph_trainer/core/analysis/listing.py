"""A joint graph as a table for people: one line for each node, in the order of execution."""

from __future__ import annotations

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import module_of, parameter_of, phase_of, tensors_of
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import aliased_input, is_getitem, is_wait, schema_of
from graph_trainer.core.text import aligned

HEADINGS = ("phase", "module", "op", "shape", "alive", "for parameter")


def listing(joint: JointGraph, *, views: bool = False) -> str:
    """List the nodes of a joint graph. Linear in nodes.

    Args:
        joint: as captured, or after any pass.
        views: also list nodes that take neither time nor memory: views, waits, getitems.

    Returns:
        A table without a newline at its end, with the columns
        phase: forward, loss or backward;
        module: FQN of the module that made the node, or whose backward it is;
        op: name of the operator;
        shape: shape of its first result, on this rank;
        alive: bytes that the graph has allocated and not yet freed while the node runs, without
            parameters and batch;
        for parameter: FQN of the parameter that the node gathers or whose gradient it reduces.

    Example::

        print(listing(joint))
    """
    alive = dict(zip(joint.graph.nodes, lifetimes(joint).live_bytes, strict=True))
    rows = [HEADINGS]
    for node in compute_nodes(joint.graph):
        view = is_getitem(node) or is_wait(node) or aliased_input(node) is not None
        if view and not views:
            continue
        tensors = tensors_of(node)
        schema = schema_of(node)
        rows.append(
            (
                str(phase_of(node) or ""),
                module_of(node) or "",
                str(node.target) if schema is None else schema.name.rpartition("::")[2],
                " x ".join(map(str, tensors[0].shape)) if tensors else "",
                f"{alive[node]:,}",
                parameter_of(node) or "",
            )
        )
    return "\n".join(aligned(rows, right=[HEADINGS.index("alive")]))
