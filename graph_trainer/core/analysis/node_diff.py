"""Find the first node of a graph whose value differs from its value before a pass."""

# The idea: run both graphs and keep a digest of every node's value, by the node's name. Most
# nodes keep their names in a pass, and an inserted node is compared with what a kept reader of it
# read before. Many nodes may differ that do no harm, so the search goes backwards from the results
# that differ, through nodes that differ: the first node of the graph that it reaches is the cause.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.annotations import module_of, phase_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    Storage,
    argument_nodes,
    is_collective,
    is_wait,
    storage_roots,
    written_arguments,
)
from graph_trainer.core.graph.signature import Input, Output, OutputKind, with_parts
from graph_trainer.core.tensor_diff import Difference, digest, distance
from graph_trainer.core.torch_private import pytree

Observe = Callable[[fx.Node, Any], None]
"""Called with a node and its value, when it has run."""
Replay = Callable[[JointGraph, Observe], object]
"""Runs a graph node by node, always on the same inputs."""
Same = Callable[[fx.Node], bool | None]


class Observed(fx.Interpreter):
    """Runs a graph, and calls `observe` after each node."""

    def __init__(self, module: fx.GraphModule, observe: Observe | None = None) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._observe = observe

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self._observe is not None:
            self._observe(n, result)
        return result


def result_name(spec: Input | Output) -> str:
    """Name a result: "loss", "gradient of FQN", "buffer FQN"; also any other input that a step
    may leave changed."""
    if isinstance(spec, Output):
        return "loss" if spec.kind is OutputKind.LOSS else f"gradient of {spec.name}"
    return f"{spec.kind.value} {spec.name}"


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


def first_differing_node(
    replay: Replay, before: JointGraph, after: JointGraph, differing: Iterable[str]
) -> NodeDifference | None:
    """Run both graphs node by node on the same inputs; five runs in all, linear in nodes.

    A node is compared with the node of its name, or with the node that a kept reader of it read
    before. It counts only where its difference reaches a result that differs, through readers
    that differ too: a pass may change an unused value, or reverse a change in a later node. A
    value that is not complete when its node has run (memory not yet written, a collective not
    yet waited for) is not compared, nor is a value that differs between two runs of the graph
    before.

    Args:
        replay: runs a graph. Where ranks communicate, all of them call this together.
        differing: names, as in `Results`, of the results that differ on this rank; none where
            only those of other ranks differ. This rank then only takes part in the collectives.

    Returns:
        the first node in the order of `after`, or None where no node counts.
    """
    was, repeated, now = (_digests(replay, joint) for joint in (before, before, after))
    partners = partners_of(before, after)
    unstable = {name for name in was if was[name] != repeated[name]}
    unstable |= {node.name for node in (*_incomplete(before.graph), *_incomplete(after.graph))}
    known = {was[name] for name in was if name not in unstable}

    def same(node: fx.Node) -> bool | None:
        """Tell whether a value is the same as before; None where that is unknown."""
        partner = partners.get(node)
        if node.name in unstable or (partner is not None and partner.name in unstable):
            return None
        if partner is None:  # a value that existed before is right, wherever it was
            return True if now[node.name] in known else None
        return now[node.name] == was[partner.name]

    seen = _first_that_reaches(after, set(differing), same)
    # one more run of each graph, for the amounts: on every rank, as they communicate
    values: dict[fx.Node, Any] = {}

    def keep(node: fx.Node, value: Any) -> None:
        if seen is not None and node in (seen, partners[seen]):
            copy = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)
            values[node] = copy

    replay(before, keep)
    replay(after, keep)
    if seen is None:
        return None
    difference = distance(seen.name, values[partners[seen]], values[seen])
    # a new value that the node reads, where it calls the same op as before, explains it
    node = seen
    if seen.op == "call_function" and seen.target == partners[seen].target:
        new = (s for s in seen.all_input_nodes if s not in partners and not same(s))
        node = next(new, seen)
    partner = partners.get(node)
    phase = phase_of(node)
    return NodeDifference(
        position=list(after.graph.nodes).index(node),
        name=node.name,
        op=str(node.target),
        module=module_of(node) or "",
        phase=phase.value if phase else "",
        after=node.format_node() or "the values that the graph returns",
        before="" if partner is None else partner.format_node() or "the values that it returned",
        kept=partner is not None and partner.name == node.name,
        seen_at=seen.name,
        difference=difference or Difference(seen.name, 0.0, 0.0, "different in one run of two"),
    )


def _digests(replay: Replay, joint: JointGraph) -> dict[str, str]:
    """Digest the value of every node, by its name."""
    digests: dict[str, str] = {}
    replay(joint, lambda node, value: digests.update({node.name: digest(value)}))
    return digests


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


def _first_that_reaches(joint: JointGraph, differing: set[str], same: Same) -> fx.Node | None:
    """Return the first node that differs and whose difference reaches a result of these names.

    It does through readers that differ too, or of which nothing is known.
    """
    roots = storage_roots(joint.graph)
    output = joint.output_node()
    outputs = with_parts(joint.signature.outputs, joint.output_values())
    returned = [n for spec, nodes in outputs if result_name(spec) in differing for n in nodes]
    inputs = with_parts(joint.signature.inputs, joint.placeholders())
    storages = {roots[n] for spec, nodes in inputs if result_name(spec) in differing for n in nodes}
    read = {output} if returned else set()
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
