"""Carry out the decision: tags on the nodes of blocks, on their inputs, on unshard chains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.analysis.blocks import block_inputs
from graph_trainer.core.analysis.unshard_chains import UnshardChain
from graph_trainer.core.graph.annotations import recompute_policy, set_offload, set_recompute_policy
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_getitem
from graph_trainer.core.passes.plan_memory.block import Block
from graph_trainer.core.passes.tag_activations import FIRST_AC_GRAPH_ID
from graph_trainer.errors import PassError


def tag_blocks(blocks: Sequence[Block], saved: Mapping[str, Iterable[int]]) -> None:
    """Tag the nodes of every block: MUST_SAVE what is saved or may not run again, MUST_RECOMPUTE
    the rest. Tags that are there already stay."""
    for graph_id, block in enumerate(blocks, start=FIRST_AC_GRAPH_ID):
        chosen = set(saved[block.name])
        for number, (op, nodes) in enumerate(zip(block.ops, block.nodes, strict=True)):
            kept = number in chosen or not op.may_recompute
            policy = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
            for node in nodes:
                if recompute_policy(node) is None and not is_getitem(node):
                    set_recompute_policy(node, policy, ac_graph_id=graph_id)


def tag_inputs(joint: JointGraph, offloaded: Iterable[str]) -> None:
    """Tag the inputs of blocks to wait in host memory. Recompute tags that are there stay."""
    for name, nodes in block_inputs(joint).items() if (away := set(offloaded)) else ():
        for node in nodes:
            if name in away and recompute_policy(node) in (None, CheckpointPolicy.MUST_SAVE):
                set_offload(node)


def tag_parameters(chains: Sequence[UnshardChain], kept: Iterable[str]) -> None:
    """Tag whole unshard chains by whether their parameter is kept unsharded.

    Raises:
        PassError: a parameter that the graph does not gather.
    """
    unsharded = set(kept)
    unknown = unsharded - {chain.parameter for chain in chains}
    if unknown:
        raise PassError(
            f"activation_checkpoint.path: keep_unsharded names {', '.join(sorted(unknown)[:3])}, "
            "which this model does not gather: take it out of the table"
        )
    for chain in chains:
        keep = chain.parameter in unsharded
        policy = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
        for node in chain.nodes:
            if recompute_policy(node) is None:
                set_recompute_policy(node, policy)
