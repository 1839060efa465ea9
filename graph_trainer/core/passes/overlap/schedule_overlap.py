"""Put the starts and waits of all collectives where communication hides behind compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.context import PassContext, fingerprint
from graph_trainer.core.passes.overlap.remarks import remarks_on
from graph_trainer.core.passes.overlap.schedule_graph import View, view_of
from graph_trainer.core.passes.overlap.scheduler import Limits, Scheduler
from graph_trainer.core.simulation.gloo_buffers import gloo_scratch
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.timeline import play
from graph_trainer.core.units import GIB, MIB
from graph_trainer.errors import PassError

KEY = "compile.schedule_overlap"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOverlapOptions:
    """How far collectives and compute may move, and what that may cost."""

    prefetch_depth: int = 2
    """How many gathers, of a bucket each, are in flight beyond the one that is being used."""

    max_in_flight_mib: float = 2560.0
    """MiB that may be held, at any node, beyond what the graph holds there in its own order:
    parameters gathered ahead, gradients under way, results computed early."""

    max_peak_growth: float = 0.03
    """By what part the predicted peak of what the graph allocates may grow."""

    max_consecutive_compute: int = 8
    """
    How many matrix products or attentions may run between the moment when a reduction could
    start and its start, if memory allows that start, and how many a node that is run early may
    overtake.
    """

    def __post_init__(self) -> None:
        if self.prefetch_depth < 0:
            raise PassError(
                f"{KEY}.prefetch_depth is {self.prefetch_depth}; it must be 0 (no gather ahead of "
                "its place) or more"
            )
        if not 0 < self.max_in_flight_mib < math.inf:
            raise PassError(
                f"{KEY}.max_in_flight_mib is {self.max_in_flight_mib:g}; it must be a number of "
                "MiB above 0"
            )
        if not 0 <= self.max_peak_growth < math.inf:
            raise PassError(
                f"{KEY}.max_peak_growth is {self.max_peak_growth:g}; it must be a part of the "
                "peak, 0 or more: 0.03 for three percent"
            )
        if self.max_consecutive_compute < 1:
            raise PassError(
                f"{KEY}.max_consecutive_compute is {self.max_consecutive_compute}; it must be at "
                "least 1"
            )


@dataclass(frozen=True, slots=True)
class Decided:
    """An order, and the graphs that it is for."""

    program: tuple[object, ...]
    """Of every node what it calls and which nodes it reads: equal for batches of other shapes."""
    order: list[int]


@graph_pass(
    stage=Stage.SCHEDULE,
    summary="Start collectives early and wait late, by the simulator's clock",
    options_type=ScheduleOverlapOptions,
    needs_hardware=lambda options: True,
    default=False,
    optional=True,
)
def schedule_overlap(
    joint: JointGraph, options: ScheduleOverlapOptions, context: PassContext
) -> None:
    """Put every collective's start and wait where communication hides behind compute.

    Follows the graph's order with a clock, and deviates from it where that hides communication:
    parameters are gathered ahead, gradients reduced as soon as they are there and waited for when
    that is done, other collectives started before compute that they do not need, and such compute
    fills the time in which there is nothing else to do (see `Scheduler`).

    Changes the order of nodes only, and not that of nodes that write the same memory, draw random
    numbers or have effects. No gather moves from backward into forward. Gathers keep their order,
    and so do reductions of whole gradients, and all other collectives.

    Cannot hang: the ranks of a group see the same graph, costs and memory (see `overlap_view`) and
    decide alike; where batches or tensor-parallel parts of unlike sizes let other ranks decide
    otherwise, none of them moves anything. Cannot blow memory: the predicted peak grows by
    `max_peak_growth` at most, as it is for a rank that holds as many rows of every parameter as
    any. No heavy node overtakes more than `max_consecutive_compute` others, and none overtakes
    while a reduction is ready that may not start yet. n log n in nodes.

    Another graph of the step, of a batch of another shape, is put in the order of the first: a
    rank that meets one is alone, and its collectives must be those that the others know. What
    that order costs there is not bounded; a remark says so where it is more than was allowed.

    Raises:
        PassError: nobody named the hardware.
        VerificationError: a collective of which nothing can be said (see `collectives`).
    """
    hardware = context.require_hardware(f"the pass '{schedule_overlap.name}'")
    view = view_of(joint, hardware, context.other_memory(joint).fused)
    limits = Limits(
        prefetch_depth=options.prefetch_depth,
        max_in_flight=int(options.max_in_flight_mib * MIB),
        max_growth=options.max_peak_growth,
        max_consecutive_compute=options.max_consecutive_compute,
    )
    program = _program(joint)
    decided: Decided | None = context.decided
    again = decided is not None and decided.program == program
    if decided is not None and again:
        order = decided.order
    else:
        order = Scheduler(view, hardware, limits).run()
        if not context.same_on_all_ranks(_number(view, order)):
            joint.remarks.append(
                "nothing moved: the ranks would order their collectives otherwise, their batches "
                "or their tensor-parallel parts being of unlike sizes"
            )
            order = sorted(order)
    joint.decisions[schedule_overlap.name] = Decided(program, order)
    if order == sorted(order):
        return
    before, peak = play(joint, view.issued, view.cost, hardware), _peak_bytes(joint, hardware)
    *body, output = [view.nodes[place] for place in order]
    for node in body:
        output.prepend(node)
    after, new_peak = play(joint, view.issued, view.cost, hardware), _peak_bytes(joint, hardware)
    if again and new_peak > peak * (1 + options.max_peak_growth):
        joint.remarks.append(
            f"a batch of another shape, in the order of the first: {new_peak / peak - 1:.1%} more "
            f"memory at the peak ({new_peak / GIB:.2f} GiB), where {KEY}.max_peak_growth allows "
            f"{options.max_peak_growth:.1%}"
        )
    joint.remarks += remarks_on(view, order, before, after)


def _peak_bytes(joint: JointGraph, hardware: Hardware) -> int:
    scratch = gloo_scratch(joint) if hardware.device == "cpu" else None
    return lifetimes(joint, scratch=scratch).peak_bytes


def _number(view: View, order: Sequence[int]) -> int:
    """The same number for the same order of collectives and waits, whatever stands between."""
    nodes = [view.nodes[place] for place in sorted(order)]
    ordinal = {n: i for i, n in enumerate(n for n in nodes if is_collective(n) or is_wait(n))}
    return fingerprint([ordinal[n] for place in order if (n := view.nodes[place]) in ordinal])


def _program(joint: JointGraph) -> tuple[object, ...]:
    place = {node: index for index, node in enumerate(joint.graph.nodes)}
    return tuple(
        (str(node.target), *(place[source] for source in node.all_input_nodes)) for node in place
    )
