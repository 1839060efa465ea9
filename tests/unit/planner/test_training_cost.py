"""Steps, days and cost of a training."""

from __future__ import annotations

import argparse
import math

import pytest

from graph_trainer.cli.plan_command import main
from graph_trainer.errors import ConfigError
from graph_trainer.planner.training_cost import token_count, training_cost


def test_days_hours_and_cost_follow_from_the_speed() -> None:
    cost = training_cost(
        *(10**9, 2.0),
        world_size=8,
        tokens_per_second_per_gpu=1000.0,
        tokens_per_second_per_gpu_range=(500.0, 1250.0),
        step_seconds=2.0,
    )
    assert cost.steps == 62_500  # of 16,000 tokens
    assert cost.days == pytest.approx(10**9 / 8000 / 86400)
    assert cost.days_range == pytest.approx((cost.days / 1.25, cost.days * 2))
    assert cost.gpu_hours == pytest.approx(cost.days * 24 * 8)
    assert cost.cost == pytest.approx(2 * cost.gpu_hours)
    assert cost.cost_range is not None and cost.cost is not None
    assert cost.cost_range == pytest.approx((cost.cost / 1.25, cost.cost * 2))
    assert f"{cost.steps:,} steps" in str(cost)


def test_without_range_and_price_there_is_none() -> None:
    cost = training_cost(
        *(1, None),
        world_size=1,
        tokens_per_second_per_gpu=10.0,
        tokens_per_second_per_gpu_range=None,
        step_seconds=1.0,
    )
    assert cost.steps == 1 and cost.days_range is cost.cost is cost.cost_range is None


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("2k", 2000), ("100B", 10**11), ("1.5T", 15 * 10**11)]
)
def test_token_count(text: str, number: int) -> None:
    assert token_count(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "1e9", "B", "1 B", str(math.nan), "0.1"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="100B"):
        token_count(text)


def test_a_plan_says_what_a_training_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "debugmodel", "--world-size", "2", "--tokens", "1B", "--price", "2"]
    assert main(words) == 0
    assert "1,000,000,000 tokens: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--tokens"):
        main(words[:-4] + ["--price", "2"])
