"""Run torchtitan's validation with a captured forward in place of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.tools.logging import logger

from graph_trainer.core.capture.trace import LossFn
from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.titan.step_inputs import loss_of_batch

Within = Callable[[], AbstractContextManager[None]]
_Call = tuple[nn.Module, torch.Tensor, dict[str, Any]]


class CapturedValidator(BaseValidator):
    """torchtitan's `Validator` on a graph of forward and loss.

    Data, mode, counting of tokens, reduction over ranks and logging are torchtitan's. Its
    validator calls the model for a prediction and then the loss with that prediction. Here the
    first call only records its arguments, and the second runs both in one graph.

    Args:
        validator: torchtitan's; its loss function is replaced.
        make_step: makes the step without backward for `loss(model, inputs, labels, **extra)`, the
            sum over the tokens of one batch: see `loss_of_batch`.
        within: makes the context that a validation runs in.
    """

    def __init__(
        self, validator: Validator, make_step: Callable[[LossFn], TrainStep], within: Within
    ) -> None:
        super().__init__(validator.config)
        self._validator = validator
        self._within = within
        self.step = make_step(loss_of_batch(validator.loss_fn))
        validator.loss_fn = self._run

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate as torchtitan does; the first validation captures.

        Raises:
            GraphTrainerError: as `TrainStep`.
        """
        with self._within():
            self._validator.validate([_Recording(model) for model in model_parts], step)

    def _run(self, call: _Call, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        model, inputs, extra = call
        loss, _ = self.step(model, inputs, labels, **extra)
        return loss, {}


def with_captured_forward(
    validator: BaseValidator, make_step: Callable[[LossFn], TrainStep], *, within: Within
) -> BaseValidator:
    """Let torchtitan's own validator run a captured graph.

    A validator of another class is returned unchanged, because what it calls is unknown, and the
    log says so. The arguments are those of `CapturedValidator`.
    """
    if type(validator) is Validator:
        return CapturedValidator(validator, make_step, within)
    logger.warning(
        f"The validator is a {type(validator).__name__} and not torchtitan's Validator: it "
        "validates with the model itself, without a captured graph"
    )
    return validator


class _Recording:
    """A model that returns the arguments of a call in place of a prediction.

    All other attributes are the model's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, inputs: torch.Tensor, **extra: Any) -> _Call:
        return self._model, inputs, extra

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
