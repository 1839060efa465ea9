"""Choose how large buckets are: by the links of each group, then by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graph_trainer.core.analysis.collectives import Collective, collective_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.bucketing.assign import Member, by_size, members_of, without_cycles
from graph_trainer.core.passes.bucketing.rewrite import merge
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.torch_private_groups import group_ranks
from graph_trainer.core.units import GIB, MIB

_SATURATED = 0.9
_SIZES_MIB = [2**power for power in range(13)]  # 1 MiB to 4 GiB
_ENDLESS = 2**60  # bytes of a collective whose latency is negligible
_NEIGHBOURS = (1.0, 0.5, 0.25, 0.0, 2.0, 4.0)
"""Sizes that are tried, relative to the saturating one; at 0 nothing is merged."""


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
    best = min(tried, key=lambda each: each[0])
    _, caps, remark = best
    joint.remarks.append(f"the best of {len(tried)}: {remark}" if caps else "nothing to merge")
    joint.remarks += [text for *_, text in tried if text is not remark and caps]
    return caps


def saturating_mib(collective: Collective, hardware: Hardware) -> int:
    """Return the least MiB at which a collective of this kind saturates the links of its group.

    A power of two, up to 4 GiB, at which the collective has nine tenths of the bandwidth of an
    endless one.
    """

    def bytes_per_second(size: int) -> float:
        sized = replace(collective, input_bytes=size, output_bytes=size)
        return size / collective_seconds(sized, hardware)

    wanted = _SATURATED * bytes_per_second(_ENDLESS)
    enough = (mib for mib in _SIZES_MIB if bytes_per_second(mib * MIB) >= wanted)
    return next(enough, _SIZES_MIB[-1])
