"""What the function that is captured returns: a loss, or the outputs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graph_trainer.core.graph.signature import OutputKind
from graph_trainer.core.torch_private import pytree
from graph_trainer.errors import CaptureError

Returned = Callable[[Any], list[tuple[OutputKind, str, torch.Tensor]]]
"""Takes what was returned; gives its tensors, with what each is and its name."""


def scalar_loss(value: Any) -> list[tuple[OutputKind, str, torch.Tensor]]:
    """Take the loss.

    Raises:
        CaptureError: it is not a scalar tensor.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(
            f"loss_fn must return a scalar tensor and returned {shape}; sum or average it"
        )
    return [(OutputKind.LOSS, "loss", value)]


class ModelOutputs:
    """Takes the tensors out of what a model returns, and puts such a structure together again."""

    def __init__(self) -> None:
        self._tree: Any = None
        self._constants: list[Any] = []
        self._is_tensor: list[bool] = []
        self.differentiable: list[str] = []
        """The names of the outputs that depend on what requires a gradient."""

    def __call__(self, value: Any) -> list[tuple[OutputKind, str, torch.Tensor]]:
        """Take the tensors of what the model returned; the rest becomes constants.

        Raises:
            CaptureError: there is no tensor.
        """
        leaves, self._tree = pytree.tree_flatten(value)
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise CaptureError(
                f"the model returns a {type(value).__name__} without tensors; return what the loss "
                "is computed from"
            )
        outputs = [(OutputKind.OUTPUT, f"output {i}", tensor) for i, tensor in enumerate(tensors)]
        self.differentiable = [name for _, name, tensor in outputs if tensor.requires_grad]
        return outputs

    def rebuild(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the structure with other tensors in it."""
        given = iter(tensors)
        pairs = zip(self._is_tensor, self._constants, strict=True)
        leaves = [next(given) if is_tensor else constant for is_tensor, constant in pairs]
        return pytree.tree_unflatten(leaves, self._tree)
