"""How long a model trains on so many tokens, and what that costs."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

from graph_trainer.errors import ConfigError

_DAY = 24 * 3600
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """A training run from its first step to its last."""

    tokens: int
    steps: int
    """Rounded up."""
    days: float
    gpu_hours: float
    days_range: tuple[float, float] | None
    """In which the days are expected; None without a range of throughput."""
    cost: float | None
    """In the currency of the price; None without one."""
    cost_range: tuple[float, float] | None

    def __str__(self) -> str:
        """Return one line."""
        text = f"{self.tokens:,} tokens: {self.steps:,} steps, {significant(self.days)} days"
        if self.days_range:
            text += f" ({significant(self.days_range[0])} to {significant(self.days_range[1])})"
        text += f", {self.gpu_hours:,.0f} GPU-hours"
        if self.cost is not None:
            text += f", which cost {self.cost:,.0f}"
            if self.cost_range:
                text += " ({:,.0f} to {:,.0f})".format(*self.cost_range)
        return text


def significant(number: float) -> str:
    """Format a number with three digits, or as many as stand before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def training_cost(
    tokens: int,
    price: float | None,
    *,
    world_size: int,
    tokens_per_second_per_gpu: float,
    tokens_per_second_per_gpu_range: tuple[float, float] | None,
    step_seconds: float,
) -> TrainingCost:
    """Return what a run of so many tokens takes, without validation, checkpoints and failures.

    Args:
        price: of a GPU for an hour, in any currency.
    """
    per_second = tokens_per_second_per_gpu * world_size
    days = tokens / per_second / _DAY
    days_range = None
    if tokens_per_second_per_gpu_range is not None:
        slow, fast = tokens_per_second_per_gpu_range
        days_range = (
            days * tokens_per_second_per_gpu / fast,
            days * tokens_per_second_per_gpu / slow,
        )
    hours = days * 24 * world_size
    cost = cost_range = None
    if price is not None:
        cost = price * hours
        if days_range is not None:
            cost_range = (cost * days_range[0] / days, cost * days_range[1] / days)
    return TrainingCost(
        tokens=tokens,
        steps=-(-tokens // max(1, round(per_second * step_seconds))),
        days=days,
        gpu_hours=hours,
        days_range=days_range,
        cost=cost,
        cost_range=cost_range,
    )


def token_count(text: str) -> int:
    """Read a number of tokens such as 100B or 1.5T: a type of argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.upper())
    number = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a number of tokens, such as 100B or 1.5T"
        )
    return number


def price(text: str) -> float:
    """Read the price of a GPU for an hour: a type of argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: write the price of a GPU-hour, such as 2.5")
    return value


def add_cost_flags(parser: argparse.ArgumentParser) -> None:
    """Add --tokens and --price."""
    parser.add_argument(
        "--tokens",
        type=token_count,
        metavar="N",
        help="tokens to train on, such as 100B: say how many steps, days and GPU-hours that takes",
    )
    parser.add_argument(
        "--price",
        type=price,
        metavar="P",
        help="of a GPU for an hour: with --tokens, what it costs",
    )


def check_cost_flags(flags: argparse.Namespace) -> None:
    """Refuse a price without tokens.

    Raises:
        ConfigError: there is one.
    """
    if flags.price is not None and flags.tokens is None:
        raise ConfigError("--price is of a GPU-hour: add --tokens, or leave it out")


def cost_of(
    flags: argparse.Namespace, world_size: int, figures: dict[str, Any]
) -> TrainingCost | None:
    """Return the cost of the run that flags ask for; None without --tokens.

    Args:
        figures: speed and step time of a plan's report.
    """
    if flags.tokens is None:
        return None
    return training_cost(
        flags.tokens,
        flags.price,
        world_size=world_size,
        tokens_per_second_per_gpu=figures["tokens_per_second_per_gpu"],
        tokens_per_second_per_gpu_range=figures.get("tokens_per_second_per_gpu_range"),
        step_seconds=figures["step_seconds"],
    )
