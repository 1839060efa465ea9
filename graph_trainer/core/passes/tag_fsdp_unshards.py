"""Decide which gathered parameters backward gathers again."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.analysis.unshard_chains import last_bucket, unshard_chains
from graph_trainer.core.graph.annotations import recompute_policy, set_kept
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext


@graph_pass(
    stage=Stage.TAG,
    summary="Tag parameters to be freed after forward and gathered again in backward",
)
def tag_fsdp_unshards(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Write MUST_RECOMPUTE or MUST_SAVE on whole unshard chains.

    The whole chain is tagged and not only its all-gather: a permuted view or a copy that stayed
    would keep the same bytes alive. A tag MUST_SAVE or MUST_RECOMPUTE that is there already wins.
    Chains that backward does not read, nor a node that it computes again, are not tagged.

    Relies on FSDP roles and on `deduplicate_unshards`. Changes metadata only. n log n.
    """
    chains = unshard_chains(joint)
    settings = context.settings
    kept = {chain.parameter for chain in chains}
    if settings.reshard_after_forward == "always":
        kept = set()
    elif settings.reshard_after_forward != "never" and not settings.pipeline_parallel:
        kept = last_bucket(joint, chains)
    decided = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
    for chain in chains:
        recomputed = any(
            recompute_policy(n) is CheckpointPolicy.MUST_RECOMPUTE for n in chain.forward_readers
        )
        if not (chain.backward_readers or recomputed):
            continue
        for node in chain.nodes:
            if recompute_policy(node) not in decided:
                set_kept(node, chain.parameter in kept)
