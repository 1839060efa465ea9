"""The forward nodes of each repeated block, and which of them backward may run again."""

from __future__ import annotations

import torch
from torch import fx

from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import (
    Phase,
    block_of,
    is_backward,
    module_of,
    phase_of,
    tensors_of,
    value_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import has_effect, is_getitem
from graph_trainer.core.graph.writes import Writes


def forward_blocks(joint: JointGraph) -> dict[str, list[fx.Node]]:
    """Return the forward nodes of each block by its FQN, without those that gather parameters.

    A block is a module in a numbered list, such as layers.3. Linear in nodes.
    """
    parameters = {node for chain in unshard_chains(joint) for node in chain.nodes}
    blocks: dict[str, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        block = forward_block_of(node)
        if block is not None and node not in parameters:
            blocks.setdefault(block, []).append(node)
    return blocks


def block_inputs(joint: JointGraph) -> dict[str, list[fx.Node]]:
    """Return, for each block by its FQN, the tensors that its forward reads from outside the block.

    A tensor is listed for the first block outside its own that reads it. Parameters and the step's
    inputs are left out. Linear in nodes.
    """
    parameters = {node for chain in unshard_chains(joint) for node in chain.nodes}
    inputs: dict[str, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        if phase_of(node) is not Phase.FORWARD or node in parameters:
            continue
        if not isinstance(value_of(node), torch.Tensor):
            continue
        block = block_of(module_of(node))
        for user in node.users:
            reader = block_of(module_of(user))
            if phase_of(user) is Phase.FORWARD and reader not in (None, block):
                inputs.setdefault(reader, []).append(node)
                break
    return inputs


def forward_block_of(node: fx.Node) -> str | None:
    """Return the block whose forward made a node."""
    if node.op != "call_function" or phase_of(node) is not Phase.FORWARD:
        return None
    return block_of(module_of(node))


def is_read_elsewhere(node: fx.Node, block: str) -> bool:
    """Return whether forward or loss reads a result of the node outside its block."""
    readers: list[fx.Node] = []
    for user in node.users:
        readers += user.users if is_getitem(user) else [user]
    return any(not is_backward(reader) and forward_block_of(reader) != block for reader in readers)


def may_run_again(node: fx.Node, writes: Writes) -> bool:
    """Return whether a second run of the node gives the same result.

    It has no effect, draws no random numbers, and no op writes its inputs or its result later.
    """
    if has_effect(node) or not tensors_of(node):
        return False
    values = (node, *(n for n in node.all_input_nodes if n.op != "get_attr"))
    return not any(writes.between(node, None, value) for value in values)
