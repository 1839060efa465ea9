"""Recompute tagged nodes in backward: the only pass that duplicates nodes."""

from __future__ import annotations

import copy
import itertools

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

    A copy is inserted before its first backward reader and serves all later ones; inputs that are
    tagged too are copied with it. A getitem without a tag follows the op that made the tuple.
    Random ops and ops with an effect are never copied: they count as saved. The subgraphs of a
    higher-order op are copied with it. Copies have no tag, so that a second run changes nothing.

    Relies on phases and on tags, those of users included. Guarantees equal values. Linear in nodes.

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
        names = (f"{stem}_{number}" for number in itertools.count())
        name = next(name for name in names if not hasattr(joint.graph_module, name))
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
    # the originals that only backward read: those with an effect were refused above
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
        # a getitem that is kept would keep the whole tuple alive
        untagged_or_agreed = policy in (None, CheckpointPolicy.MUST_RECOMPUTE)
        return untagged_or_agreed and to_be_recomputed(source)
    return policy is CheckpointPolicy.MUST_RECOMPUTE


def _copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a subgraph, so that a pass on one of the two never changes the other. Its tensors stay
    shared; graphs within it are copied too."""
    made = fx.GraphModule(module, copy.deepcopy(module.graph))
    for name, inner in list(made.named_children()):
        if isinstance(inner, fx.GraphModule):
            setattr(made, name, _copy_module(inner))
    return made


def _check_may_run_again(node: fx.Node, reader: fx.Node, writes: Writes) -> None:
    """Refuse a node that would give `reader` another result if it ran again."""
    what = f"node '{node.name}' ({node.target}) is tagged MUST_RECOMPUTE but"
    if written_arguments(node):
        raise PassError(
            f"{what} writes in place; running it twice would write twice: tag it MUST_SAVE"
        )
    shared = aliased_input(node)
    if shared is None and (writer := writes.between(node, reader, node)) is not None:
        raise PassError(f"{what} '{writer.name}' writes in place what it made: tag it MUST_SAVE")
    for source in node.all_input_nodes:
        # a view shows later writes whenever it is made
        if source is shared:
            continue
        writer = writes.between(node, reader, source)
        if writer is not None:
            raise PassError(
                f"{what} reads '{source.name}', which '{writer.name}' writes in place after it: "
                "tag it MUST_SAVE"
            )
