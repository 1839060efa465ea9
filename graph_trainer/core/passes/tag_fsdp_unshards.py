"""Decide which gathered parameters backward gathers again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.analysis.unshard_chains import UnshardChain, last_bucket, unshard_chains
from graph_trainer.core.graph.annotations import (
    recompute_policy,
    set_recompute_policy,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import PassError

ReshardAfterForward = Literal["default", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TagFsdpUnshardsOptions:
    """What is freed after forward and gathered again in backward."""

    reshard_after_forward: ReshardAfterForward = "default"
    """"always": every parameter that backward reads. "never": none. "default": all but the
    last bucket (final norm and output head), since backward starts with it."""

    pipeline_parallel: bool = False
    """With pipeline parallelism "default" keeps everything: a gather per microbatch costs
    more than it saves."""

    def __post_init__(self) -> None:
        policy, known = self.reshard_after_forward, get_args(ReshardAfterForward)
        if policy not in known:
            hint = did_you_mean(str(policy), known, " (did you mean '{}'?)")
            raise PassError(
                f"reshard_after_forward is {policy!r}{hint}; it must be one of {', '.join(known)}"
            )


@graph_pass(
    stage=Stage.TAG,
    summary="Tag parameters to be freed after forward and gathered again in backward",
    options_type=TagFsdpUnshardsOptions,
)
def tag_fsdp_unshards(joint: JointGraph, options: TagFsdpUnshardsOptions) -> None:
    """Write MUST_RECOMPUTE or MUST_SAVE on whole unshard chains.

    The whole chain is tagged and not only its all-gather: a permuted view or a copy that
    stayed would hold the same bytes. A tag MUST_SAVE or MUST_RECOMPUTE that someone else
    wrote wins. Chains that backward does not read are left alone.

    Relies on FSDP roles and on `deduplicate_unshards`. Changes metadata only. n log n.
    """
    chains = unshard_chains(joint)
    kept = _kept(joint, options, chains)
    decided = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
    for chain in chains:
        if not chain.backward_readers:
            continue
        policy = (
            CheckpointPolicy.MUST_SAVE
            if chain.parameter in kept
            else CheckpointPolicy.MUST_RECOMPUTE
        )
        for node in chain.nodes:
            if recompute_policy(node) not in decided:
                set_recompute_policy(node, policy)


def _kept(
    joint: JointGraph, options: TagFsdpUnshardsOptions, chains: list[UnshardChain]
) -> set[str]:
    everything = {chain.parameter for chain in chains}
    if options.reshard_after_forward == "always":
        return set()
    if options.reshard_after_forward == "never" or options.pipeline_parallel:
        return everything
    return last_bucket(joint, chains)
