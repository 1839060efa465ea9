"""How large a bucket should be: what the network asks for, and the simulator prefers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from graph_trainer.analysis.collective_costs import collective_seconds
from graph_trainer.analysis.collectives import Collective, collective_of
from graph_trainer.analysis.hardware import Hardware
from graph_trainer.compat import group_ranks
from graph_trainer.graph_copy import copy_graph
from graph_trainer.joint_graph import JointGraph
from graph_trainer.passes.bucket_plan import MIB, Member, by_size, members_of, without_circles
from graph_trainer.passes.bucket_rewrite import merge
from graph_trainer.passes.memory_limit import Agree
from graph_trainer.passes.simulator import Simulator

ASKED_BY = 'compile.bucketing.strategy = "auto"'

_SATURATED = 0.9
_SIZES_MIB = [2**power for power in range(13)]  # 1 MiB to 4 GiB
_ENDLESS = 2**60  # bytes of a collective whose latency does not count
_NEIGHBOURS = (1.0, 0.5, 0.25, 0.0, 2.0, 4.0)
"""Of that size; at 0 every collective stays alone, since a bucket costs copies."""


def best_caps(
    joint: JointGraph, members: Sequence[Member], simulator: Simulator, max_span: int
) -> dict[str, float]:
    """MiB that a bucket should hold, by process group.

    Begins with the least that saturates each group's links, and takes that, the half, a quarter,
    nothing, twice or four times as much, whichever makes the simulated step of the slowest rank
    shortest within the memory limit; the first of equals. Simulates a copy of the graph for each,
    with the passes that come behind.

    Raises:
        PassError: no hardware is named.
    """
    hardware = simulator.machine(ASKED_BY)
    start = _saturating(members, hardware, simulator.agree)
    tried = []
    for place, factor in enumerate(_NEIGHBOURS):
        caps = {group: factor * cap for group, cap in start.items()}
        trial = copy_graph(joint)
        merge(trial, without_circles(by_size(members_of(trial), caps, max_span)))
        seconds, peak, fits = simulator.outcome(trial, ASKED_BY)
        tried.append((not fits, seconds if fits else peak, place, caps))
    return min(tried, key=lambda entry: entry[:3])[-1]


def _saturating(members: Sequence[Member], hardware: Hardware, agree: Agree) -> dict[str, float]:
    """For each group the largest that one of its kinds of collectives asks for, on any rank: of
    the groups along one axis of a mesh, one may be within a machine and another not."""
    asked = cache(group_ranks)
    caps: dict[str, int] = {}
    seen = set()
    for member in members:
        group = member.route.group
        if (member.route.tag, group) in seen:
            continue
        seen.add((member.route.tag, group))
        collective = collective_of(member.node, asked, None)
        caps[group] = max(caps.get(group, 0), saturating_mib(collective, hardware))
    return {group: agree(cap) for group, cap in caps.items()}


def saturating_mib(collective: Collective, hardware: Hardware) -> int:
    """The smallest power of two of MiB, up to 4 GiB, at which a collective of this kind over this
    group moves its bytes nine tenths as fast as one without end."""

    def bytes_per_second(size: int) -> float:
        sized = replace(collective, input_bytes=size, output_bytes=size)
        return size / collective_seconds(sized, hardware)

    wanted = _SATURATED * bytes_per_second(_ENDLESS)
    enough = (mib for mib in _SIZES_MIB if bytes_per_second(mib * MIB) >= wanted)
    return next(enough, _SIZES_MIB[-1])
