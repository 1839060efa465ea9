"""The first node of a graph whose value is not what it was before a pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_trainer.analysis.lifetimes import Storage
from graph_trainer.analysis.ops import (
    argument_nodes,
    is_collective,
    is_wait,
    storage_roots,
    written_arguments,
)
from graph_trainer.bisect.bits import Difference, digest, distance
from graph_trainer.bisect.runs import Runs
from graph_trainer.joint_graph import JointGraph, OutputKind, module_of, phase_of


@dataclass(frozen=True, slots=True)
class NodeDifference:
    """The first node that differs on one rank."""

    position: int
    """Where it stands in the graph after the pass."""
    name: str
    op: str
    module: str
    phase: str
    after: str
    """The node as the pass left it."""
    before: str
    """What stood there before the pass; empty where there was nothing of the kind."""
    kept: bool
    """Whether a node of this name was there before the pass; otherwise the pass inserted it."""
    seen_at: str
    """The node whose values were compared: this one, or a kept one that reads it."""
    difference: Difference


def first_difference(
    runs: Runs, before: JointGraph, after: JointGraph, differing: Iterable[str]
) -> NodeDifference | None:
    """Run both graphs node by node on the same inputs; four runs in all, linear in nodes.

    A node is compared with the one of its name, or with the one in whose place a kept node
    reads it. Only nodes that lead to a value that differs count, since a pass may change what
    matters to no one. What is not settled when it is made (memory not yet written, a collective
    not yet waited for) is not compared, nor what differs when the graph before runs twice.

    Arguments:
        differing: names of the results that differ on this rank, as `Results` has them; none
            where only other ranks' do. This rank then only takes part in the collectives.

    Returns:
        the first node in the order of the graph after, or None where every node is the same.
    """
    was = _digests(runs, before)
    again = _digests(runs, before)
    partners = partners_of(before, after)
    unstable = {name for name in was if was[name] != again[name]}
    unstable |= {node.name for node in (*_unsettled(before.graph), *_unsettled(after.graph))}
    wanted = _leading_to(after, set(differing))
    order = list(after.graph.nodes)
    first: dict[bool, tuple[fx.Node, Any]] = {}

    def compare(node: fx.Node, value: Any) -> None:
        partner = partners.get(node)
        if partner is None or not unstable.isdisjoint((partner.name, node.name)):
            return
        leads = node in wanted
        if leads not in first and digest(value) != was[partner.name]:
            first[leads] = (node, _kept(value))

    runs.node_by_node(after, compare)
    found = first.get(True) or first.get(False)
    values: list[Any] = []

    def keep(node: fx.Node, value: Any) -> None:
        if found is not None and node is partners[found[0]]:
            values.append(_kept(value))

    runs.node_by_node(before, keep)
    if found is None or not set(differing):
        return None
    seen, value = found
    node = _cause(seen, partners)
    partner = partners.get(node)
    difference = distance(seen.name, values[0], value)
    assert difference is not None, "digests differ and values do not"
    phase = phase_of(node)
    return NodeDifference(
        order.index(node),
        node.name,
        str(node.target),
        module_of(node) or "",
        phase.value if phase else "",
        node.format_node() or "the values that the graph returns",
        "" if partner is None else partner.format_node() or "the values that it returned",
        partner is not None and partner.name == node.name,
        seen.name,
        difference,
    )


def partners_of(before: JointGraph, after: JointGraph) -> dict[fx.Node, fx.Node]:
    """Node of the graph after -> the node of the graph before that it is compared with.

    A node of the same name; for one that the pass inserted the node in whose place a node
    with a partner reads it, if both call the same op on as many values. Linear in nodes.
    """
    by_name = {node.name: node for node in before.graph.nodes}
    partners = {n: by_name[n.name] for n in after.graph.nodes if n.name in by_name}
    for node in reversed(after.graph.nodes):
        partner = partners.get(node)
        if partner is None or node.target != partner.target:
            continue
        reads, read = (argument_nodes((n.args, n.kwargs)) for n in (node, partner))
        if len(reads) == len(read):
            for mine, its in zip(reads, read, strict=True):
                partners.setdefault(mine, its)
    return partners


def _cause(node: fx.Node, partners: dict[fx.Node, fx.Node]) -> fx.Node:
    """An inserted node that has no partner and that a kept one reads, where there is one."""
    same_op = node.op == "call_function" and node.target == partners[node].target
    new = [source for source in node.all_input_nodes if source not in partners]
    return new[0] if same_op and new else node


def _digests(runs: Runs, joint: JointGraph) -> dict[str, str]:
    found: dict[str, str] = {}

    def note(node: fx.Node, value: Any) -> None:
        found[node.name] = digest(value)

    runs.node_by_node(joint, note)
    return found


def _leading_to(joint: JointGraph, differing: set[str]) -> set[fx.Node]:
    """The nodes from which the results of these names are computed."""
    values = iter(joint.output_values())
    left: list[fx.Node] = []
    for spec in joint.signature.outputs:
        is_loss = spec.kind is OutputKind.LOSS
        name = "loss" if is_loss else f"gradient of {spec.name}"
        parts = [next(values) for _ in range(spec.layout.num_tensors)]
        left += parts if name in differing else []
    found: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _unsettled(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value is not there yet when they have run."""
    roots = storage_roots(graph)
    written: set[Storage] = set()
    under_way: set[Storage] = set()
    found: set[fx.Node] = set()
    for node in graph.nodes:
        root = roots[node]
        touched = {roots[source] for source in written_arguments(node)}
        if is_collective(node):
            under_way |= {root, *touched}
            written -= {root, *touched}
        elif is_wait(node):
            written.add(root)
            under_way.discard(root)
        else:
            written |= touched
        maker = root[0]
        without_values = is_collective(maker) or "empty" in str(maker.target)
        if root in under_way or (without_values and root not in written):
            found.add(node)
    return found


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_kept(v) for v in value] if isinstance(value, (tuple, list)) else value
