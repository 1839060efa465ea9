"""Which nodes are computed from one parameter alone, and which lead to one gradient alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.torch_private import inputs_of

Through = Callable[[fx.Node], bool]
"""Whether a node passes on the parameter that it is computed from, or the gradient it leads to."""


def computed_from_one_parameter(joint: JointGraph, through: Through) -> dict[fx.Node, str]:
    """Map every node that is computed from one parameter and nothing else to the parameter's FQN.

    Follows ops for which `through` is true. Placeholders are included. Linear in nodes.
    """
    source = {
        node: spec.name for spec, nodes in joint.inputs_of(InputKind.PARAMETER) for node in nodes
    }
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        name = _only(source, inputs_of(node))
        if name is not None and through(node):
            source[node] = name
    return source


def leading_to_one_gradient(joint: JointGraph, through: Through) -> dict[fx.Node, str]:
    """Map every node that goes into the gradient of one parameter and nothing else to its FQN.

    Follows ops for which `through` is true. Linear in nodes.
    """
    output = joint.output_node()
    returned: dict[fx.Node, set[str | None]] = {}
    for parameter, node in joint.gradients():
        returned.setdefault(node, set()).add(parameter)
    others = set(joint.output_values()) - returned.keys()
    goal: dict[fx.Node, str] = {}
    for node in reversed(joint.graph.nodes):
        if node.op != "call_function" or node in others:
            continue
        if node in returned:
            names = returned[node] | {goal.get(user) for user in node.users if user is not output}
            name = names.pop() if len(names) == 1 else None
        else:
            name = _only(goal, node.users)
        if name is not None and through(node):
            goal[node] = name
    return goal


def _only(known: dict[fx.Node, str], nodes: Iterable[fx.Node]) -> str | None:
    """Return the one FQN that all the nodes have; None if they have several, or a node has none."""
    only = None
    for node in nodes:
        name = known.get(node)
        if name is None or only not in (None, name):
            return None
        only = name
    return only
