"""torchtitan's validation, with a captured forward in the model's place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.tools.logging import logger

from graph_trainer.core.runtime.step_cache import TrainStep

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of the model, inputs and labels (both int64 [local batch, sequence]); keywords are the
model's."""
Within = Callable[[], AbstractContextManager[None]]


class CapturedValidator(BaseValidator):
    """torchtitan's `Validator` on a graph of forward and loss.

    Data, mode, counting of tokens, reduction over ranks and logging are torchtitan's. It calls a
    model for a prediction and then a loss with it; here the first call only notes what it is
    given, and the second runs both in one graph.

    Arguments:
        validator: torchtitan's, whose loss function is replaced.
        make_step: the step without backward for a loss of one batch.
        within: what a validation runs in.
    """

    def __init__(
        self, validator: Validator, make_step: Callable[[Loss], TrainStep], within: Within
    ) -> None:
        super().__init__(validator.config)
        self._validator = validator
        self._within = within
        self.step = make_step(_loss_of_validation(validator.loss_fn))
        validator.loss_fn = self._run

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """torchtitan's validation; the first one captures.

        Raises:
            GraphTrainerError: as `TrainStep`.
        """
        with self._within():
            self._validator.validate([_Noting(model) for model in model_parts], step)

    def _run(self, call: _Call, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        loss, _ = self.step(call.model, call.inputs, labels, **call.extra)
        return loss, {}


def with_captured_forward(
    validator: BaseValidator, make_step: Callable[[Loss], TrainStep], *, within: Within
) -> BaseValidator:
    """The same validation on a captured graph where the validator is torchtitan's own; another
    one stays as it is, since nobody knows what it calls, and the log says so. Arguments are
    those of `CapturedValidator`."""
    if type(validator) is Validator:
        return CapturedValidator(validator, make_step, within)
    logger.warning(
        f"The validator is a {type(validator).__name__} and not torchtitan's Validator: it "
        "validates with the model itself, without a captured graph"
    )
    return validator


def _loss_of_validation(loss_fn: Callable[..., Any]) -> Loss:
    """What torchtitan's Validator computes of one batch: a sum over tokens."""

    def loss(
        model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, **extra: Any
    ) -> torch.Tensor:
        value, _ = loss_fn(model(inputs, **extra), labels)
        return value

    return loss


@dataclass(frozen=True, slots=True)
class _Call:
    """What a model is called with: it stands for its prediction."""

    model: nn.Module
    inputs: torch.Tensor
    extra: dict[str, Any]


class _Noting:
    """A model whose prediction is the call itself; all else of it is the model's own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, inputs: torch.Tensor, **extra: Any) -> _Call:
        return _Call(self._model, inputs, extra)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
