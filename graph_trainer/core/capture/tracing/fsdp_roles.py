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

    An all-gather is an unshard if its input follows from exactly one parameter through single-input
    ops. A reduction reduces a gradient if its result leads to exactly one gradient output through
    single-input ops. Padding counts as a single-input op: it concatenates a shard with zeros of its
    shape. Nodes between the parameter and its gather, a cast or that padding, are part of the
    unshard. A node that has a role keeps it. Linear in nodes.
    """

    def is_single_input(node: fx.Node) -> bool:
        inputs = node.all_input_nodes
        return not written_arguments(node) and (len(inputs) == 1 or node.target is aten.cat.default)

    def is_read_once(node: fx.Node) -> bool:
        # the only reader has no other input, or is the output
        reader, *others = node.users
        return not others and (reader.op == "output" or len(reader.all_input_nodes) == 1)

    parameter = computed_from_one_parameter(joint, is_single_input)
    gradient = leading_to_one_gradient(joint, is_read_once)
    seen: set[fx.Node] = set()
    for node in joint.graph.nodes:
        collective = node.all_input_nodes[0] if is_wait(node) else node
        kind = collective_kind(collective)
        if kind is None:
            continue
        if kind.result is Result.GATHERED and collective in parameter:
            # the gather or its wait, and the nodes from the placeholder to it
            stack = [node]
            while stack:
                part = stack.pop()
                if part.op == "call_function" and part not in seen:
                    seen.add(part)
                    _mark(part, Role.UNSHARD, parameter[part])
                    stack += part.all_input_nodes
        elif kind.reduces and collective in gradient:
            _mark(node, Role.REDUCE_GRAD, gradient[collective])


def _mark(node: fx.Node, role: Role, parameter: str | None) -> None:
    if role_of(node) is None:
        annotate_node(node, annotation(role=role, parameter=parameter))
