"""What a graph consists of, and facts of a graph that are remembered until that changes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import fx

from graph_trainer.core.graph.data_sizes import data_sizes_of

Fact = TypeVar("Fact")
Content = list[list[object]]
"""Nodes, kinds of nodes, targets, arguments, keyword arguments and values, in graph order, each a
list; the sizes to expect of what data decide; then the same of the graphs that higher-order ops
run."""

_ATTRIBUTE = "graph_trainer_facts"
"""Of a graph: its content and the facts of that, so that all of them are freed together."""

_METAS = operator.attrgetter("meta")
_READ = tuple(map(operator.attrgetter, ("op", "target", "args", "kwargs")))


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
    """Tell whether a graph has not changed: fx makes a new object of whatever it changes."""
    if list(map(len, before)) != list(map(len, now)):
        return False
    return all(all(map(operator.is_, *both)) for both in zip(before, now, strict=True))


def once_per_graph(function: Callable[[fx.Graph], Fact]) -> Callable[[fx.Graph], Fact]:
    """Call a function once for a graph, and again when the graph has changed.

    The function may depend on the content of the graph and on nothing else, such as annotations.
    Callers must not change what it returns. Nothing has to announce a
    change: each call compares the content with what it was.
    """

    @functools.wraps(function)
    def remembered(graph: fx.Graph) -> Fact:
        content = content_of(graph)
        before, facts = graph.__dict__.get(_ATTRIBUTE, (content, {}))
        if not is_same(before, content):
            before, facts = content, {}
        # First, as the function may ask for facts of its own.
        graph.__dict__[_ATTRIBUTE] = before, facts
        if function not in facts:
            facts[function] = function(graph)
        return facts[function]

    return remembered
