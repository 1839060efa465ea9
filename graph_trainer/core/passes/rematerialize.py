"""Recompute tagged nodes in backward: the only pass that duplicates nodes."""

from __future__ import annotations

import copy

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.graph.annotations import (
    Phase,
    copy_annotations,
    is_backward,
    recompute_policy,
    value_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    aliased_input,
    ancestors,
    is_getitem,
    runs_once,
    subgraph_of,
    written_arguments,
)
from graph_trainer.core.graph.writes import Writes, writes_of
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.errors import PassError


@graph_pass(
    stage=Stage.REMATERIALIZE,
    summary="Recompute tagged nodes in backward, free them after forward",
)
def rematerialize(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Let backward read a copy of every node that is tagged MUST_RECOMPUTE.

    A copy is inserted before its first backward reader, and all later ones read it too; inputs that
    are tagged are copied with it. A getitem without a tag counts as its tuple. Random ops and ops
    with an effect are never copied: they count as saved. The subgraphs of a higher-order op are
    copied with it. Copies have no tag, so that a second run changes nothing.

    Relies on phases and on tags, also those of users. Guarantees equal values. Linear in nodes.

    Raises:
        PassError: a tagged node writes in place, or its inputs or result are written in place
            before backward reads them: a second run of the node would give another result.
    """
    recompute(joint, {n for n in joint.graph.nodes if to_be_recomputed(n)})


def recompute(joint: JointGraph, tagged: set[fx.Node]) -> None:
    """Let backward read copies of these forward nodes, as `rematerialize` does. Linear in nodes."""
    if not tagged:
        return
    graph = joint.graph
    writes = writes_of(graph)
    copies: dict[fx.Node, fx.Node] = {}

    def argument_of_copy(source: fx.Node) -> fx.Node:
        module = subgraph_of(source)
        if module is None:
            return copies.get(source, source)
        stem = f"{str(source.target).replace('.', '_')}_recomputed"
        number = 0
        while hasattr(joint.graph_module, f"{stem}_{number}"):
            number += 1
        name = f"{stem}_{number}"
        joint.graph_module.add_submodule(name, _copy_module(module))
        attribute = graph.get_attr(name)
        attribute.meta.update(source.meta)
        return attribute

    for reader in list(graph.nodes):
        if not is_backward(reader):
            continue
        for node in ancestors(reader, lambda n: n in tagged and n not in copies):
            _check_may_run_again(node, reader, writes)
            with graph.inserting_before(reader):
                copies[node] = graph.node_copy(node, argument_of_copy)
            copy_annotations(node, copies[node], phase=Phase.BACKWARD)
        if any(source in copies for source in reader.all_input_nodes):
            reader.args = fx.map_arg(reader.args, lambda n: copies.get(n, n))
            reader.kwargs = fx.map_arg(reader.kwargs, lambda n: copies.get(n, n))
    # Remove originals that only backward read. None has an effect: such nodes are not copied.
    for node in reversed(list(graph.nodes)):
        if node in copies and not node.users:
            subgraphs = [n for n in node.all_input_nodes if subgraph_of(n) is not None]
            graph.erase_node(node)
            for attribute in subgraphs:
                if not attribute.users:
                    graph.erase_node(attribute)


def to_be_recomputed(node: fx.Node) -> bool:
    """Return whether `rematerialize` recomputes a forward node, by its tag or that of its tuple."""
    if node.op != "call_function" or is_backward(node) or runs_once(node):
        return False
    if isinstance(value_of(node), torch.SymInt):
        return False  # a number that data decide is kept: reading it twice would make two symbols
    policy = recompute_policy(node)
    if is_getitem(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if policy not in (None, CheckpointPolicy.MUST_RECOMPUTE):
            return False
        return to_be_recomputed(source)  # a kept getitem would keep the complete tuple alive
    return policy is CheckpointPolicy.MUST_RECOMPUTE


def _copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a subgraph, so that a pass on one of the two never changes the other.

    Tensors are shared; graphs within it are copied too.
    """
    module_copy = fx.GraphModule(module, copy.deepcopy(module.graph))
    for name, inner in list(module_copy.named_children()):
        if isinstance(inner, fx.GraphModule):
            setattr(module_copy, name, _copy_module(inner))
    return module_copy


def _check_may_run_again(node: fx.Node, reader: fx.Node, writes: Writes) -> None:
    """Refuse a node that would give `reader` another result if it ran again."""
    subject = f"node '{node.name}' ({node.target}) is tagged MUST_RECOMPUTE but"
    if written_arguments(node):
        raise PassError(
            f"{subject} writes in place; running it twice would write twice: tag it MUST_SAVE"
        )
    shared = aliased_input(node)
    writer = None if shared is not None else writes.between(node, reader, node)
    if writer is not None:
        raise PassError(f"{subject} '{writer.name}' writes its result in place: tag it MUST_SAVE")
    for source in node.all_input_nodes:
        # a view has the contents of later writes too, whenever it is made
        if source is shared:
            continue
        writer = writes.between(node, reader, source)
        if writer is not None:
            raise PassError(
                f"{subject} reads '{source.name}', which '{writer.name}' writes in place after it: "
                "tag it MUST_SAVE"
            )
