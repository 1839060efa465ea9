"""Unshard chains: from a parameter's placeholder to the gathered tensor that is computed with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from graph_trainer.core.analysis.parameter_flow import computed_from_one_parameter
from graph_trainer.core.graph.annotations import Role, block_of, is_backward, module_of, role_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    aliased_input,
    aten,
    is_collective,
    is_getitem,
    is_wait,
    written_arguments,
)
from graph_trainer.core.graph.signature import InputKind

# Ops that only cast, copy or rearrange their input: in a chain from a parameter they make another
# form of the parameter, not a result computed from it.
_LAYOUT_OPS = {
    aten._to_copy.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.new_zeros.default,
    torch.ops.prims.convert_element_type.default,
}


@dataclass(slots=True, eq=False)
class UnshardChain:
    """The nodes by which forward gathers one parameter."""

    parameter: str
    """FQN."""
    nodes: list[fx.Node] = field(default_factory=list)
    """Every node of the chain in graph order, without the placeholder."""
    forward_readers: list[fx.Node] = field(default_factory=list)
    """Nodes of forward and loss outside the chain that read one of its nodes, in order."""
    backward_readers: list[fx.Node] = field(default_factory=list)
    """The same for backward. They keep the gathered tensor alive until backward."""


def is_layout_only(node: fx.Node) -> bool:
    """Return whether a node only casts, views, slices, copies or gathers its input."""
    return not written_arguments(node) and (
        is_collective(node)
        or is_wait(node)
        or is_getitem(node)
        or node.target in _LAYOUT_OPS
        or aliased_input(node) is not None
    )


def is_form_in_forward(node: fx.Node) -> bool:
    """Return whether a node of forward or loss only casts, views, copies or gathers its inputs."""
    return not is_backward(node) and is_layout_only(node)


def unshard_chains(joint: JointGraph) -> list[UnshardChain]:
    """Return the chain of every parameter that forward gathers, in the order of their first nodes.

    A chain grows from the placeholder by every node all of whose inputs are in it. So it contains
    nested all-gathers over several mesh dimensions, views after the last wait, and the split ->
    getitem -> cat of uneven shards. Linear in nodes.
    """
    owner = computed_from_one_parameter(joint, is_form_in_forward)
    chains = {
        spec.name: UnshardChain(spec.name) for spec, _ in joint.inputs_of(InputKind.PARAMETER)
    }
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        if node in owner:
            chains[owner[node]].nodes.append(node)
            continue
        # a node that reads the shard alone keeps no gathered tensor alive
        gathered = [n for n in node.all_input_nodes if n in owner and n.op != "placeholder"]
        for name in dict.fromkeys(owner[n] for n in gathered):
            chain = chains[name]
            readers = chain.backward_readers if is_backward(node) else chain.forward_readers
            readers.append(node)

    def gathers(chain: UnshardChain) -> bool:
        return any(role_of(node) is Role.UNSHARD for node in chain.nodes)

    return sorted(filter(gathers, chains.values()), key=lambda chain: chain.nodes[0])


def last_bucket(joint: JointGraph, chains: list[UnshardChain]) -> set[str]:
    """Return the parameters that FSDP2 in torchtitan keeps unsharded by default.

    These are the parameters that forward reads after its last repeated block: the final norm and
    the output head, and a tied embedding. Backward starts with them. For a model without repeated
    blocks, or with no parameter after them: the parameters of the module that is read last.
    """
    if not chains:
        return set()
    position = {node: place for place, node in enumerate(joint.graph.nodes)}
    last_read = {}  # by parameter, -1 where forward does not read it
    for chain in chains:
        readers = [position[node] for node in chain.forward_readers]
        last_read[chain.parameter] = max(readers, default=-1)
    in_blocks = (place for name, place in last_read.items() if block_of(name) is not None)
    blocks_end = max(in_blocks, default=-1)
    after = {name for name, place in last_read.items() if place > blocks_end}
    if blocks_end >= 0 and after:
        return after
    last_chain = max(chains, key=lambda chain: last_read[chain.parameter])
    module = module_of(last_chain.nodes[-1])
    return {c.parameter for c in chains if module_of(c.nodes[-1]) == module}
