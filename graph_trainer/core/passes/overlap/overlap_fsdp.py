"""Start FSDP's collectives early and wait for them late, so that they run while compute goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from graph_trainer.core.graph.annotations import (
    Role,
    is_backward,
    role_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.last_writes import LastWrites
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.errors import PassError


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFsdpOptions:
    """How far collectives reach."""

    in_flight: int = 4
    """How many gathers, and how many reductions, are under way at a time at most."""

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise PassError(f"in_flight is {self.in_flight}; it must be at least 1")


@graph_pass(
    stage=Stage.SCHEDULE,
    summary="Gather parameters ahead of time, wait for reductions late",
    options_type=OverlapFsdpOptions,
    default=False,
    optional=True,
)
def overlap_fsdp(joint: JointGraph, options: OverlapFsdpOptions, context: PassContext) -> None:
    """Move the start of gathers up and the wait for reductions down.

    A gather starts as soon as fewer than `in_flight` are under way and is waited for where it
    was; none moves from backward into forward. What comes behind a reduction (its wait, the
    division, a second reduction) runs only when the `in_flight`-th after it is to start, or at
    the end of the graph. What already is earlier, or later, than that stays there.

    Changes the order of nodes only, in the same way on every rank: the collectives of either
    role keep their order. What is written in place does not move. Relies on FSDP roles. Costs
    memory: up to `in_flight` parameters are gathered, and as many gradients not yet reduced,
    at a time. Linear in nodes, but for a sort of the collectives.
    """
    writes = LastWrites(joint.graph)
    at = {node: position for position, node in enumerate(joint.graph.nodes)}

    def movable(node: fx.Node) -> bool:
        return not any(writes.is_written(n) for n in (node, *node.all_input_nodes))

    for half in (False, True):
        _start_early(_launches(joint, half, movable), options.in_flight, at)
    _finish_late(joint, options.in_flight, movable, at)


def _launches(
    joint: JointGraph, backward: bool, movable: Callable[[fx.Node], bool]
) -> list[list[fx.Node]]:
    """For every unshard of one half, the nodes up to its first collective."""
    chains: list[list[fx.Node]] = []
    of: dict[fx.Node, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        if role_of(node) is not Role.UNSHARD or is_backward(node) is not backward:
            continue
        inside = [n for n in node.all_input_nodes if n.op != "placeholder"]
        if any(n not in of or is_collective(of[n][-1]) for n in inside) or not movable(node):
            continue
        chain, *others = list({id(of[n]): of[n] for n in inside}.values()) or [[]]
        if not chain:
            chains.append(chain)
        for other in others:  # a bucket: several parameters travel at once
            of |= dict.fromkeys(other, chain)
            chain += other
            other.clear()
        chain.append(node)
        of[node] = chain
    return [chain for chain in chains if chain and is_collective(chain[-1])]


def _start_early(launches: list[list[fx.Node]], in_flight: int, at: dict[fx.Node, int]) -> None:
    """Move each launch up before the wait that makes room for it; `at` is where nodes were."""
    launches.sort(key=lambda chain: at[chain[-1]])
    # what reads a gather, its wait, stays where it is
    readers = [min(at[user] for user in chain[-1].users) for chain in launches]
    nodes = list(at)
    anchor = 0
    for index, chain in enumerate(launches):
        # waits may come in another order than launches, which must keep theirs
        anchor = max(anchor, readers[max(index - in_flight + 1, 0)])
        for node in chain:
            if anchor < at[node]:
                nodes[anchor].prepend(node)


def _finish_late(
    joint: JointGraph,
    in_flight: int,
    movable: Callable[[fx.Node], bool],
    at: dict[fx.Node, int],
) -> None:
    """Cut what follows each reduction behind its collectives, and move each piece down."""
    first: dict[fx.Node, fx.Node] = {}
    distance: dict[fx.Node, int] = {}
    pieces: dict[fx.Node, list[list[fx.Node]]] = {}
    joined: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if role_of(node) is not Role.REDUCE_GRAD:
            continue
        behind = [n for n in node.all_input_nodes if n in first]
        if behind:
            start = first[node] = first[behind[0]]
            distance[node] = max(distance[n] + is_collective(n) for n in behind)
            pieces[start] += [[] for _ in range(distance[node] - len(pieces[start]))]
            pieces[start][distance[node] - 1].append(node)
            if any(first[n] is not start for n in behind):
                joined.update(first[n] for n in behind)
        elif is_collective(node):
            first[node], distance[node], pieces[node] = node, 0, []
    last = joint.output_node()
    reductions = []
    for start, parts in pieces.items():
        inside = {node for part in parts for node in part}
        free = all(user in inside or user is last for node in inside for user in node.users)
        if inside and free and start not in joined and all(map(movable, inside)):
            reductions.append((start, parts))
    reductions.sort(key=lambda entry: at[entry[0]])
    starts = [start for start, _ in reductions]
    for index, (_, parts) in enumerate(reductions):
        for far, part in enumerate(parts, start=1):
            target = index + far * in_flight
            anchor = starts[target] if target < len(starts) else last
            for node in part:
                if at[node] < at[anchor]:
                    anchor.prepend(node)
