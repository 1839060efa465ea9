"""What a graph consists of, and facts of a graph and its nodes, remembered until that changes."""

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
"""Nodes, kinds of nodes, targets, arguments, keyword arguments and values, in graph order, each a
list; the sizes to expect of what data decide; then the same of the graphs that higher-order ops
run."""

_ATTRIBUTE = "graph_trainer_facts"
"""Of a graph: its content and the facts of that, so that all of them are freed together."""

_METAS = operator.attrgetter("meta")
_READ = tuple(map(operator.attrgetter, NODE_ATTRIBUTES))
_SIZES = len(_READ) + 2
"""The place of the expected sizes in a content, after the lists with an entry for each node."""


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
    """List what a graph consists of now, annotations apart. Linear in nodes, 4 ms for 15,000."""
    nodes = list(graph.nodes)
    values = [meta.get("val") for meta in map(_METAS, nodes)]  # as value_of, in half the time
    first = next((v for v in values if isinstance(v, torch.Tensor)), None)
    sizes = None if first is None else data_sizes_of(first)
    content = [nodes, *(list(map(read, nodes)) for read in _READ), values]
    content.append([] if sizes is None else [sizes.expected])
    for node in graph.find_nodes(op="get_attr"):
        if (subgraph := subgraph_of(node)) is not None:
            content += content_of(subgraph.graph)
    return content


def is_same(before: Content, now: Content) -> bool:
    """Return whether a graph has not changed: fx makes a new object of whatever it changes."""
    if before is now:
        return True
    if list(map(len, before)) != list(map(len, now)):
        return False
    return all(all(map(operator.is_, *both)) for both in zip(before, now, strict=True))


def _rows(content: Content) -> dict[fx.Node, tuple[int, ...]]:
    """Return by node what the node consists of: the ids of what `content` keeps alive."""
    nodes, *lists = content[:_SIZES]
    ids = (map(id, each) for each in lists)
    return dict(zip(nodes, zip(*ids, strict=True), strict=True))


@dataclass(slots=True)
class _Facts:
    """What is known of a graph that consists of `content`."""

    content: Content
    of_graph: dict[Any, Any] = field(default_factory=dict)
    """By function."""
    of_nodes: dict[Any, dict[fx.Node, Any]] = field(default_factory=dict)
    """By function and node."""
    still_true: dict[Any, dict[fx.Node, Any]] = field(default_factory=dict)
    """The same of an earlier content, of the nodes that have not changed."""
    fixed: bool = False
    """Whether the graph cannot change now."""
    rows: dict[fx.Node, tuple[int, ...]] | None = None
    """As `_rows`, once a change has been compared."""

    def after_change(self, content: Content) -> _Facts:
        """Keep the facts of the nodes that a change has left alone, wherever they are now."""
        facts = _Facts(content)
        known = self.still_true | self.of_nodes
        if known and is_same([self.content[_SIZES]], [content[_SIZES]]):
            before, now = self.rows or _rows(self.content), _rows(content)
            facts.rows = now
            # a get_attr node does not show that the graph that it reads has changed
            changed = [n for n, row in now.items() if row != before.get(n) or n.op == "get_attr"]
            alike = now.keys() - set(changed).union(*(n.users for n in changed))
            for function, of_nodes in known.items():
                kept = {node: of_nodes[node] for node in alike & of_nodes.keys()}
                facts.still_true[function] = kept
        return facts


def known_content(graph: fx.Graph) -> Content:
    """Return what a graph consists of now: the same object as before where it has not changed."""
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
    """Compare a graph with what it was once, and not for each fact that is asked for inside.

    Nothing inside may change the graph.
    """
    facts = _facts_of(graph)
    before, facts.fixed = facts.fixed, True
    try:
        yield facts
    finally:
        facts.fixed = before


def copy_facts(graph: fx.Graph, copy: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> None:
    """Give a copy of a graph, with a node for each of its nodes, what is known of those."""

    def in_copy(fact: Any) -> Any:
        if isinstance(fact, fx.Node):
            return copies[fact]
        if isinstance(fact, dict):
            return {in_copy(key): in_copy(value) for key, value in fact.items()}
        return type(fact)(map(in_copy, fact)) if isinstance(fact, (list, tuple)) else fact

    facts = _Facts(content_of(copy))
    for function, known in _facts_of(graph).of_nodes.items():
        facts.still_true[function] = {copies[node]: in_copy(known[node]) for node in known}
    copy.__dict__[_ATTRIBUTE] = facts


def once_per_graph(function: Callable[[fx.Graph], Fact]) -> Callable[[fx.Graph], Fact]:
    """Call a function once for a graph, and again when the graph has changed.

    The function may depend on the content of the graph and on nothing else, such as annotations.
    Callers must not change what it returns. Each call compares the content with what it was.
    """

    @functools.wraps(function)
    def remembered(graph: fx.Graph) -> Fact:
        with unchanging(graph) as facts:  # the function only reads
            if function not in facts.of_graph:
                facts.of_graph[function] = function(graph)
            return facts.of_graph[function]

    return remembered


def once_per_node(
    function: Callable[[fx.Node], Fact],
) -> Callable[[fx.Graph], Mapping[fx.Node, Fact]]:
    """Call a function once for each node of a graph, and again for a node that has changed.

    What is remembered maps every node of the graph, in order, to what the function returns.
    The function may depend on the op of the node, its arguments, its value, the values of its
    inputs and the graph that it runs: not on readers, on where the node is, or on annotations.
    It returns nodes, if at all, in a list, a tuple or a dictionary. Otherwise as `once_per_graph`.
    """

    @functools.wraps(function)
    def remembered(graph: fx.Graph) -> Mapping[fx.Node, Fact]:
        facts = _facts_of(graph)
        if function not in facts.of_nodes:
            known = facts.still_true.pop(function, {})
            nodes = facts.content[0]
            facts.of_nodes[function] = {n: known[n] if n in known else function(n) for n in nodes}
        return facts.of_nodes[function]

    return remembered
