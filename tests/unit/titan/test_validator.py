"""Which validators get a captured graph; tests/integration/test_validation.py runs one."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from graph_trainer.core.training.step_cache import TrainStep
from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer
from graph_trainer.titan.validator import CheckedValidator, _NotEmpty, checked_validator

from torchtitan.components.validate import BaseValidator, Validator  # isort: skip
from torchtitan.tools.logging import logger  # isort: skip


class Mine(Validator):
    """A user's validator, which may call the model in any way."""


def made(kind: type[Validator]) -> Validator:
    """Make a validator with only the attributes that are read before the first validation."""
    validator = kind.__new__(kind)
    validator.config = kind.Config(freq=3)
    validator.loss_fn = lambda prediction, labels: (prediction, {})
    validator.dl_config = None
    return validator


def substituted(validator: BaseValidator) -> BaseValidator:
    return checked_validator(
        validator, lambda loss: TrainStep(loss, backward=False), within=contextlib.nullcontext
    )


def test_torchtitans_own_is_captured_and_keeps_its_schedule() -> None:
    found = substituted(made(Validator))
    assert isinstance(found, CheckedValidator)
    assert [step for step in range(1, 8) if found.should_validate(step)] == [1, 3, 6]


def test_the_loss_gets_positions_as_in_training() -> None:
    """A loss of several predictions needs them; torchtitan's validator gives it none."""
    validator, seen = made(Validator), []
    validator.loss_fn = lambda prediction, labels, **given: (seen.append(given), {})
    loss = checked_validator(validator, lambda loss: loss, within=contextlib.nullcontext).step
    loss(lambda inputs, **extra: inputs, 1, 2, positions=3, attention_masks=None)
    loss(lambda inputs, **extra: inputs, 1, 2)
    assert seen == [{"positions": 3}, {}]


def test_another_one_stays_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    mine = made(Mine)
    loss_fn = mine.loss_fn
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING):
            assert substituted(mine) is mine
    finally:
        logger.removeHandler(caplog.handler)
    assert mine.loss_fn is loss_fn
    assert "Mine and not torchtitan's Validator" in caplog.text


def test_a_text_without_a_batch_to_validate_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", str(tmp_path))
    (tmp_path / "lone.txt").write_text("word " * 1000)  # without a blank line, one document
    validator = made(Validator)
    text = {"dataset": "text", "dataset_path": str(tmp_path / "lone.txt")}
    validator.dl_config = TextDataLoader.Config(**text, split="validation")
    validator.tokenizer = ByteBPETokenizer.Config(**text, vocab_size=258).build()
    validator.dp_world_size, validator.dp_rank = 2, 0
    validator.seq_len, validator.local_batch_size = 8, 1
    with pytest.raises(ConfigError, match="validation split .* validator.dataloader.dataset_path"):
        substituted(validator)


def test_validation_draws_none_of_the_steps_random_numbers() -> None:
    """A run that goes on after a save has not validated as the run without a break has."""

    class Config:
        def build(self, **arguments: Any) -> Any:
            return StatefulDataLoader([1, 2])

    before = torch.get_rng_state()
    assert [*_NotEmpty(Config()).build()] == [1, 2]
    assert torch.equal(torch.get_rng_state(), before)
