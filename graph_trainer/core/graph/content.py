"""The content of a graph, and facts about the graph and its nodes, cached until that changes."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx

from graph_trainer.core.graph.data_sizes import data_sizes_of
from graph_trainer.core.torch_private import NODE_ATTRIBUTES

Fact = TypeVar("Fact")
Content = list[list[Any]]
"""Lists of the nodes, kinds of nodes, targets, arguments, keyword arguments and values, in graph
order; a list with the sizes to expect where data decide them; then the same lists for each graph
that a higher-order op runs."""

_ATTRIBUTE = "graph_trainer_facts"
"""The attribute of a graph that stores its content and facts, so that they are freed with it."""

_METAS = operator.attrgetter("meta")
_READERS = tuple(operator.attrgetter(name) for name in NODE_ATTRIBUTES)
_SIZES = 1 + len(_READERS) + 1
"""The index of the expected sizes in a content: nodes, attributes and values come before them."""


def subgraph_of(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a get_attr node reads, if it reads one."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    try:
        subgraph = operator.attrgetter(str(node.target))(owner)
    except AttributeError:
        return None
    return subgraph if isinstance(subgraph, fx.GraphModule) else None


def content_of(graph: fx.Graph) -> Content:
    """List what a graph consists of now, without annotations.

    Linear in nodes, 4 ms for 15,000: `map` and `attrgetter` take half the time of calls.
    """
    nodes = list(graph.nodes)
    content: Content = [nodes]
    for reader in _READERS:
        content.append(list(map(reader, nodes)))
    values = [meta.get("val") for meta in map(_METAS, nodes)]
    content.append(values)
    first = next((v for v in values if isinstance(v, torch.Tensor)), None)
    sizes = None if first is None else data_sizes_of(first)
    content.append([] if sizes is None else [sizes.expected])
    for node in graph.find_nodes(op="get_attr"):
        subgraph = subgraph_of(node)
        if subgraph is not None:
            content += content_of(subgraph.graph)
    return content


def is_same(before: Content, now: Content) -> bool:
    """Return whether a graph has not changed: fx makes a new object of whatever it changes."""
    if before is now:
        return True
    if len(before) != len(now):
        return False
    for old, new in zip(before, now, strict=True):
        if len(old) != len(new) or not all(map(operator.is_, old, new)):
            return False
    return True


def _rows(content: Content) -> dict[fx.Node, tuple[int, ...]]:
    """Map each node to the ids of its attributes and value, which `content` keeps alive."""
    nodes, *columns = content[:_SIZES]
    ids = (map(id, column) for column in columns)
    return dict(zip(nodes, zip(*ids, strict=True), strict=True))


@dataclass(slots=True)
class _Facts:
    """The facts about a graph that consists of `content`."""

    content: Content
    of_graph: dict[Any, Any] = field(default_factory=dict)
    """Results for the graph, by function."""
    of_nodes: dict[Any, dict[fx.Node, Any]] = field(default_factory=dict)
    """Results for the nodes, by function and node."""
    still_true: dict[Any, dict[fx.Node, Any]] = field(default_factory=dict)
    """Results from an earlier content, for the nodes that have not changed since."""
    fixed: bool = False
    """Whether the graph cannot change now."""
    rows: dict[fx.Node, tuple[int, ...]] | None = None
    """The result of `_rows`, once the content has been compared with another."""

    def after_change(self, content: Content) -> _Facts:
        """Keep the facts about nodes that a change did not touch, wherever they are now."""
        facts = _Facts(content)
        known = self.still_true | self.of_nodes
        if not known or not is_same([self.content[_SIZES]], [content[_SIZES]]):
            return facts
        before = self.rows or _rows(self.content)
        now = _rows(content)
        facts.rows = now
        # a get_attr node does not show that the graph that it reads has changed
        changed = {n for n, row in now.items() if row != before.get(n) or n.op == "get_attr"}
        # a fact about a node may depend on the values of its inputs
        touched = changed.union(*(node.users for node in changed))
        unchanged = now.keys() - touched
        for function, of_nodes in known.items():
            kept = {node: of_nodes[node] for node in unchanged & of_nodes.keys()}
            facts.still_true[function] = kept
        return facts


def known_content(graph: fx.Graph) -> Content:
    """Return the content of a graph: the same object as before if the graph has not changed."""
    return _facts_of(graph).content


def _facts_of(graph: fx.Graph) -> _Facts:
    """Return the facts of a graph as it is now."""
    facts: _Facts | None = graph.__dict__.get(_ATTRIBUTE)
    if facts is not None and facts.fixed:
        return facts
    content = content_of(graph)
    if facts is None:
        facts = _Facts(content)
    elif not is_same(facts.content, content):
        facts = facts.after_change(content)
    graph.__dict__[_ATTRIBUTE] = facts
    return facts


@contextlib.contextmanager
def unchanging(graph: fx.Graph) -> Iterator[_Facts]:
    """Check once whether a graph has changed, and not again for each fact that is read inside.

    Code inside must not change the graph.
    """
    facts = _facts_of(graph)
    was_fixed = facts.fixed
    facts.fixed = True
    try:
        yield facts
    finally:
        facts.fixed = was_fixed


def copy_facts(graph: fx.Graph, copy: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> None:
    """Give a copy of a graph the facts about its nodes; `copies` maps each node to its copy."""

    def in_copy(fact: Any) -> Any:
        if isinstance(fact, fx.Node):
            return copies[fact]
        if isinstance(fact, dict):
            return {in_copy(key): in_copy(value) for key, value in fact.items()}
        if isinstance(fact, (list, tuple)):
            return type(fact)(map(in_copy, fact))
        return fact

    facts = _Facts(content_of(copy))
    for function, known in _facts_of(graph).of_nodes.items():
        facts.still_true[function] = {copies[node]: in_copy(known[node]) for node in known}
    copy.__dict__[_ATTRIBUTE] = facts


def once_per_graph(function: Callable[[fx.Graph], Fact]) -> Callable[[fx.Graph], Fact]:
    """Call a function once for a graph, and again when the graph has changed.

    The function may depend on the content of the graph alone: not on annotations, for example.
    Callers must not change what it returns. Each call compares the content with the last one.
    """

    @functools.wraps(function)
    def cached(graph: fx.Graph) -> Fact:
        with unchanging(graph) as facts:  # the function only reads
            if function not in facts.of_graph:
                facts.of_graph[function] = function(graph)
            return facts.of_graph[function]

    return cached


def once_per_node(
    function: Callable[[fx.Node], Fact],
) -> Callable[[fx.Graph], Mapping[fx.Node, Fact]]:
    """Call a function once for each node of a graph, and again for a node that has changed.

    The result maps every node of the graph, in order, to what the function returns. The function
    may depend on the op of the node, its arguments, its value, the values of its inputs and the
    graph that it runs: not on readers, on where the node is, or on annotations. Nodes in its result
    must be in a list, a tuple or a dictionary, or be the result. Otherwise as `once_per_graph`.
    """

    @functools.wraps(function)
    def cached(graph: fx.Graph) -> Mapping[fx.Node, Fact]:
        facts = _facts_of(graph)
        if function not in facts.of_nodes:
            known = facts.still_true.pop(function, {})
            nodes = facts.content[0]
            facts.of_nodes[function] = {n: known[n] if n in known else function(n) for n in nodes}
        return facts.of_nodes[function]

    return cached
