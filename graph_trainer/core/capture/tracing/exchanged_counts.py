"""Where the symbols of a graph come from: counts that ranks exchange before they send so many rows.

Rows go to other ranks by an all-to-all whose splits are numbers that `.tolist()` read. They are not
known when the step is captured. The graph shows that all members expect what the others send: the
rows that a rank sends are sums of the counts that it gave an all-to-all of equal parts on the same
group, and the rows that it receives are sums of the counts that this all-to-all returned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.annotations import (
    annotate_node,
    annotation,
    module_of,
    tensor_of,
    value_of,
)
from graph_trainer.core.graph.data_sizes import DataSizes, Exchange, expected
from graph_trainer.core.graph.ops import (
    aliased_input,
    argument,
    argument_nodes,
    collective_kind,
    is_getitem,
    is_wait,
)
from graph_trainer.errors import CaptureError

aten = torch.ops.aten


_COPIES = (aten._to_copy.default, aten.clone.default)


def trace_counts(graph: fx.Graph) -> None:
    """Mark each all-to-all of data-dependent splits with the exchange of their counts.

    Also set the expected value and the bound of every symbol: an equal share of the rows that a
    rank sends, and all of these rows. Linear in nodes.

    Raises:
        CaptureError: a number that the step reads from a tensor is not a split of an all-to-all, or
            the two lists of splits do not come from one exchange of counts.
    """
    symbols = [n for n in graph.nodes if n.target is aten._local_scalar_dense.default]
    if not symbols:
        return
    exchanges: dict[fx.Node, int] = {}
    for node in graph.nodes:
        sent, received = (argument(node, f"{side}_split_sizes") for side in ("input", "output"))
        if not argument_nodes([sent, received]):
            continue
        exchange, backwards = _exchange_of(node, sent, received)
        number = exchanges.setdefault(exchange, len(exchanges))
        annotate_node(node, annotation(counts=f"{number} back" if backwards else f"{number}"))
        rows = tensor_of(argument(node, "input")).shape[0]
        for splits in (sent, received):
            _expect(splits, rows)
        own = sent if backwards else received
        sizes = value_of(own[0]).node.shape_env
        if number == len(sizes.exchanges):
            read = tuple(value_of(each).node.expr for each in own)
            sizes.exchanges.append(Exchange(module_of(exchange) or "", read))
    for node in symbols:
        size = value_of(node)
        if size.node.expr not in size.node.shape_env.expected:
            raise CaptureError(
                f"the step reads a tensor's value into Python (node {node.name} in module "
                f"'{module_of(node)}'), by .item() or .tolist(), and there are no values while it "
                "is captured: compute with tensors. Only numbers of rows that ranks exchange and "
                "then send by an all-to-all may be read"
            )


def _exchange_of(node: fx.Node, sent: Any, received: Any) -> tuple[fx.Node, bool]:
    """Return the all-to-all that exchanged the counts of a node, and whether the node returns rows.

    To return rows, a rank sends as many as it has received by the counts.
    """
    sent_counts, received_counts = _summed(sent), _summed(received)
    if sent_counts is not None and received_counts is not None:
        directions = ((sent_counts, received_counts), (received_counts, sent_counts))
        for backwards, (gave, got) in enumerate(directions):
            exchange = _exchanged(got)
            if (
                exchange is not None
                and argument(exchange, "group_name") == argument(node, "group_name")
                and _base(argument(exchange, "input")) is _base(gave)
                and tensor_of(gave).shape == tensor_of(got).shape
            ):
                return exchange, bool(backwards)
    raise CaptureError(
        f"node {node.name} in module '{module_of(node)}' is an all-to-all whose splits are numbers "
        "read from tensors, and nothing shows that the other ranks expect as many rows: exchange "
        "the counts by an all-to-all of equal parts on the same group, and take the sums over each "
        "rank's part, of what was given and of what came, as splits"
    )


def _summed(splits: Any) -> fx.Node | None:
    """Return the counts [ranks, ...] if the splits are the sums of its rows, in order."""
    source: Any = None
    for place, node in enumerate(splits):
        if not isinstance(node, fx.Node) or node.target is not aten._local_scalar_dense.default:
            return None
        item: Any = node.args[0]
        if not is_getitem(item) or item.args[1] != place or source not in (None, item.args[0]):
            return None
        source = item.args[0]
    if source is None or source.target is not aten.unbind.int:
        return None
    sums = source.args[0]
    while sums.target in _COPIES:
        sums = sums.args[0]
    if sums.target is not aten.sum.dim_IntList or sums.args[1] != [1]:
        return None
    counts = sums.args[0]
    return counts if tensor_of(counts).shape[0] == len(splits) else None


def _exchanged(counts: fx.Node) -> fx.Node | None:
    """Return the all-to-all of equal parts that returned the counts."""
    base = _base(counts, through_waits=True)
    kind = collective_kind(base)
    if kind is None or "all_to_all_single" not in kind.ops:
        return None
    splits = argument(base, "input_split_sizes"), argument(base, "output_split_sizes")
    ranks = tensor_of(counts).shape[0]
    equal = [tensor_of(argument(base, "input")).shape[0] // ranks] * ranks
    return base if all(list(each) == equal for each in splits) else None


def _base(node: Any, *, through_waits: bool = False) -> fx.Node:
    """Return what made the numbers of a node, in the same order."""
    while True:
        source = node.args[0] if node.target in _COPIES else aliased_input(node)
        if source is None or (is_wait(node) and not through_waits):
            return node
        node = source


def _expect(splits: Any, rows: int | torch.SymInt) -> None:
    """Set the expected value and the bound of the splits' symbols, unless they are set.

    A split is expected to be an equal share of the rows that a rank sends, and is at most all of
    them. The first all-to-all of an exchange sets them.
    """
    sizes = value_of(splits[0]).node.shape_env
    assert isinstance(sizes, DataSizes)
    for place, node in enumerate(splits):
        symbol = value_of(node).node.expr
        if symbol not in sizes.expected:
            ranks, number = len(splits), expected(rows)
            sizes.expected[symbol] = number // ranks + (place < number % ranks)
            sizes.bounds[symbol] = number
