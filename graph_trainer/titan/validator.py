"""Run torchtitan's validation on a captured forward, and check its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.tools.logging import logger

from graph_trainer.core.capture.tracing.trace import LossFn
from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.errors import TrainingError
from graph_trainer.titan.captured_stages import ValidationSchedule
from graph_trainer.titan.checkpoint_states import keep_generators_from
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.step_inputs import loss_of_batch

MakeStep = Callable[[LossFn], TrainStep]
Within = Callable[[], AbstractContextManager[None]]
_Call = tuple[nn.Module, torch.Tensor, dict[str, Any]]


class CheckedValidator(BaseValidator):
    """torchtitan's `Validator` on a graph of forward and loss, with errors about its data.

    Data, mode, counting of tokens, reduction over ranks and logging are torchtitan's. Its
    validator calls the model for a prediction and then the loss with that prediction. Here the
    first call only records its arguments, and the second runs both in one graph.

    Args:
        validator: torchtitan's; its data loader's config and its loss function are replaced.
        make_step: makes the step without backward for `loss(model, inputs, labels, **extra)`, the
            sum over the tokens of one batch: see `loss_of_batch`. None for a validation with the
            model itself, without a graph.
        within: makes the context that a validation runs in.
        schedule: runs the stages of a pipeline, which has no step.
    """

    def __init__(
        self,
        validator: Validator,
        make_step: MakeStep | None,
        within: Within,
        schedule: ValidationSchedule | None = None,
    ) -> None:
        super().__init__(validator.config)
        self._validator = validator
        self._within = within
        if isinstance(validator.dl_config, TextDataLoader.Config):
            # refuses a text of less than a batch now, and not after the first step
            validator.dl_config.build(
                dp_world_size=validator.dp_world_size,
                dp_rank=validator.dp_rank,
                tokenizer=validator.tokenizer,
                seq_len=validator.seq_len,
                local_batch_size=validator.local_batch_size,
            )
        validator.dl_config = _NotEmpty(validator.dl_config)
        if schedule is not None:
            # every rank gets the loss, and passes inputs and labels
            validator.pp_schedule = schedule
            validator.pp_has_first_stage = validator.pp_has_last_stage = True
        self.step = make_step(loss_of_batch(validator.loss_fn)) if make_step else None
        if self.step:
            validator.loss_fn = self._run

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate as torchtitan does; the first validation captures.

        Raises:
            TrainingError: the data have less than a batch for this rank, or no label that counts.
            GraphTrainerError: as `TrainStep`.
        """
        models = [_Recording(model) for model in model_parts] if self.step else model_parts
        with self._within():
            try:
                self._validator.validate(models, step)
            except ZeroDivisionError as error:  # the loss by the tokens of all ranks
                raise TrainingError(
                    f"step {step}: the validation has no loss, because all labels of its data are "
                    "ignored (-100) on every rank. Correct the data that validator.dataloader "
                    "names, or raise validator.steps."
                ) from error

    def _run(self, call: _Call, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        assert self.step is not None
        model, inputs, extra = call
        loss, _ = self.step(model, inputs, labels, **extra)
        return loss, {}


def checked_validator(
    validator: BaseValidator,
    make_step: MakeStep | None,
    *,
    within: Within,
    schedule: ValidationSchedule | None = None,
) -> BaseValidator:
    """Let torchtitan's own validator run a captured graph, and check its data.

    A validator of another class is returned unchanged, because what it calls is unknown, and the
    log says so. The arguments are those of `CheckedValidator`.
    """
    if type(validator) is Validator:
        return CheckedValidator(validator, make_step, within, schedule)
    if make_step:
        logger.warning(
            f"The validator is a {type(validator).__name__} and not torchtitan's Validator: it "
            "validates with the model itself, without a captured graph"
        )
    return validator


class _NotEmpty:
    """The config of a data loader that must have a batch for this rank."""

    def __init__(self, config: BaseDataLoader.Config) -> None:
        self._config = config

    def build(self, **arguments: Any) -> Iterator[Any]:
        loader = self._config.build(**arguments)
        keep_generators_from(loader)
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise TrainingError(
                f"the validation data have less than one batch for data-parallel rank "
                f"{arguments['dp_rank']} of {arguments['dp_world_size']} "
                f"({arguments['local_batch_size']} rows of {arguments['seq_len']} tokens). Give "
                "validator.dataloader more text, or set validator.steps, which reads it again and "
                "again."
            )


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
