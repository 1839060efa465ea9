"""Find the first node of a graph whose value differs from its value before a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_trainer.core.analysis.lifetimes import Storage
from graph_trainer.core.bisect.replay import Runs
from graph_trainer.core.graph.annotations import (
    module_of,
    phase_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    argument_nodes,
    is_collective,
    is_wait,
    storage_roots,
    written_arguments,
)
from graph_trainer.core.graph.signature import InputKind, OutputKind, with_parts
from graph_trainer.core.tensor_diff import Difference, digest, distance
from graph_trainer.core.torch_private import pytree

Same = Callable[[fx.Node], bool | None]


@dataclass(frozen=True, slots=True)
class NodeDifference:
    """The first node that differs on one rank."""

    position: int
    """Its index in the graph after the pass."""
    name: str
    op: str
    module: str
    phase: str
    after: str
    """The node after the pass."""
    before: str
    """The node it is compared with, before the pass; empty where there is none."""
    kept: bool
    """Whether a node of this name existed before the pass; otherwise the pass inserted it."""
    seen_at: str
    """The node whose values were compared: this one, or a kept node that reads it."""
    difference: Difference


def first_difference(
    runs: Runs, before: JointGraph, after: JointGraph, differing: Iterable[str]
) -> NodeDifference | None:
    """Run both graphs node by node on the same inputs; five runs in all, linear in nodes.

    A node is compared with the node of its name, or with the node that a kept reader of it read
    before. It counts only where its difference reaches a result that differs, through readers
    that differ too: a pass may change an unused value, or reverse a change in a later node. A
    value that is not complete when its node has run (memory not yet written, a collective not
    yet waited for) is not compared, nor is a value that differs between two runs of the graph
    before.

    Args:
        differing: names, as in `Results`, of the results that differ on this rank; none where
            only those of other ranks differ. This rank then only takes part in the collectives.

    Returns:
        the first node in the order of `after`, or None where no node counts.
    """
    was, again = _digests(runs, before), _digests(runs, before)
    now = _digests(runs, after)
    partners = partners_of(before, after)
    unstable = {name for name in was if was[name] != again[name]}
    unstable |= {node.name for node in (*_incomplete(before.graph), *_incomplete(after.graph))}
    known = {was[name] for name in was if name not in unstable}

    def same(node: fx.Node) -> bool | None:
        """Whether a value is the same as before; None where that is unknown."""
        partner = partners.get(node)
        if node.name in unstable or (partner is not None and partner.name in unstable):
            return None
        if partner is None:  # a value that existed before is right, wherever it was
            return True if now[node.name] in known else None
        return now[node.name] == was[partner.name]

    seen = _first_that_reaches(after, set(differing), same)
    old = _value_of(runs, before, None if seen is None else partners[seen])
    value = _value_of(runs, after, seen)
    if seen is None:
        return None
    node = _cause(seen, partners, same)
    partner = partners.get(node)
    difference = distance(seen.name, old, value) or Difference(
        seen.name, 0.0, 0.0, "different in one run of two"
    )
    phase = phase_of(node)
    return NodeDifference(
        list(after.graph.nodes).index(node),
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
    """Map nodes of `after` to the nodes of `before` that they are compared with.

    The partner is the node of the same name. For an inserted node that a node with a partner
    reads, it is what that partner reads at the same place, if both call the same op on equally
    many values. Linear in nodes.
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


def _cause(node: fx.Node, partners: dict[fx.Node, fx.Node], same: Same) -> fx.Node:
    """Return an inserted node without a partner that `node` reads, or `node` if there is none."""
    same_op = node.op == "call_function" and node.target == partners[node].target
    new = [s for s in node.all_input_nodes if s not in partners and not same(s)]
    return new[0] if same_op and new else node


def _digests(runs: Runs, joint: JointGraph) -> dict[str, str]:
    digests: dict[str, str] = {}

    def note(node: fx.Node, value: Any) -> None:
        digests[node.name] = digest(value)

    runs.node_by_node(joint, note)
    return digests


def _value_of(runs: Runs, joint: JointGraph, wanted: fx.Node | None) -> Any:
    """Return the value of a node in one more run; None for no node."""
    values: list[Any] = []

    def keep(node: fx.Node, value: Any) -> None:
        if node is wanted:
            values.append(pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value))

    runs.node_by_node(joint, keep)
    return values[0] if values else None


def _first_that_reaches(joint: JointGraph, differing: set[str], same: Same) -> fx.Node | None:
    """Return the first node that differs and whose difference reaches a result of these names.

    It does through readers that differ too, or of which nothing is known.
    """
    returned = _returned(joint, differing)
    roots = storage_roots(joint.graph)
    output = joint.output_node()
    read = {output} if returned else set()
    storages = {
        roots[node]
        for spec, nodes in joint.inputs_of(InputKind.BUFFER)
        for node in nodes
        if f"buffer {spec.name}" in differing
    }
    first: fx.Node | None = None
    for node in reversed(joint.graph.nodes):
        touched = {roots[source] for source in written_arguments(node)}
        writes = not storages.isdisjoint(touched)
        if node not in read and not writes:
            continue
        # a batch norm's result does not show what it has written to its statistics
        shown = not writes or roots[node] in touched
        verdict = same(node)
        if verdict and shown:
            continue
        if verdict is False:
            first = node
        sources = returned if node is output else node.all_input_nodes
        read.update(sources)
        storages.update(roots[source] for source in sources)
    return first


def _returned(joint: JointGraph, names: set[str]) -> list[fx.Node]:
    """List the nodes that the graph returns as the loss or the gradients of these names."""
    returned: list[fx.Node] = []
    for spec, parts in with_parts(joint.signature.outputs, joint.output_values()):
        is_loss = spec.kind is OutputKind.LOSS
        if ("loss" if is_loss else f"gradient of {spec.name}") in names:
            returned += parts
    return returned


def _incomplete(graph: fx.Graph) -> set[fx.Node]:
    """List the nodes whose value is not complete when they have run."""
    roots = storage_roots(graph)
    written: set[Storage] = set()
    pending: set[Storage] = set()
    incomplete: set[fx.Node] = set()
    for node in graph.nodes:
        root = roots[node]
        touched = {roots[source] for source in written_arguments(node)}
        if is_collective(node):
            pending |= {root, *touched}
        elif is_wait(node):
            written.add(root)
            pending.discard(root)
        else:
            written |= touched
        maker = root[0]
        without_values = is_collective(maker) or "empty" in str(maker.target)
        if root in pending or (without_values and root not in written):
            incomplete.add(node)
    return incomplete
