"""Sizes of a recomputation: a number that is read a second time is that of the first read.

A checkpointed block runs again in backward. If it exchanges rows by counts that it reads, its
second exchange has the sizes of the first, which backward needs: gradients of the first rows meet
the rows of the second. A read of a fake tensor makes a new symbol, and torch cannot know that two
symbols are one number.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from graph_trainer.core.capture.tracing.rng_replay import draw_of
from graph_trainer.core.graph.annotations import module_of
from graph_trainer.core.graph.ops import argument_nodes, is_random
from graph_trainer.core.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    read_next_as,
    traced_node,
)

aten = torch.ops.aten

_SAME_VALUE = (aten.detach.default, aten.alias.default)
"""Ops that checkpointing and autograd insert or leave out."""


class RepeatedReads(TorchDispatchMode):
    """Give a number the symbol of an earlier read in the same module of an equal value.

    Values are equal if the same ops compute them from the same nodes. The read stays a node of its
    own: eager reads again too.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._reads: dict[str | None, list[tuple[fx.Node, torch.SymInt]]] = defaultdict(list)
        """By module, what was read and the number."""
        self._equal: set[tuple[fx.Node, fx.Node]] = set()
        """Pairs of nodes that compute equal values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not aten._local_scalar_dense.default or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        node = traced_node(args[0])
        reads = self._reads[module_of(node)]
        for earlier, number in reads:
            if self._are_equal(node, earlier):
                read_next_as(args[0], number)
                return func(*args)
        number = func(*args)
        reads.append((node, number))
        return number

    def _are_equal(self, node: fx.Node, other: fx.Node) -> bool:
        """Return whether two nodes compute equal values. Linear in the nodes that are in one of the
        two computations alone, and in these of all calls together if values are equal."""
        pairs = [(node, other)]
        equal = set()
        while pairs:
            first, second = map(_without_copies, pairs.pop())
            pair = (first, second)
            if first is second or pair in self._equal or pair in equal:
                continue
            if not _do_the_same(first, second):
                return False
            equal.add(pair)
            sources = argument_nodes((first.args, first.kwargs))
            others = argument_nodes((second.args, second.kwargs))
            pairs += zip(sources, others, strict=True)
        self._equal |= equal
        return True


def _without_copies(node: fx.Node) -> fx.Node:
    while node.target in _SAME_VALUE:
        node = node.all_input_nodes[0]
    return node


def _do_the_same(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes compute equal values if their inputs have equal values."""
    return (
        node.op == other.op == "call_function"
        and node.target is other.target
        and (not is_random(node) or draw_of(node) == draw_of(other))
        and _constants(node) == _constants(other)
    )


def _constants(node: fx.Node) -> str:
    """Return the arguments of a node as text, without the nodes among them: 1 is not 1.0."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: None))
