"""Merge small collectives into few large ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from graph_trainer.core.graph.annotations import clear_bucket_tag
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.bucketing.assign import (
    by_size,
    by_transformer_block,
    members_of,
    without_cycles,
)
from graph_trainer.core.passes.bucketing.auto import best_caps
from graph_trainer.core.passes.bucketing.rewrite import merge
from graph_trainer.core.passes.bucketing.tag_buckets import tag_buckets
from graph_trainer.core.passes.context import PassContext, acts_with, check_choice
from graph_trainer.core.sharding.ordered_gloo import BACKEND
from graph_trainer.core.torch_private_groups import group_backend, group_ranks
from graph_trainer.errors import PassError

Strategy = Literal["none", "size", "transformer_block", "auto"]
_BY_SIZE = ("size", "auto")
"""Strategies that depend on the sizes that this rank stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCollectivesOptions:
    """Which collectives are merged."""

    strategy: Strategy = "transformer_block"
    """
    "none": no collective. "size": in graph order, up to `cap_mib`. "transformer_block": those of
    one block and kind, the embedding alone, the final norm with the output head. "auto": by
    size, whichever size is fastest when simulated on `compile.hardware`, or no collective.
    """

    cap_mib: float = acts_with(25.0, strategy=("size",))
    """For "size": MiB of a bucket, of its input or output, whichever is larger."""

    max_span: int = acts_with(1000, strategy=_BY_SIZE)
    """
    For "size" and "auto": how many nodes of the graph lie between the first and the last
    collective of a bucket, at most. A longer bucket moves more compute and keeps its results alive.
    """

    def __post_init__(self) -> None:
        check_choice("compile.bucketing.strategy", self.strategy, Strategy)
        if not 0 < self.cap_mib < math.inf:
            raise PassError(
                f"compile.bucketing.cap_mib is {self.cap_mib:g}; it must be more than 0 MiB"
            )
        if self.max_span < 1:
            raise PassError(
                f"compile.bucketing.max_span is {self.max_span}; it must be 1 node or more"
            )


@graph_pass(
    stage=Stage.COMMUNICATION,
    summary="Merge tagged collectives into buckets",
    options_type=BucketCollectivesOptions,
    optional=True,
    changes_sums=True,
    has_bitwise_mode=True,
    section="bucketing",
    relies_on=(tag_buckets.name,),
    needs_hardware=lambda options, settings: options.strategy == "auto",
)
def bucket_collectives(
    joint: JointGraph, options: BucketCollectivesOptions, context: PassContext
) -> None:
    """Replace the tagged collectives of each bucket by one.

    The members of a bucket have their tag, group, reduction and dtype in common; gathers may
    mix dtypes. None depends on another. Their order within the bucket is that of the parameters
    in the model, so that the layout does not depend on the graph's order. A gather starts where
    its first member did, a reduction where its last did.

    Gathered values are equal bit by bit. Sums are equal bit by bit on two ranks, and on CPU ranks
    that add in rank order (`cpu_backend`); elsewhere a backend may add the same numbers in another
    order, and with `settings.bitwise` reductions are not merged. Costs memory: a bucket and its
    members are alive together for a moment. n log n in nodes.

    All ranks merge alike: where sizes decide and ranks have different sizes, so that their buckets
    would differ, none of them merges.
    """
    if options.strategy == "none":
        return
    members = members_of(joint)
    mergeable = [m for m in members if not (context.settings.bitwise and m.route.reduction)]
    if options.strategy == "transformer_block":
        assigned = by_transformer_block(joint, mergeable)
    else:
        caps: float | Mapping[str, float] | None = context.decided
        if caps is None and options.strategy == "auto":
            caps = best_caps(joint, mergeable, context, options.max_span)
            joint.decisions[bucket_collectives.name] = caps
        caps = options.cap_mib if caps is None else caps
        assigned = by_size(mergeable, caps, options.max_span)
    buckets = without_cycles(assigned)
    undecided = options.strategy in _BY_SIZE and context.decided is None
    place = {member: index for index, member in enumerate(members)}
    merged = [[place[member] for member in bucket] for bucket in buckets]
    if undecided and not context.agreement.same(merged):
        joint.remarks[:] = [
            "none merged: the ranks would merge different ones, their tensor-parallel parts having "
            'different sizes; the strategy "transformer_block" does not depend on sizes'
        ]
        joint.decisions[bucket_collectives.name] = {}
        buckets = []
    for member in members:  # a second run must not decide again
        clear_bucket_tag(member.node)
    # merged reductions may change the order of a sum, of which two ranks have one
    groups = {m.route.group for b in buckets if len(b) > 1 for m in b if m.route.reduction}
    backends = {group_backend(group) for group in groups if len(group_ranks(group)) > 2}
    if backends:
        planned_for_cpu = backends == {"fake"} and context.hardware_for(joint).device == "cpu"
        joint.remarks.append(
            "every sum keeps its order: CPU ranks add in rank order, whatever the bucket"
            if backends == {BACKEND} or planned_for_cpu
            else "merged sums have the same addends, maybe in another order; compile.bitwise = "
            "true keeps the order"
        )
    merge(joint, buckets)
