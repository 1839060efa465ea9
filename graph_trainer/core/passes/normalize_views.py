"""Remove views that change nothing."""

from __future__ import annotations

import torch
from torch import fx

from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.data_sizes import exact_layout, has_data_sizes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import aten
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext

_ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
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

    Removes detach and alias, views with the same layout as their input, and views of a view with
    the same layout as that view's input, such as a transpose of a transpose. If an earlier pass has
    changed the strides of a view's input so that it cannot be viewed any more, the view becomes a
    reshape.

    Relies on fake values in `meta`. Guarantees that the same tensors share storages: a removed view
    had its input's storage. Linear in nodes.
    """
    graph = joint.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        # a node with the same elements in the same layout: the input, or that of a view before
        same: fx.Node | None = None
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and node.target in _ALIASES:
            same = source
        elif isinstance(source, fx.Node) and node.target in _VIEWS:
            before = source.args[0] if source.target in _VIEWS and source.args else None
            if shows_the_same(node, source):
                same = source
            elif isinstance(before, fx.Node) and shows_the_same(node, before):
                same = before
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif node.target is aten.view.default:
            source, shape = node.args[:2]
            value = value_of(source)
            if not isinstance(value, torch.Tensor):
                continue
            if has_data_sizes(value):  # whether it can be viewed depends on data
                node.target = aten.reshape.default
                continue
            if value.is_contiguous():
                continue
            try:
                value.view(shape)
            except (RuntimeError, ValueError):
                node.target = aten.reshape.default
                # a copy, with the strides of a copy
                node.meta["val"] = value.reshape(shape)


def shows_the_same(view: fx.Node, source: fx.Node) -> bool:
    """Return whether two tensors on one storage have the same elements in the same places.

    Shape, strides and offset decide, for any views between the two: swapping two dimensions of
    equal size, for example, exchanges their strides.
    """
    tensor = value_of(view)
    base = value_of(source)
    return (
        isinstance(tensor, torch.Tensor)
        and isinstance(base, torch.Tensor)
        and exact_layout(tensor) == exact_layout(base)
        and tensor.dtype == base.dtype
    )
