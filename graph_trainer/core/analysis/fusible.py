"""Which nodes a compiler can fuse with others, and which cost nothing."""

from __future__ import annotations

import torch
from torch import fx

from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.content import once_per_node
from graph_trainer.core.graph.ops import (
    OpOverload,
    aliased_input,
    argument,
    is_collective,
    is_getitem,
    is_random,
    is_wait,
    schema_of,
    written_arguments,
)

# Ops that fuse without torch's pointwise tag.
_FUSIBLE = {
    # reductions
    *("aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::var"),
    "aten::_fused_rms_norm",  # not its backward, which also sums over rows
    *("aten::_softmax", "aten::_softmax_backward_data"),
    *("aten::_log_softmax", "aten::_log_softmax_backward_data"),
    *("aten::nll_loss_forward", "aten::nll_loss_backward", "aten::gather"),
    # copies and constants
    *("aten::_to_copy", "aten::clone", "aten::cat", "aten::constant_pad_nd"),
    *("aten::arange", "aten::full", "aten::scalar_tensor"),
    *("aten::zeros", "aten::zeros_like", "aten::ones", "aten::ones_like"),
    # element by element
    *("aten::silu_backward", "aten::gelu_backward", "aten::native_dropout_backward"),
    *("aten::embedding", "aten::view_as_complex"),
}

_MOST_INLINED = 8  # torch._inductor.config.max_pointwise_cat_inputs


def is_free(node: fx.Node) -> bool:
    """Return whether a node computes nothing: a view, a wait, a getitem."""
    if node.op != "call_function":
        return node.op != "output"
    if is_getitem(node) or is_wait(node):
        return True
    schema = schema_of(node)
    if schema is None or is_collective(node):
        return False
    # the schema marks the result as a view, or as a list of views
    returns_view = bool(schema.returns) and schema.returns[0].alias_info is not None
    return (aliased_input(node) is not None or returns_view) and not written_arguments(node)


def has_own_buffer(node: fx.Node) -> bool:
    """Return whether a fusible node's result is in memory although its readers can fuse with it.

    This holds for a concatenation: on CPU for any, on other devices for one of many tensors.
    """
    # torch._inductor.lowering.cat makes a ConcatKernel of these, torch 2.13 to 2.15
    if node.target is not torch.ops.aten.cat.default:
        return False
    tensors = node.all_input_nodes
    on_cpu = any(t.device.type == "cpu" for t in tensors_of(node))
    return on_cpu or len(tensors) > _MOST_INLINED


def is_fusible(node: fx.Node) -> bool:
    """Return whether a compiler can fuse a node with adjacent ones."""
    schema = schema_of(node)
    if schema is None or is_free(node) or is_collective(node) or is_random(node):
        return False
    tensors = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
    if any(t.is_complex() for t in tensors):  # Inductor generates no code for complex numbers
        return False
    if len({t.device for t in tensors}) > 1:  # a copy between devices
        return False
    # a sum over leading dimensions that keeps the last one reads its input by column: it cannot
    # fuse with kernels that read by row, such as a norm and its gradient
    dims = argument(node, "dim")
    source = next((t for n in node.all_input_nodes for t in tensors_of(n)), None)
    if isinstance(dims, (list, tuple)) and dims and source is not None and source.dim():
        summed = {d % source.dim() for d in dims if isinstance(d, int)}
        if source.dim() - 1 not in summed:
            return False
    assert isinstance(node.target, OpOverload)
    return schema.name in _FUSIBLE or torch.Tag.pointwise in node.target.tags


free_nodes = once_per_node(is_free)
"""Maps every node of a graph to whether it computes nothing. Linear in nodes."""

fusible_nodes = once_per_node(is_fusible)
"""Maps every node of a graph to whether a compiler can fuse it. Linear in nodes."""
