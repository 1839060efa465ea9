"""Views in a traced graph: make them out of place, and valid for any strides of real kernels."""

from __future__ import annotations

import torch
from torch import fx

from graph_trainer.core.graph.annotations import module_of, tensors_of, value_of
from graph_trainer.core.graph.data_sizes import has_data_sizes
from graph_trainer.core.graph.ops import OpOverload, aliased_input, is_getitem
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.errors import CaptureError

aten = torch.ops.aten

# Overloads that have another name out of place.
_OVERLOADS = {torch.ops.aten.transpose_.default: "int"}


def views_out_of_place(graph: fx.Graph) -> None:
    """Replace ops that change a tensor's shape or strides in place by ops that make a view.

    In the trace, later readers read the result of the op already. Passes rely on a node's shape and
    strides being constant. Linear in nodes.

    Raises:
        CaptureError: an op without such a counterpart, as set_.
    """
    for node in graph.nodes:
        op = node.target
        if not isinstance(op, OpOverload) or torch.Tag.inplace_view not in op.tags:
            continue
        packet = getattr(torch.ops.aten, op._opname.removesuffix("_"), None)
        view = getattr(packet, _OVERLOADS.get(op, op._overloadname), None)
        if op.namespace != "aten" or view is None or torch.Tag.inplace_view in view.tags:
            raise CaptureError(
                f"the step calls {op} (module '{module_of(node)}'), which replaces the memory of a "
                "tensor in place: make a new tensor instead"
            )
        node.target = view


def let_views_copy(graph: fx.Graph) -> None:
    """Replace views of computed results that are not contiguous by reshapes. Linear in nodes.

    A real kernel may give such a result other strides than its fake kernel does. A reshape is the
    same view if the strides allow one, and else a copy. A view that the step writes through stays a
    view.

    Raises:
        CaptureError: the step writes into a copy of such a result, which eager may not have made.
    """
    writes = writes_of(graph)
    uncertain: set[fx.Node] = set()  # results whose strides a real kernel decides, and their views
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if is_getitem(node) else aliased_input(node)
        if source is None:
            _check_copy(node, uncertain, writes.is_written(node))
            if not all(_is_contiguous(tensor) for tensor in tensors_of(node)):
                uncertain.add(node)
        elif source in uncertain:
            uncertain.add(node)
            if (
                node.target in (aten.view.default, aten._unsafe_view.default)
                and value_of(node).shape != value_of(source).shape
                and not writes.is_written(node)  # a write into a copy would be lost
            ):
                node.target = aten.reshape.default


def _is_contiguous(tensor: torch.Tensor) -> bool:
    # strides that depend on data cannot be compared, and count as contiguous
    return has_data_sizes(tensor) or tensor.is_contiguous()


def _check_copy(node: fx.Node, uncertain: set[fx.Node], is_written: bool) -> None:
    """Refuse a write into a copy that reshape() and contiguous() make for some strides only."""
    if (
        is_written
        and node.target is aten.clone.default
        and node.kwargs.get("memory_format") is torch.contiguous_format
        and node.args[0] in uncertain
    ):
        raise CaptureError(
            f"the step writes in place (module '{module_of(node)}') into the result of reshape() "
            "or contiguous(), which is a copy or a view, depending on the strides that a kernel "
            "gives its result: call clone() first, or compute out of place"
        )
