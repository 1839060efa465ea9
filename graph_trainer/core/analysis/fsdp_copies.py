"""The nodes by which FSDP prepares what a collective sends, and those that take its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import fx

from graph_trainer.core.graph.annotations import Role, role_of
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.torch_private import inputs_of


class FsdpCopies(NamedTuple):
    """Nodes with an FSDP role around the collectives, each with its collective."""

    before: Mapping[fx.Node, fx.Node]
    """Casts and copies into the tensor that is sent."""
    after: Mapping[fx.Node, fx.Node]
    """The wait, and copies of the result. A collective after another one is among them, and what
    follows it belongs to the second."""


def fsdp_copies(
    graph: fx.Graph, is_of_fsdp: Callable[[fx.Node], bool] = is_collective
) -> FsdpCopies:
    """Return the nodes around all collectives with an FSDP role. Linear in nodes.

    Args:
        is_of_fsdp: which nodes with a role are FSDP's collectives. Other collectives, such as those
            by which tensor parallelism sums a gradient, are then among the nodes around these.
    """
    after: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if role_of(node) is None:
            continue
        for source in inputs_of(node):
            if role_of(source) is not None and is_of_fsdp(source):
                after[node] = source
            elif source in after:
                after[node] = after[source]
    before: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        if role_of(node) is None or is_of_fsdp(node) or node in after:
            continue
        for user in node.users:
            if role_of(user) is not None and is_of_fsdp(user):
                before[node] = user
            elif user in before:
                before[node] = before[user]
    return FsdpCopies(before, after)


def copies_into_gathers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the nodes that prepare what FSDP's gathers send, each with its gather. Linear."""
    before = fsdp_copies(graph).before
    return {node: c for node, c in before.items() if role_of(c) is Role.UNSHARD}
