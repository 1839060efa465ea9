"""Formulas that torch chooses otherwise while a step is traced.

Some formulas look at values or select by a mask, and have another branch for tensors without
values. torch's sources call the condition areAnyTensorSubclassLike: it holds under every dispatch
mode, so that a trace takes the other branch. Where a graph can compute what eager does, it is made
to; where it cannot, it is equal to eager up to rounding, and its report says so. DTensors take the
branch of a trace in eager too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.annotations import module_of, value_of
from graph_trainer.core.torch_private import is_traceable_wrapper_subclass

aten = torch.ops.aten

KEY = "eager_formula"
"""The key in the annotations of nodes that an autograd node of `SPREAD` made."""

# The gradient of the largest, smallest or middle element of a whole tensor. Eager fills zeros with
# it on a CPU; a trace, and eager on CUDA, multiply by a mask, and give -0.0 where eager gives 0.0.
SPREAD = {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"}


def mark_of(node: Any, gradients: tuple[Any, ...]) -> dict[str, str]:
    """Return the annotation for what an autograd node makes of gradients: `KEY`, or nothing."""
    return {KEY: node.name()} if node.name() in SPREAD and _plain(gradients) else {}


def rounding_of(node: Any, gradients: tuple[Any, ...]) -> str | None:
    """Return why an autograd node gives eager's gradients up to rounding only, or None."""
    name = node.name()
    if name in ("ProdBackward0", "ProdBackward1") and _plain(gradients):
        return "the gradient of prod divides by its input in eager, if no element is zero"
    value_is_trained = name == "MaskedFillBackward1" and node.next_functions[1][0] is not None
    if value_is_trained and _plain(gradients):
        return "the gradient of masked_fill's value sums selected elements in eager, and zeros here"
    return None


def as_in_eager(graph: fx.Graph) -> list[str]:
    """Let formulas of `SPREAD` select with their mask, on CPUs. Linear in nodes.

    Returns:
        Why results of the graph are eager's up to rounding only, where formulas of forward are.
    """
    changed = []
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        if KEY in custom:
            node.meta["custom"] = {key: value for key, value in custom.items() if key != KEY}
            mask, each = node.args if node.target is aten.mul.Tensor else (None, None)
            if (
                isinstance(mask, fx.Node)
                and isinstance(each, fx.Node)
                and each.target is aten.div.Tensor
                and value_of(mask).dtype is torch.bool
                and value_of(mask).device.type == "cpu"
            ):
                node.target, node.args = aten.where.ScalarOther, (mask, each, 0)
        # the sum of class weights over the targets, distinct from any other masked_fill_
        if node.target is aten.masked_fill_.Scalar:
            weights, _, fill = node.args
            if fill == 0 and weights.target is aten.gather.default:
                index = weights.args[2]
                masks = (n.target for n in (index, *index.all_input_nodes))
                if aten.masked_fill.Scalar in masks:
                    changed.append(
                        "cross_entropy with weights, smoothed labels and ignored targets sums the "
                        "weights of the others in eager, and zeros here "
                        f"(module '{module_of(node)}')"
                    )
    return changed


def _plain(gradients: tuple[Any, ...]) -> bool:
    return not any(
        isinstance(g, torch.Tensor) and is_traceable_wrapper_subclass(g) for g in gradients
    )
