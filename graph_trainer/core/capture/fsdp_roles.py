"""Find FSDP roles by structure, for collectives that were not annotated at capture."""

from __future__ import annotations

from torch import fx

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.graph.annotations import (
    Role,
    annotate_node,
    annotation,
    role_of,
)
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph
from graph_trainer.core.graph.ops import aten, collective_kind, is_wait, written_arguments


def find_fsdp_roles(joint: JointGraph) -> None:
    """Annotate the unshards and gradient reductions of a graph without SimpleFSDP.

    An all-gather is an unshard when its input reaches exactly one parameter through
    single-input ops; a reduction is a gradient's when its result reaches exactly one gradient
    output through single-input ops. Padding counts as a single-input op: it concatenates a shard
    with zeros of its shape. Nodes between the parameter and its gather, a cast or that padding,
    are part of the unshard. A node that has a role keeps it. Linear in nodes.
    """
    parameter = _parameters(joint)
    gradient = _gradients(joint)
    seen: set[fx.Node] = set()
    for node in joint.graph.nodes:
        source = node.all_input_nodes[0] if is_wait(node) else node
        kind = collective_kind(source)
        if kind is None:
            continue
        if kind.result is Result.GATHERED and source in parameter:
            _mark_unshard(node, parameter, seen)
        elif kind.reduces and gradient.get(source):
            _mark(node, Role.REDUCE_GRAD, gradient[source])


def _parameters(joint: JointGraph) -> dict[fx.Node, str]:
    """Map every node that is computed from one parameter and nothing else to the parameter."""
    parameter = {
        node: spec.name for spec, nodes in joint.inputs_of(InputKind.PARAMETER) for node in nodes
    }
    for node in joint.graph.nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function" or not inputs or written_arguments(node):
            continue
        names = {parameter.get(n) for n in inputs}
        if len(names) == 1 and (len(inputs) == 1 or node.target is aten.cat.default):
            (name,) = names
            if name is not None:
                parameter[node] = name
    return parameter


def _gradients(joint: JointGraph) -> dict[fx.Node, str | None]:
    """Map every node that reaches one gradient output and nothing else to its parameter."""
    output = joint.output_node()
    gradient: dict[fx.Node, str | None] = {}
    for name, node in joint.gradients():
        gradient[node] = None if node in gradient else name
    for node in reversed(joint.graph.nodes):
        users = [u for u in node.users if u is not output]
        if users:
            only = users[0] if len(node.users) == 1 else None
            single = only is not None and len(only.all_input_nodes) == 1
            gradient[node] = gradient.get(only) if single else None  # type: ignore[arg-type]
    return gradient


def _mark_unshard(gather: fx.Node, parameter: dict[fx.Node, str], seen: set[fx.Node]) -> None:
    """Mark a gather or its wait, and the nodes from the placeholder to it."""
    stack = [gather]
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in seen:
            seen.add(node)
            _mark(node, Role.UNSHARD, parameter[node])
            stack += node.all_input_nodes


def _mark(node: fx.Node, role: Role, parameter: str | None) -> None:
    if role_of(node) is None:
        annotate_node(node, annotation(role=role, parameter=parameter))
