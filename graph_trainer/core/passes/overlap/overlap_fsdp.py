"""Start FSDP's collectives early and wait for them late, so that they overlap with compute."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graph_trainer.core.graph.annotations import Role, is_backward, role_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.graph.writes import Writes, writes_of
from graph_trainer.core.passes.base import Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.errors import PassError


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapFsdpOptions:
    """How many collectives are in flight."""

    in_flight: int = 4
    """How many gathers, and how many reductions, are in flight at a time, at most."""

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise PassError(
                f"OverlapFsdpOptions.in_flight is {self.in_flight}; it must be at least 1"
            )


@graph_pass(
    stage=Stage.SCHEDULE,
    summary="Gather parameters ahead of time, wait for reductions late",
    options_type=OverlapFsdpOptions,
    default=False,
    optional=True,
)
def overlap_fsdp(joint: JointGraph, options: OverlapFsdpOptions, context: PassContext) -> None:
    """Move the start of gathers up and the wait for reductions down.

    A gather starts as soon as fewer than `in_flight` gathers are in flight, and is waited for where
    it was; none moves from backward into forward. The nodes after a reduction (its wait, the
    division, a second reduction) run when the `in_flight`-th reduction after it starts, or at the
    end of the graph. Nodes that are earlier, or later, than that already do not move.

    Changes the order of nodes only, in the same way on every rank: gathers keep their order, and
    reductions keep theirs. Nodes whose tensors are written in place do not move. Relies on FSDP
    roles. Costs memory: up to `in_flight` parameters are gathered, and as many gradients not yet
    reduced, at a time. Linear in nodes, but for a sort of the collectives.
    """
    writes = writes_of(joint.graph)
    at = {node: position for position, node in enumerate(joint.graph.nodes)}
    for half in (False, True):
        _start_early(joint, half, options.in_flight, writes, at)
    _finish_late(joint, options.in_flight, writes, at)


def _start_early(
    joint: JointGraph, backward: bool, in_flight: int, writes: Writes, at: dict[fx.Node, int]
) -> None:
    """Move each launch, the nodes to the first collective of an unshard, up to the wait that ends
    an earlier gather: those of backward, or else of forward. `at` has the old places."""
    chains: list[list[fx.Node]] = []
    of: dict[fx.Node, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        if role_of(node) is not Role.UNSHARD or is_backward(node) is not backward:
            continue
        inside = [n for n in node.all_input_nodes if n.op != "placeholder"]
        if any(n not in of or is_collective(of[n][-1]) for n in inside) or writes.touched_by(node):
            continue
        chain, *others = list({id(of[n]): of[n] for n in inside}.values()) or [[]]
        if not chain:
            chains.append(chain)
        for other in others:  # a bucket: several parameters in one gather
            of |= dict.fromkeys(other, chain)
            chain += other
            other.clear()
        chain.append(node)
        of[node] = chain
    launches = [chain for chain in chains if chain and is_collective(chain[-1])]
    launches.sort(key=lambda chain: at[chain[-1]])
    # the wait for a gather does not move
    readers = [min(at[user] for user in chain[-1].users) for chain in launches]
    nodes = list(at)
    anchor = 0
    for index, chain in enumerate(launches):
        # launches must keep their order, though waits may come in another order
        anchor = max(anchor, readers[max(index - in_flight + 1, 0)])
        for node in chain:
            if anchor < at[node]:
                nodes[anchor].prepend(node)


def _finish_late(joint: JointGraph, in_flight: int, writes: Writes, at: dict[fx.Node, int]) -> None:
    """Split the nodes after each reduction at its further collectives, and move each part down."""
    first: dict[fx.Node, fx.Node] = {}
    distance: dict[fx.Node, int] = {}
    pieces: dict[fx.Node, list[list[fx.Node]]] = {}
    joined: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if role_of(node) is not Role.REDUCE_GRAD:
            continue
        inputs = [n for n in node.all_input_nodes if n in first]
        if inputs:
            start = first[node] = first[inputs[0]]
            distance[node] = max(distance[n] + is_collective(n) for n in inputs)
            pieces[start] += [[] for _ in range(distance[node] - len(pieces[start]))]
            pieces[start][distance[node] - 1].append(node)
            if any(first[n] is not start for n in inputs):
                joined.update(first[n] for n in inputs)
        elif is_collective(node):
            first[node], distance[node], pieces[node] = node, 0, []
    last = joint.output_node()
    reductions = []
    for start, parts in pieces.items():
        inside = {node for part in parts for node in part}
        free = all(user in inside or user is last for node in inside for user in node.users)
        touched = any(map(writes.touched_by, (start, *inside)))
        if inside and free and start not in joined and not touched:
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
