"""What the function that is captured returns: a loss, or the outputs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graph_trainer.core.graph.signature import OutputKind
from graph_trainer.core.torch_private import pytree
from graph_trainer.errors import CaptureError

Returned = Callable[[Any], list[tuple[OutputKind, str, torch.Tensor]]]
"""Takes what the function returned; returns its tensors, with the kind and the name of each."""


def scalar_loss(value: Any) -> list[tuple[OutputKind, str, torch.Tensor]]:
    """Take the loss.

    Raises:
        CaptureError: it is not a scalar tensor.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(
            f"loss_fn must return a scalar tensor, and it returned {shape}: sum or average the loss"
        )
    return [(OutputKind.LOSS, "loss", value)]


class ModelOutputs:
    """Takes the tensors out of what a model returns, and rebuilds that structure."""

    def __init__(self) -> None:
        self._tree: Any = None
        self._constants: list[Any] = []
        self._is_tensor: list[bool] = []
        self.differentiable: list[str] = []
        """The names of the outputs that require a gradient."""

    def __call__(self, value: Any) -> list[tuple[OutputKind, str, torch.Tensor]]:
        """Take the tensors out of what the model returned; all else becomes constants.

        Raises:
            CaptureError: there is no tensor.
        """
        leaves, self._tree = pytree.tree_flatten(value)
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise CaptureError(
                f"the model returned a {type(value).__name__} without tensors: return the tensors "
                "that the loss is computed from"
            )
        outputs = [(OutputKind.OUTPUT, f"output {i}", tensor) for i, tensor in enumerate(tensors)]
        self.differentiable = [name for _, name, tensor in outputs if tensor.requires_grad]
        return outputs

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the structure with other tensors in it."""
        remaining = iter(tensors)
        leaves = []
        for is_tensor, constant in zip(self._is_tensor, self._constants, strict=True):
            leaves.append(next(remaining) if is_tensor else constant)
        return pytree.tree_unflatten(leaves, self._tree)
