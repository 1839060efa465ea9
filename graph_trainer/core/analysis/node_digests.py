"""Run a graph on given inputs with a digest of every node, and compare two such runs.

`verify_passes` compares the graphs before and after a pass, `check_capture` a graph with the model
itself.
"""

# The idea: a run keeps a digest of every node's value, by the node's name, and no value. Most
# nodes keep their names in a pass, and an inserted node is compared with what a kept reader of it
# read before. Many nodes may differ that do no harm, so the search goes backwards from the results
# that differ, through nodes that differ: the first node of the graph that it reaches is the cause.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

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
from graph_trainer.core.tensor_diff import Results, digest
from graph_trainer.core.torch_private import pytree

Observe = Callable[[fx.Node, Any], None]
"""Called with a node and its value, when it has run."""
Same = Callable[[fx.Node], bool | None]


class Observed(fx.Interpreter):
    """Runs a graph with its own collectives, and calls `observe` after each node."""

    def __init__(self, module: fx.GraphModule, observe: Observe | None = None) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._observe = observe
        self._attributes: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self._observe is not None:
            self._observe(n, result)
        return result

    def fetch_attr(self, target: str) -> Any:
        """Return a copy of a tensor: what a run changes must not outlive it."""
        if target not in self._attributes:
            value = super().fetch_attr(target)
            self._attributes[target] = value.clone() if isinstance(value, torch.Tensor) else value
        return self._attributes[target]


@dataclass(frozen=True, slots=True)
class GraphRun:
    """What is kept of one run."""

    results: Results
    """What the graph returns, and what it leaves in its inputs, by `result_name`."""
    digests: dict[str, tuple[str, ...]]
    """By the name of a node, those of its values. Values are left out that are not complete when
    their node has run: memory that is not written yet, collectives that are not waited for yet."""


def run_graph(
    joint: JointGraph,
    values: Sequence[torch.Tensor],
    *,
    interpreter: Callable[[fx.GraphModule, Observe], Observed] = Observed,
    observe: Observe = lambda node, value: None,
) -> GraphRun:
    """Run a graph node by node.

    Args:
        values: of the placeholders; they stay as they are.
        interpreter: runs the nodes. `Observed` issues the graph's collectives, so that all ranks
            call this together; `OneProcess` simulates them.
        observe: called with every node and its value too.
    """
    incomplete = _incomplete(joint.graph)
    digests: dict[str, tuple[str, ...]] = {}

    def keep(node: fx.Node, value: Any) -> None:
        if node not in incomplete:
            digests[node.name] = tuple(map(digest, pytree.tree_leaves(value)))
        observe(node, value)

    inputs = [value.clone() for value in values]
    with torch.no_grad():
        outputs = interpreter(joint.graph_module, keep).run(*inputs)
    specs: tuple[Input | Output, ...] = (*joint.signature.outputs, *joint.signature.inputs)
    parts = [*(output.clone() for output in outputs), *inputs]
    results = {result_name(spec): list(tensors) for spec, tensors in with_parts(specs, parts)}
    return GraphRun(results, digests)


def result_name(spec: Input | Output) -> str:
    """Name a result: "loss", "gradient of FQN", "buffer FQN"; also any other input that a step
    may leave changed."""
    if isinstance(spec, Output):
        return "loss" if spec.kind is OutputKind.LOSS else f"gradient of {spec.name}"
    return f"{spec.kind.value} {spec.name}"


def first_differing_node(
    before: tuple[JointGraph, GraphRun],
    after: tuple[JointGraph, GraphRun],
    repeated: GraphRun,
    differing: Iterable[str],
) -> fx.Node | None:
    """Find the first node of `after` whose value is another than before. Linear in nodes.

    A node is compared with the node of its name, or with the node that a kept reader of it read
    before. It counts only where its difference reaches a result that differs, through readers
    that differ too: a pass may change an unused value, or reverse a change in a later node.

    Args:
        before, after: the graphs before and after a pass, with their runs on the same inputs.
        repeated: another run of the graph after. A value that differs in it is not compared.
        differing: the names of the results that differ.

    Returns:
        the first node in the order of `after`, or None where no node counts.
    """
    (graph_before, run_before), (graph_after, run_after) = before, after
    was, now = run_before.digests, run_after.digests
    unstable = {name for name in now if now[name] != repeated.digests.get(name)}
    partners = partners_of(graph_before, graph_after)
    known = {was[name] for name in was if name not in unstable}

    def same(node: fx.Node) -> bool | None:
        """Tell whether a value is the same as before; None where that is unknown."""
        if node.name not in now or node.name in unstable:
            return None
        partner = partners.get(node)
        if partner is None:  # a value that existed before is right, wherever it was
            return True if now[node.name] in known else None
        return now[node.name] == was[partner.name] if partner.name in was else None

    first = _first_that_reaches(graph_after, set(differing), same)
    # a new value that the node reads, where it calls the same op as before, explains it
    if first is not None and first.op == "call_function" and first.target == partners[first].target:
        new = (s for s in first.all_input_nodes if s not in partners and not same(s))
        return next(new, first)
    return first


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
        is_empty = maker.op == "call_function" and "empty" in str(maker.target)
        without_values = is_collective(maker) or is_empty
        if root in pending or (without_values and root not in written):
            incomplete.add(node)
    return incomplete
