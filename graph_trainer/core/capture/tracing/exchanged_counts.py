"""Where the symbols of a graph come from: counts that ranks exchange before they send rows.

Ranks send rows by an all-to-all whose splits are numbers that `.tolist()` read, which are not known
when the step is captured. The graph must show that all ranks expect what the others send. The
counts are exchanged by another all-to-all, of equal parts and on the same group: the rows that a
rank sends are sums of the counts that it sent, and the rows that it receives are sums of the counts
that it received.
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

    Also set the expected value of every symbol, an equal share of the rows that a rank sends, and
    its bound, all of these rows. Linear in nodes.

    Raises:
        CaptureError: a number that the step reads from a tensor is not a split of an all-to-all, or
            the two lists of splits do not come from one exchange of counts.
    """
    symbols = [n for n in graph.nodes if n.target is aten._local_scalar_dense.default]
    if not symbols:
        return
    sizes = value_of(symbols[0]).node.shape_env
    # by the symbols that an exchange returned: one that is recomputed returns those of the first
    exchanges: dict[tuple[object, ...], int] = {}
    for node in graph.nodes:
        sent = argument(node, "input_split_sizes")
        received = argument(node, "output_split_sizes")
        if not argument_nodes([sent, received]):
            continue
        exchange, returns_rows = _exchange_of(node, sent, received)
        # the rows that this rank receives from the others, or has received when it returns them
        local = tuple(value_of(split).node.expr for split in (sent if returns_rows else received))
        if local not in exchanges:
            exchanges[local] = len(exchanges)
            sizes.exchanges.append(Exchange(module_of(exchange) or "", local))
        number = exchanges[local]
        annotate_node(node, annotation(counts=f"{number} back" if returns_rows else f"{number}"))
        rows = tensor_of(argument(node, "input")).shape[0]
        _expect(sent, rows)
        _expect(received, rows)
    for node in symbols:
        size = value_of(node)
        if size.node.expr not in size.node.shape_env.expected:
            raise CaptureError(
                f"the step reads a tensor's value into Python (node {node.name} in module "
                f"'{module_of(node)}'), by .item() or .tolist(), and tensors have no values during "
                "capture: compute with tensors. Only numbers of rows that ranks exchange and then "
                "send by an all-to-all may be read"
            )


def _exchange_of(node: fx.Node, sent: Any, received: Any) -> tuple[fx.Node, bool]:
    """Return the all-to-all that exchanged the counts of a node, and whether the node returns rows.

    A rank that returns rows sends as many as it has received by the counts.
    """
    sent_counts = _counts(sent)
    received_counts = _counts(received)
    if sent_counts is not None and received_counts is not None:
        group = argument(node, "group_name")
        exchange = _exchange_between(sent_counts, received_counts, group)
        if exchange is not None:
            return exchange, False
        exchange = _exchange_between(received_counts, sent_counts, group)
        if exchange is not None:
            return exchange, True
    raise CaptureError(
        f"node {node.name} in module '{module_of(node)}' is an all-to-all whose splits are numbers "
        "read from tensors, and the graph does not show that the other ranks expect as many rows: "
        "exchange the counts by an all-to-all of equal parts on the same group, and use as splits "
        "the sums of the counts for each rank, of those sent and of those received"
    )


def _exchange_between(sent: fx.Node, received: fx.Node, group: object) -> fx.Node | None:
    """Return the all-to-all on a group that sent some counts and received others, if any."""
    exchange = _exchange_of_equal_parts(received)
    if (
        exchange is not None
        and argument(exchange, "group_name") == group
        and _base(argument(exchange, "input")) is _base(sent)
        and tensor_of(sent).shape == tensor_of(received).shape
    ):
        return exchange
    return None


def _counts(splits: Any) -> fx.Node | None:
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


def _exchange_of_equal_parts(counts: fx.Node) -> fx.Node | None:
    """Return the all-to-all of equal parts that returned the counts."""
    base = _base(counts, through_waits=True)
    kind = collective_kind(base)
    if kind is None or "all_to_all_single" not in kind.ops:
        return None
    ranks = tensor_of(counts).shape[0]
    equal_parts = [tensor_of(argument(base, "input")).shape[0] // ranks] * ranks
    for name in ("input_split_sizes", "output_split_sizes"):
        if list(argument(base, name)) != equal_parts:
            return None
    return base


def _base(node: Any, *, through_waits: bool = False) -> fx.Node:
    """Return the node that made the numbers of a node, in the same order."""
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
    for rank, node in enumerate(splits):
        symbol = value_of(node).node.expr
        if symbol not in sizes.expected:
            total = expected(rows)
            share, rest = divmod(total, len(splits))
            sizes.expected[symbol] = share + 1 if rank < rest else share
            sizes.bounds[symbol] = total
