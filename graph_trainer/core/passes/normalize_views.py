"""Remove views that change nothing."""

from __future__ import annotations

import torch
from torch import fx

from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.data_sizes import exact_layout, has_data_sizes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext

aten = torch.ops.aten

_ALIASES = {
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
}
_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
}


@graph_pass(stage=Stage.CLEANUP, summary="Remove no-op views, detaches and double transposes")
def normalize_views(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Let readers of a view that changes nothing read its input.

    Removes detach and alias, views that show exactly their input, and views of a view that show
    exactly that view's input, as a transpose of a transpose does. A view whose input has other
    strides since an earlier pass, and cannot be viewed any more, becomes a reshape.

    Relies on fake values in `meta`. Guarantees that storages stay shared as they were: a
    removed view had its input's storage. Linear in nodes.
    """
    graph = joint.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = _same_as(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target is aten.view.default and not _can_view(*node.args[:2]):
            source, shape = node.args[:2]
            node.target = aten.reshape.default
            # a copy, with the strides of a copy
            node.meta["val"] = value_of(source).reshape(shape)


def _same_as(node: fx.Node) -> fx.Node | None:
    """Return the node that has the same elements as a view of it, if there is one."""
    source = _first_argument(node)
    if source is None:
        return None
    if node.target in _ALIASES:
        return source
    if node.target not in _VIEWS:
        return None
    if shows_the_same(node, source):
        return source
    before = _first_argument(source) if source.target in _VIEWS else None
    return before if before is not None and shows_the_same(node, before) else None


def _first_argument(node: fx.Node) -> fx.Node | None:
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) else None


def shows_the_same(view: fx.Node, source: fx.Node) -> bool:
    """Return whether two tensors on one storage have the same elements in the same places.

    Shape, strides and offset decide, whatever views lie between the two: swapping two dimensions
    of equal size, for one, exchanges their strides.
    """
    x, y = value_of(view), value_of(source)
    return (
        isinstance(x, torch.Tensor)
        and isinstance(y, torch.Tensor)
        and exact_layout(x) == exact_layout(y)
        and x.dtype == y.dtype
    )


def _can_view(source: fx.Node, shape: object) -> bool:
    """Return whether a node's (fake) value can be viewed in another shape without a copy."""
    value = source.meta.get("val")
    if isinstance(value, torch.Tensor) and has_data_sizes(value):
        return False
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return True
    try:
        value.view(shape)  # type: ignore[call-overload]
    except (RuntimeError, ValueError):
        return False
    return True
