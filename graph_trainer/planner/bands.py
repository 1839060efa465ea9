"""How far published runs were from their plans, and the band that follows for another plan."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib import resources
from statistics import NormalDist
from typing import Any, NamedTuple

from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.simulation.hardware import Calibration, Hardware
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.routing import mixtures_of

CONFIDENCE = 0.9
"""The part of runs like the planned one whose throughput a band contains."""

_FEWEST = 3
"""The fewest runs of a kind from which a band is made; with fewer, runs of the kind of model, or
all runs, make it."""

FEWEST_SAMPLES = 10
"""The fewest measured ops and collectives from whose spread a band is made."""

NO_BAND = "no run on a CPU was published, and the profile has too few measured samples"
"""Why a plan has no band, for messages."""

_FILE = "published_errors.toml"


class Kind(NamedTuple):
    """What runs have in common whose errors are alike."""

    experts: bool
    compiled: bool

    def __str__(self) -> str:
        model = "experts" if self.experts else "dense"
        return f"{model} and {'compiled' if self.compiled else 'eager'}"


@dataclass(frozen=True, slots=True)
class PublishedError:
    """How far one published run was from its plan."""

    name: str
    kind: Kind
    ratio: float
    """Published by predicted throughput."""
    hardware: str
    date: date
    """Of the prediction."""


@dataclass(frozen=True, slots=True)
class Band:
    """The range in which the throughput of a run is expected, as factors of the predicted one."""

    low: float
    high: float
    source: str
    """What the band is made of, as "90% of published runs like this one, dense and eager"."""
    runs: int
    """The number of measured runs or steps that it is made of."""

    def of_rate(self, rate: float) -> tuple[float, float]:
        """Return the range of tokens per second or MFU that a plan predicts."""
        return rate * self.low, rate * self.high

    def of_time(self, seconds: float) -> tuple[float, float]:
        """Return the range of a predicted time of a step."""
        return seconds / self.high, seconds / self.low


def kind_of(config: GraphTrainerConfig) -> Kind:
    """Return the kind of a run, by which published errors are chosen."""
    spec = config.model_spec
    experts = spec is not None and bool(mixtures_of(spec.model))
    return Kind(experts, find_backend(config.compile.backend).fuses_ops)


def band_of(config: GraphTrainerConfig, hardware: Hardware) -> Band | None:
    """Return the band of a run's throughput: of a calibrated profile by the spread of its samples,
    of others by published runs. None on a CPU, on which no run was published.

    This is the one place that chooses what a band is made of.
    """
    if hardware.calibration is not None:
        return calibrated_band(hardware.calibration)
    if hardware.device == "cpu":
        return None
    return published_band(kind_of(config), published_errors())


def published_band(
    kind: Kind, errors: Iterable[PublishedError], without: Collection[str] = ()
) -> Band | None:
    """Make the band of a kind of run from the errors of published ones.

    Args:
        without: names of runs that are left out, such as the one to be judged.

    Returns:
        None where fewer than two runs are left.
    """
    errors = [error for error in errors if error.name not in without]
    model = "experts" if kind.experts else "dense"
    choices = (
        (f"published runs like this one, {kind}", [e for e in errors if e.kind == kind]),
        (
            f"published runs of its kind of model, {model}, as few are like this one, {kind}",
            [e for e in errors if e.kind.experts == kind.experts],
        ),
        (f"all published runs, as few are like this one, {kind}", errors),
    )
    source, alike = next((c for c in choices if len(c[1]) >= _FEWEST), choices[-1])
    return prediction_interval([e.ratio for e in alike], f"{CONFIDENCE:.0%} of {source}")


def calibrated_band(calibration: Calibration) -> Band | None:
    """Make the band of a run on a calibrated profile: errors of samples are taken as normal.

    What a step adds to its ops and collectives is in no sample, so the band is too narrow rather
    than too wide.

    Returns:
        None for fewer than `FEWEST_SAMPLES`, whose spread says little of others.
    """
    if calibration.samples < FEWEST_SAMPLES:
        return None
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * calibration.spread
    source = f"{CONFIDENCE:.0%} of the measured ops and collectives of {calibration.device_name}"
    return Band(math.exp(-half), math.exp(half), source, calibration.samples)


def prediction_interval(ratios: Sequence[float], source: str) -> Band | None:
    """Make the band in which the next ratio of measured by predicted throughput is expected.

    The logarithms of the ratios are taken as normally distributed with unknown mean and variance:
    the next one is within mean +- t s sqrt(1 + 1/n), with Student's t of n - 1 degrees of freedom
    (Hahn and Meeker, Statistical Intervals, 1991, section 4.7).

    Returns:
        None for fewer than two ratios, of which no spread is known.
    """
    if len(ratios) < 2:
        return None
    from scipy.special import stdtrit

    logs = [math.log(ratio) for ratio in ratios]
    number, mean = len(logs), math.fsum(logs) / len(logs)
    variance = math.fsum((log - mean) ** 2 for log in logs) / (number - 1)
    quantile = float(stdtrit(number - 1, (1 + CONFIDENCE) / 2))
    half = quantile * math.sqrt(variance * (1 + 1 / number))
    return Band(math.exp(mean - half), math.exp(mean + half), source, number)


@cache
def published_errors() -> tuple[PublishedError, ...]:
    """Read the errors of the published suite that come with the package."""
    text = (resources.files("graph_trainer.planner") / _FILE).read_text(encoding="utf-8")
    return tuple(map(_error_of, tomllib.loads(text)["runs"]))


def _error_of(entry: dict[str, Any]) -> PublishedError:
    kind = Kind(entry["experts"], entry["compiled"])
    return PublishedError(entry["name"], kind, entry["ratio"], entry["hardware"], entry["date"])
