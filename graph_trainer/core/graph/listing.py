"""A joint graph as a table for people: one line a node, in the order in which they run."""

from __future__ import annotations

from torch import fx

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.annotations import (
    Phase,
    module_of,
    parameter_of,
    phase_of,
    tensors_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import (
    aliased_input,
    is_getitem,
    is_wait,
    schema_of,
)

HEADINGS = ("phase", "module", "op", "shape", "alive", "for parameter")


def listing(joint: JointGraph, *, views: bool = False) -> str:
    """List the nodes of a joint graph. Linear in nodes.

    Arguments:
        joint: as captured, or after any pass.
        views: also list nodes that only show a tensor in another form (views, waits, getitems)
            and so take neither time nor memory.

    Returns:
        a table without a newline at its end, with the columns
        phase: forward, loss or backward;
        module: FQN of the module that made the node, or whose backward it is;
        op: name of the operator;
        shape: of its first result, on this rank;
        alive: bytes of all that the graph has made and still needs while the node runs,
            parameters and batch not among them;
        for parameter: FQN of the parameter that the node gathers or reduces the gradient of.

    Example::

        print(listing(joint))
    """
    alive = dict(zip(joint.graph.nodes, lifetimes(joint).live_bytes, strict=True))
    rows = [HEADINGS]
    for node in compute_nodes(joint.graph):
        if views or not _is_view(node):
            rows.append(_row(node, alive[node]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = []
    for phase, module, op, shape, bytes_alive, parameter in rows:
        left = (phase, module, op, shape)
        cells = [text.ljust(width) for text, width in zip(left, widths[:4], strict=True)]
        lines.append("  ".join([*cells, bytes_alive.rjust(widths[4]), parameter]).rstrip())
    return "\n".join(lines)


def _row(node: fx.Node, alive: int) -> tuple[str, str, str, str, str, str]:
    tensors = tensors_of(node)
    phase = phase_of(node)
    return (
        phase.value if isinstance(phase, Phase) else "",
        module_of(node) or "",
        _op(node),
        " x ".join(map(str, tensors[0].shape)) if tensors else "",
        f"{alive:,}",
        parameter_of(node) or "",
    )


def _op(node: fx.Node) -> str:
    schema = schema_of(node)
    return str(node.target if schema is None else schema.name.rpartition("::")[2])


def _is_view(node: fx.Node) -> bool:
    return is_getitem(node) or is_wait(node) or (aliased_input(node) is not None)
