"""Find FSDP roles by structure, for collectives that were not annotated at capture."""

from __future__ import annotations

from torch import fx

from graph_trainer.core.analysis.parameter_flow import (
    computed_from_one_parameter,
    leading_to_one_gradient,
)
from graph_trainer.core.graph.annotations import Role, annotate_node, annotation, role_of
from graph_trainer.core.graph.collective_kinds import Result
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import aten, collective_kind, is_wait, written_arguments


def find_fsdp_roles(joint: JointGraph) -> None:
    """Annotate the unshards and gradient reductions of a graph without SimpleFSDP.

    An all-gather is an unshard when its input reaches exactly one parameter through
    single-input ops; a reduction is a gradient's when its result reaches exactly one gradient
    output through single-input ops. Padding counts as a single-input op: it concatenates a shard
    with zeros of its shape. Nodes between the parameter and its gather, a cast or that padding,
    are part of the unshard. A node that has a role keeps it. Linear in nodes.
    """

    def is_one_form(node: fx.Node) -> bool:
        # a cast, a view or padding, which is its input in another form
        inputs = node.all_input_nodes
        return not written_arguments(node) and (len(inputs) == 1 or node.target is aten.cat.default)

    def is_read_once(node: fx.Node) -> bool:
        # the only reader reads nothing else, or is the output
        reader, *others = node.users
        return not others and (reader.op == "output" or len(reader.all_input_nodes) == 1)

    parameter = computed_from_one_parameter(joint, is_one_form)
    gradient = leading_to_one_gradient(joint, is_read_once)
    seen: set[fx.Node] = set()
    for node in joint.graph.nodes:
        source = node.all_input_nodes[0] if is_wait(node) else node
        kind = collective_kind(source)
        if kind is None:
            continue
        if kind.result is Result.GATHERED and source in parameter:
            # the gather or its wait, and the nodes from the placeholder to it
            stack = [node]
            while stack:
                node = stack.pop()
                if node.op == "call_function" and node not in seen:
                    seen.add(node)
                    _mark(node, Role.UNSHARD, parameter[node])
                    stack += node.all_input_nodes
        elif kind.reduces and source in gradient:
            _mark(node, Role.REDUCE_GRAD, gradient[source])


def _mark(node: fx.Node, role: Role, parameter: str | None) -> None:
    if role_of(node) is None:
        annotate_node(node, annotation(role=role, parameter=parameter))
