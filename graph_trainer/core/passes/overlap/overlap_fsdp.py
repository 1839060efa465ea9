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
    """The most gathers, and the most reductions, that are in flight at a time."""

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

    A gather starts as soon as fewer than `in_flight` gathers are in flight, and its wait does not
    move; no gather moves from backward into forward. The nodes after a reduction (its wait, the
    division, a second reduction) run when the `in_flight`-th reduction after it starts, or at the
    end of the graph. Gathers that already start earlier do not move, nor do nodes that already run
    later.

    Changes the order of nodes only, in the same way on every rank: gathers keep their order, and
    reductions keep theirs. Nodes whose tensors are written in place do not move. Relies on FSDP
    roles. Costs memory: up to `in_flight` parameters are gathered, and as many gradients not yet
    reduced, at a time. Linear in nodes, except for a sort of the collectives.
    """
    writes = writes_of(joint.graph)
    position = {node: place for place, node in enumerate(joint.graph.nodes)}
    launches = _launches(joint, writes)
    for backward in (False, True):
        launches_of_half = [c for c in launches if is_backward(c[-1]) is backward]
        _start_early(launches_of_half, options.in_flight, position)
    _finish_late(joint, options.in_flight, writes, position)


def _launches(joint: JointGraph, writes: Writes) -> list[list[fx.Node]]:
    """Return, for each unshard that may move, the nodes up to and with its first collective."""
    launches: list[list[fx.Node]] = []
    launch_of: dict[fx.Node, list[fx.Node]] = {}

    def may_continue(node: fx.Node, source: fx.Node) -> bool:
        """Return whether the launch of an input goes on with a node."""
        if source not in launch_of or is_backward(source) is not is_backward(node):
            return False
        return not is_collective(launch_of[source][-1])

    for node in joint.graph.nodes:
        if role_of(node) is not Role.UNSHARD or writes.touched_by(node):
            continue
        sources = [n for n in node.all_input_nodes if n.op != "placeholder"]
        if not all(may_continue(node, source) for source in sources):
            continue
        launch: list[fx.Node] = []
        if sources:
            launch = launch_of[sources[0]]
        else:
            launches.append(launch)
        for source in sources:  # several in a bucket, which gathers several parameters
            other = launch_of[source]
            if other is not launch:
                launch_of.update(dict.fromkeys(other, launch))
                launch += other
                other.clear()
        launch.append(node)
        launch_of[node] = launch
    return [launch for launch in launches if launch and is_collective(launch[-1])]


def _start_early(
    launches: list[list[fx.Node]], in_flight: int, position: dict[fx.Node, int]
) -> None:
    """Move each launch up to the wait that ends an earlier gather. `position` is the old one."""
    launches = sorted(launches, key=lambda launch: position[launch[-1]])
    # the wait for a gather does not move
    waits = []
    for launch in launches:
        waits.append(min(position[user] for user in launch[-1].users))
    nodes = list(position)
    anchor = 0
    for index, launch in enumerate(launches):
        # launches must keep their order, even if waits have another order
        anchor = max(anchor, waits[max(index - in_flight + 1, 0)])
        for node in launch:
            if anchor < position[node]:
                nodes[anchor].prepend(node)


def _finish_late(
    joint: JointGraph, in_flight: int, writes: Writes, position: dict[fx.Node, int]
) -> None:
    """Split the nodes after each reduction at its further collectives, and move each part down."""
    first: dict[fx.Node, fx.Node] = {}  # the first collective of the reduction of a node
    num_before: dict[fx.Node, int] = {}  # the collectives of the reduction before a node
    parts_after: dict[fx.Node, list[list[fx.Node]]] = {}  # by first collective
    joined: set[fx.Node] = set()  # first collectives of reductions whose results meet
    for node in joint.graph.nodes:
        if role_of(node) is not Role.REDUCE_GRAD:
            continue
        inputs = [n for n in node.all_input_nodes if n in first]
        if inputs:
            start = first[node] = first[inputs[0]]
            num_before[node] = max(num_before[n] + is_collective(n) for n in inputs)
            parts = parts_after[start]
            while len(parts) < num_before[node]:
                parts.append([])
            parts[num_before[node] - 1].append(node)
            if any(first[n] is not start for n in inputs):
                joined.update(first[n] for n in inputs)
        elif is_collective(node):
            first[node] = node
            num_before[node] = 0
            parts_after[node] = []
    output = joint.output_node()
    starts = []
    for start, parts in parts_after.items():
        inside = {node for part in parts for node in part}
        users = {user for node in inside for user in node.users}
        read_outside = not users <= inside | {output}
        is_touched = any(writes.touched_by(node) for node in (start, *inside))
        if inside and not read_outside and start not in joined and not is_touched:
            starts.append(start)
    starts.sort(key=lambda start: position[start])
    for index, start in enumerate(starts):
        for number, part in enumerate(parts_after[start], start=1):
            target = index + number * in_flight
            anchor = starts[target] if target < len(starts) else output
            for node in part:
                if position[node] < position[anchor]:
                    anchor.prepend(node)
