"""Add the gradients of a parameter that is read twice before they are reduced."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from graph_trainer.core.graph.annotations import (
    Role,
    copy_annotations,
    infer_value,
    parameters_of,
    role_of,
    tensor_of,
    value_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    aliased_input,
    argument,
    is_collective,
    is_wait,
    plain_kind,
    written_arguments,
)
from graph_trainer.core.graph.writes import Writes
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext

aten = torch.ops.aten

_LINEAR = {"sum", "avg"}
_SCALES = {aten.div.Tensor, aten.mul.Tensor}
_COPIES = {
    aten._to_copy.default,
    aten.clone.default,
    torch.ops.prims.convert_element_type.default,
}


@graph_pass(
    stage=Stage.COMMUNICATION,
    summary="Add the gradients of one parameter before they are reduced, then reduce once",
    default=False,
    optional=True,
    changes_sums=True,
)
def fold_grad_reductions(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Add the gradients of one parameter, then reduce their sum once.

    A tied weight, a layer that is called twice and a parameter that a checkpointed block reads
    have one gradient for each use. Autograd adds the results of their reductions. This pass adds
    the gradients before the first reduction, where both have the same nodes from there to the sum:
    the same collectives over the same groups, divisions, slices and casts.

    Gradients are added in the dtype in which they are reduced, after the cast to it. Not changed:
    reductions with a dtype less precise than that of the sum, and those in float16, in which a sum
    that is not divided yet may overflow.

    Relies on FSDP roles. Changes the order of summation, and so the last bits: this is why it is
    not in the default list. Guarantees the same decision on every rank. Where the uses are far
    apart, as those of a tied embedding, the whole gradient of the first stays alive until that of
    the last is computed: the pass is rolled back where this would break a memory limit, and runs
    after `rematerialize` because the predicted peak is final there. Linear in nodes.
    """
    graph = joint.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    writes: Writes | None = None
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        chains = _two_chains(node)
        if chains is None:
            continue
        early, late = sorted(chains, key=lambda chain: position[chain.nodes[0]])
        writes = writes or Writes(graph)
        # `writes` does not know the sums that this loop has made, which are never written
        if early.source in position and writes.between(early.nodes[0], late.nodes[0], early.source):
            continue
        _fold(node, early, late)


class _Chain(NamedTuple):
    """The nodes that reduce a gradient."""

    source: fx.Node
    """What the first collective reads."""
    nodes: list[fx.Node]
    """From the first collective to what is added."""

    def calls(self) -> list[object]:
        """Return the ops with their arguments, without their input nodes: equal for two chains
        that do the same."""
        return [
            (node.target, fx.map_arg((node.args, node.kwargs), lambda _: None))
            for node in self.nodes
        ]


def _two_chains(add: fx.Node) -> tuple[_Chain, _Chain] | None:
    """Return the reductions whose results are added, if one reduction can replace them."""
    if len(add.args) != 2 or add.kwargs:
        return None
    one, other = add.args
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or one is other:
        return None
    if role_of(one) is not Role.REDUCE_GRAD or not _is_of(one, other):
        return None
    first, second = _chain(one), _chain(other)
    if first is None or second is None or first.calls() != second.calls():
        return None
    x, y = tensor_of(first.source), tensor_of(second.source)
    if (x.shape, x.stride(), x.dtype) != (y.shape, y.stride(), y.dtype):
        return None
    dtypes = {x.dtype, *(tensor_of(node).dtype for node in first.nodes)}
    added_in = tensor_of(add).dtype
    if torch.float16 in dtypes or any(torch.promote_types(d, added_in) != d for d in dtypes):
        return None
    return first, second


def _chain(end: fx.Node) -> _Chain | None:
    """Return the nodes from a gradient to `end`, if no other node reads any of them."""
    nodes: list[fx.Node] = []
    collective = 0
    node = end
    while _is_of(node, end) and _is_step(node):
        nodes.append(node)
        if is_collective(node):
            collective = len(nodes)
        (node,) = node.all_input_nodes
    if not collective:
        return None
    nodes = nodes[:collective][::-1]
    return _Chain(nodes[0].all_input_nodes[0], nodes)


def _is_of(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes have the same role and parameter."""
    return role_of(node) is role_of(other) and parameters_of(node) == parameters_of(other)


def _is_step(node: fx.Node) -> bool:
    """Return whether a node has one input and one reader, and is linear: its result of a sum is
    the sum of its results."""
    if (
        len(node.users) != 1
        or len(node.all_input_nodes) != 1
        or not isinstance(value_of(node), torch.Tensor)
    ):
        return False
    if is_collective(node):
        kind = plain_kind(node)
        return kind is not None and kind.reduces and argument(node, "reduce_op") in _LINEAR
    if node.target in _SCALES:
        return not isinstance(node.args[1], fx.Node)
    if node.target in _COPIES or is_wait(node):
        return True
    return aliased_input(node) is not None and not written_arguments(node)


def _fold(add: fx.Node, early: _Chain, late: _Chain) -> None:
    """Reduce the sum of both gradients as the later one is reduced."""
    reduction = late.nodes[0]
    with add.graph.inserting_before(reduction):
        summed = add.graph.call_function(aten.add.Tensor, (early.source, late.source))
    copy_annotations(reduction, summed)
    infer_value(summed)
    reduction.replace_input_with(late.source, summed)
    add.replace_all_uses_with(late.nodes[-1])
    for node in (add, *reversed(early.nodes)):
        add.graph.erase_node(node)
