"""One call of a step, read once: what finds its graph and what checks it both use the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from graph_trainer.core.torch_private import hooks_of, pytree


class Call:
    """The model and the batch that a step is called with.

    Walking the modules and flattening the batch are most of what a check of a call costs, so each
    is done here and nowhere else.

    Attributes:
        modules: every module, in the order of `model.modules()`.
        training: the mode of each module.
        hooks: see `hooks_of`.
        leaves: the tensors and constants of (args, kwargs).
        tree: their structure, as pytree gives it.
        tree_text: its text: equal trees may have keys 1 and True.
    """

    __slots__ = ("hooks", "leaves", "model", "modules", "training", "tree", "tree_text")

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.model = model
        self.modules = list(model.modules())
        self.training = [module.training for module in self.modules]
        self.hooks = hooks_of(self.modules)
        self.leaves, self.tree = pytree.tree_flatten(arguments(args, kwargs))
        self.tree_text = repr(self.tree)


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what pytree takes apart; the order of keyword arguments has no meaning."""
    return tuple(args), dict(sorted(kwargs.items()))
