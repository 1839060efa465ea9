"""Merge small collectives into few large ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from graph_trainer.core.analysis.collectives import Collective, collective_of
from graph_trainer.core.graph.annotations import clear_bucket_tag
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.bucketing.assign import (
    Member,
    by_size,
    by_transformer_block,
    members_of,
    without_cycles,
)
from graph_trainer.core.passes.bucketing.rewrite import merge
from graph_trainer.core.passes.context import PassContext, check_choice
from graph_trainer.core.sharding.ordered_gloo import BACKEND
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.torch_private_groups import group_backend, group_ranks
from graph_trainer.core.units import GIB, MIB
from graph_trainer.errors import PassError

Strategy = Literal["none", "size", "transformer_block", "auto"]

_SATURATED = 0.9
_SIZES_MIB = [2**power for power in range(13)]  # 1 MiB to 4 GiB
_ENDLESS = 2**60  # bytes of a collective whose latency is negligible
_NEIGHBOURS = (1.0, 0.5, 0.25, 0.0, 2.0, 4.0)
"""Sizes that are tried, relative to the saturating one; at 0 nothing is merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCollectivesOptions:
    """Which collectives are merged."""

    strategy: Strategy = "transformer_block"
    """
    "none": no collective. "size": in graph order, up to `cap_mib`. "transformer_block": those of
    one block and kind, the embedding alone, the final norm with the output head. "auto": by
    size, whichever size is fastest when simulated on the run's hardware, or no collective.
    """

    cap_mib: float = 25.0
    """For "size": MiB of a bucket, of its input or output, whichever is larger."""

    max_span: int = 1000
    """For "size" and "auto": how many nodes of the graph lie between the first and the last
    collective of a bucket, at most. A longer bucket moves more compute and keeps its results alive.
    """

    def __post_init__(self) -> None:
        check_choice("BucketCollectivesOptions.strategy", self.strategy, Strategy)
        if not 0 < self.cap_mib < math.inf:
            raise PassError(
                f"BucketCollectivesOptions.cap_mib is {self.cap_mib:g}; it must be more than 0 MiB"
            )
        if self.max_span < 1:
            raise PassError(
                f"BucketCollectivesOptions.max_span is {self.max_span}; it must be 1 node or more"
            )


@graph_pass(
    stage=Stage.COMMUNICATION,
    summary="Merge tagged collectives into buckets",
    options_type=BucketCollectivesOptions,
    optional=True,
    changes_sums=True,
    has_bitwise_mode=True,
    section="bucketing",
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
    undecided = options.strategy in ("size", "auto") and context.decided is None
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
            else "merged sums may add in another order; PassConfig.bitwise = True keeps it"
        )
    merge(joint, buckets)


def best_caps(
    joint: JointGraph, members: Sequence[Member], context: PassContext, max_span: int
) -> dict[str, float]:
    """Find the best size of a bucket in MiB, by process group.

    Begins with the smallest size that saturates each group's links. Tries this size, a half and a
    quarter of it, nothing, twice and four times it, and takes the one with which the simulated step
    of the slowest rank is shortest within the memory limit; the first of equals. Simulates a copy
    of the graph for each, with the passes that run later, and writes remarks on the results.
    """
    hardware = context.hardware_for(joint)
    # By group, the largest saturating size of its kinds of collectives, on any rank: of the groups
    # along one mesh axis, one may be within a machine and another not.
    start: dict[str, int] = {}
    for (_, group), node in {(m.route.tag, m.route.group): m.node for m in members}.items():
        collective = collective_of(node, group_ranks, None)
        start[group] = max(start.get(group, 0), saturating_mib(collective, hardware))
    start = {group: context.agreement.all_reduce_max(cap) for group, cap in start.items()}
    limit = context.settings.memory_limit_gib
    tried = []
    for factor in _NEIGHBOURS:
        caps = {group: factor * cap for group, cap in start.items()}
        trial = copy_graph(joint)
        merge(trial, without_cycles(by_size(members_of(trial), caps, max_span)))
        context.run_later_passes(trial)
        step = context.simulate_on_all_ranks(trial)
        sizes: dict[str, list[int]] = {}
        for group, cap in caps.items():
            size = f"up to {cap:g} MiB" if cap else "each alone"
            sizes.setdefault(size, []).append(len(group_ranks(group)))
        parts: list[str] = []
        for size, ranks in sizes.items():
            distinct = " and ".join(map(str, dict.fromkeys(ranks)))
            parts.append(f"{size} over {distinct} ranks")
        is_beyond = bool(limit) and step.needed > (limit or 0) * GIB
        remark = (
            f"{', '.join(parts)}: {step.nanoseconds / 1e6:.1f} ms a step, needs "
            f"{step.needed / GIB:.2f} GiB{', more than memory_limit_gib' if is_beyond else ''}"
        )
        worth = (is_beyond, step.needed if is_beyond else step.nanoseconds)
        tried.append((worth, caps, remark))
    _, caps, remark = min(tried, key=lambda trial: trial[0])
    joint.remarks.append(f"the best of {len(tried)}: {remark}" if caps else "nothing to merge")
    joint.remarks += [text for *_, text in tried if text is not remark and caps]
    return caps


def saturating_mib(collective: Collective, hardware: Hardware) -> int:
    """Return the least MiB at which a collective of this kind saturates the links of its group: a
    power of two, up to 4 GiB, at which it has nine tenths of the bandwidth of an endless one."""

    def bytes_per_second(size: int) -> float:
        sized = replace(collective, input_bytes=size, output_bytes=size)
        return size / collective_seconds(sized, hardware)

    wanted = _SATURATED * bytes_per_second(_ENDLESS)
    enough = (mib for mib in _SIZES_MIB if bytes_per_second(mib * MIB) >= wanted)
    return next(enough, _SIZES_MIB[-1])
