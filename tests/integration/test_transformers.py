"""Models of transformers on real ranks: numbers, the library's own, and what is exported."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.transformers_cases import TOLERANCE

ON_TWO = ("gpt_neox", "mixtral", "mamba")
RUNS = [
    *(pytest.param(2, f"{family},fsdp2", id=family) for family in ON_TWO),
    pytest.param(4, "qwen2,hsdp2x2", id="qwen2-hsdp"),
    pytest.param(4, "gpt2,ddp4", id="gpt2-ddp", marks=pytest.mark.quick),
]
every_run = pytest.mark.parametrize(("ranks", "name"), RUNS)


def job(ranks: int, name: str) -> Job:
    return Job(ranks, f"transformers_cases:train:{name}")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [job(params["ranks"], params["name"])]


@every_run
def test_three_steps_are_bitwise_equal_to_eager(launches: Launches, ranks: int, name: str) -> None:
    for rank in launches(job(ranks, name)):
        assert rank["differing"] == []
        assert rank["gradients"] == rank["parameters"] > 20
        assert sum(rank["issued"].values()) > 0


@every_run
def test_numbers_are_those_of_the_unsharded_library(
    launches: Launches, ranks: int, name: str
) -> None:
    """From the weights of the folder, on the global batch, positions starting anew."""
    for rank in launches(job(ranks, name)):
        assert rank["losses"][0] == pytest.approx(rank["library_loss"], rel=TOLERANCE)
        for parameter, error in rank["errors"].items():
            assert error <= TOLERANCE, parameter


@every_run
def test_from_pretrained_reads_the_export(launches: Launches, ranks: int, name: str) -> None:
    for rank in launches(job(ranks, name)):
        exported = rank["exported"]
        assert exported["class"].lower().startswith(name.partition(",")[0].replace("_", ""))
        assert exported["missing"] == exported["differ"] == [] and exported["names"]
        assert exported["form"] == [], "not the names of the hub"
