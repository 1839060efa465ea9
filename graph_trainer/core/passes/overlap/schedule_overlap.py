"""Put the starts and waits of all collectives where communication overlaps with compute."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from graph_trainer.core.analysis.collective_purpose import traffic_of
from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.content import unchanging
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import getitems_of, is_collective, is_wait
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.overlap.schedule_graph import ScheduleGraph
from graph_trainer.core.passes.overlap.scheduler import ScheduleOverlapOptions, Scheduler
from graph_trainer.core.simulation.collective_costs import scratch_bytes
from graph_trainer.core.simulation.timeline import Timeline, play
from graph_trainer.core.units import gib

_HOST_GROWTH = 0.03
"""The part of the graph's peak, without inputs, that may be added on CPU ranks. They share the
host's memory, and gloo's threads allocate when they run, which is later than in the simulation."""
_TRIES = 3
"""The most orders that are tried if memory is short, before the one that does not raise the peak.
"""
_MARGIN = 0.9
"""The growth of the next order, as a part of the growth that would just fit."""
_LEAST = 5e-6
"""The seconds by which the exposed time of a collective must change for a line in the report."""


@graph_pass(
    stage=Stage.SCHEDULE,
    summary="Start collectives early and wait late, by the simulator's clock",
    options_type=ScheduleOverlapOptions,
    needs_hardware=lambda options, settings: True,
    optional=True,
)
def schedule_overlap(
    joint: JointGraph, options: ScheduleOverlapOptions, context: PassContext
) -> None:
    """Put every collective's start and wait where communication overlaps with compute.

    Simulates the graph in its current order, and changes that order where communication can
    overlap: parameters are gathered ahead, gradients are reduced as soon as they are computed and
    waited for when the reduction has ended, other collectives start before compute that they do not
    depend on, and such compute runs while other compute would wait (see `Scheduler`).

    Changes the order of nodes only, and not that of nodes that write the same memory, draw random
    numbers or have effects. The getitems of an op follow it directly. No gather moves from backward
    into forward. Gathers keep their order, and so do first reductions of gradients, and all other
    collectives.

    Cannot hang: the ranks of a group have the same schedule graph (see `schedule_graph`) and make
    the same decisions; if batches or tensor-parallel parts have different sizes, so that ranks
    would decide differently, no rank moves anything. Bounds memory: the memory that a step needs
    grows at most up to the memory limit, or up to the memory of a device of the hardware's profile,
    with gaps of the allocator; on CPU ranks by at most 3%; and at no node by more than
    `max_in_flight_mib`, if that is set. If this costs time, a remark reports it. No heavy node
    overtakes more than `max_consecutive_compute` others, and none overtakes while a reduction is
    ready that may not start yet. n log n in nodes.

    Another graph of the step, for a batch of another shape, gets the order of the first: its rank
    captures it alone, and must issue the collectives that the other ranks issue. The memory that
    this order needs is not bounded; a graph that needs more than the limit is refused.

    Raises:
        VerificationError: a collective that cannot be described (see `collectives`).
    """
    hardware = context.hardware_for(joint)
    with unchanging(joint.graph):
        graph = ScheduleGraph(joint, hardware, context.settings.other_memory(joint).fused)
    # by node, its op and the places of its inputs: equal for batches of other shapes
    program: list[object] = []
    for node in graph.nodes:
        program.append((str(node.target), *(graph.at[n] for n in node.all_input_nodes)))
    # `order` has the places of the old order, in the new one
    first_program, order = context.decided or (None, [])
    bound = ""
    if first_program != program:
        order, bound = _within_memory(joint, graph, options, context)
        # the ranks must agree on the order of collectives and waits, counted in the old order
        nodes = [n for n in graph.nodes if is_collective(n) or is_wait(n)]
        ordinal = {graph.at[node]: number for number, node in enumerate(nodes)}
        if not context.agreement.same([ordinal[place] for place in order if place in ordinal]):
            joint.remarks.append(
                "nothing moved: the ranks would order their collectives differently, because their "
                "batches or their tensor-parallel parts have different sizes"
            )
            order = sorted(order)
    joint.decisions[schedule_overlap.name] = (program, order)
    if order == sorted(order):
        if bound:
            joint.remarks.append(bound)
        return

    before = _simulated(joint, graph)
    put_in_order(graph, order)
    after = _simulated(joint, graph)
    summary, *lines = _remarks_on(joint, graph, order, before, after)
    if bound:
        summary = f"{summary}; {bound}"
    joint.remarks += [summary, *lines]


def put_in_order(graph: ScheduleGraph, order: Sequence[int]) -> None:
    """Put the nodes in an order of their places."""
    *body, output = [graph.nodes[place] for place in order]
    for node in body:
        output.prepend(node)
    if any(place > later for place, later in itertools.pairwise(order)):
        # the results of an op that moved follow it: until the last is taken out, all are alive
        for node in body:
            for getitem in reversed(getitems_of(node)):
                node.append(getitem)


def _within_memory(
    joint: JointGraph,
    graph: ScheduleGraph,
    options: ScheduleOverlapOptions,
    context: PassContext,
) -> tuple[list[int], str]:
    """Return the order that overlaps most within the memory limit, the same on all ranks.

    With a text about what bounds it and what that costs, "" if the bound costs no time. The
    scheduler does not count gaps of the allocator: if these exceed the headroom, orders with less
    growth are tried, the last without any.
    """
    old = range(len(graph.nodes))

    def needed(order: Sequence[int]) -> int:
        put_in_order(graph, order)
        num_bytes = context.needed_on_all_ranks(joint)
        put_in_order(graph, old)
        return num_bytes

    def seconds(order: Sequence[int]) -> float:
        put_in_order(graph, order)
        timeline = _simulated(joint, graph)
        put_in_order(graph, old)
        return timeline.step_seconds

    unbounded = Scheduler(graph, options, None).run()
    max_in_flight = options.max_in_flight_mib
    allowed = context.allowed_bytes(joint)
    needed_before = needed(old)
    on_host = graph.hardware.device == "cpu"
    if on_host:
        scratch = scratch_bytes(joint, graph.hardware.device)
        peak = context.agreement.all_reduce_max(lifetimes(joint, scratch=scratch).peak_bytes)
        allowed = min(allowed, needed_before + int(peak * _HOST_GROWTH))
    if max_in_flight is None and needed(unbounded) <= allowed:
        return unbounded, ""
    headroom = max(0, allowed - needed_before)
    growth = headroom
    order = Scheduler(graph, options, growth).run()
    for number in range(1, _TRIES + 1):
        if not growth:
            break
        excess = needed(order) - allowed
        if excess <= 0:
            break
        fits = _MARGIN * headroom / (headroom + excess)  # if gaps grow with the bytes in flight
        growth = int(growth * fits) if number < _TRIES else 0
        order = Scheduler(graph, options, growth).run()
    if not growth and needed(order) > max(allowed, needed_before):
        order = list(old)
    bounded_seconds = seconds(order)
    cost = bounded_seconds - seconds(unbounded)
    if cost < _LEAST:
        return order, ""
    if max_in_flight is not None:
        limit = f"ScheduleOverlapOptions.max_in_flight_mib = {max_in_flight}"
    elif on_host:
        limit = f"{_HOST_GROWTH:.0%} of the peak, which is what CPU ranks may add,"
    else:
        limit = f"the memory that is left, {gib(headroom)} of {gib(allowed)} GiB,"
    return order, (
        f"{limit} bounds what is in flight: with more a step would take {cost * 1e3:,.1f} ms "
        f"({cost / bounded_seconds:.1%}) less"
    )


def _simulated(joint: JointGraph, graph: ScheduleGraph) -> Timeline:
    """Simulate the joint graph in its current order."""
    with unchanging(joint.graph):
        return play(joint, graph.issued, graph.cost, graph.hardware)


def _remarks_on(
    joint: JointGraph,
    graph: ScheduleGraph,
    order: Sequence[int],
    before: Timeline,
    after: Timeline,
) -> list[str]:
    """Describe what moved, in one line, then each collective whose exposed time has changed.

    Linear in nodes.

    Args:
        order: the places of the old order, in the new one.
        before, after: the timelines of both orders.
    """
    traffic = traffic_of(graph.issued, dict(joint.gradients()))
    old = _num_computed_before(graph, range(len(order)))
    new = _num_computed_before(graph, order)
    earlier = {graph.nodes[place]: old[place] - new[place] for place in graph.group}
    seconds_before = _exposed_seconds(before)
    seconds_now = _exposed_seconds(after)
    sums = []
    for kind in dict.fromkeys(traffic.values()):
        nodes = [node for node in earlier if traffic[node] is kind]
        num_moved = sum(earlier[node] > 0 for node in nodes)
        total_before = sum(seconds_before[node] for node in nodes)
        total_now = sum(seconds_now[node] for node in nodes)
        sums.append(
            f"{kind.value.replace('_', ' ')}: {num_moved} of {len(nodes)} start earlier, exposed "
            f"{total_before * 1e3:,.1f} ms before and {total_now * 1e3:,.1f} ms now"
        )
    lines = ["; ".join(sums)]
    for c in graph.issued:
        if c.node in earlier and abs(seconds_before[c.node] - seconds_now[c.node]) > _LEAST:
            lines.append(
                f"{c.kind} {c.where} starts {earlier[c.node]} computing nodes earlier, exposed "
                f"{seconds_before[c.node] * 1e3:,.3f} ms before and "
                f"{seconds_now[c.node] * 1e3:,.3f} ms now"
            )
    return lines


def _exposed_seconds(timeline: Timeline) -> dict[fx.Node, float]:
    """Return, by collective, how long compute waits for it."""
    seconds: dict[fx.Node, float] = defaultdict(float)
    for wait in timeline.exposed:
        seconds[wait.collective.node] += wait.seconds
    return seconds


def _num_computed_before(graph: ScheduleGraph, order: Sequence[int]) -> dict[int, int]:
    """Count, by place, the nodes that compute before it in this order."""
    num_before = {}
    count = 0
    for place in order:
        num_before[place] = count
        if graph.seconds[place] > 0 and place not in graph.group:
            count += 1
    return num_before
