"""A joint graph as a table for people: one line for each node, in the order of execution."""

from __future__ import annotations

from torch import fx

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import (
    module_of,
    parameter_of,
    phase_of,
    tensors_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import aliased_input, is_getitem, is_wait, schema_of

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
        if views or not view:
            rows.append(_row(node, alive[node]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = []
    for *left, bytes_alive, parameter in rows:
        cells = [text.ljust(width) for text, width in zip(left, widths, strict=False)]
        lines.append("  ".join([*cells, bytes_alive.rjust(widths[4]), parameter]).rstrip())
    return "\n".join(lines)


def _row(node: fx.Node, alive: int) -> tuple[str, str, str, str, str, str]:
    tensors, schema = tensors_of(node), schema_of(node)
    return (
        str(phase_of(node) or ""),
        module_of(node) or "",
        str(node.target if schema is None else schema.name.rpartition("::")[2]),
        " x ".join(map(str, tensors[0].shape)) if tensors else "",
        f"{alive:,}",
        parameter_of(node) or "",
    )
