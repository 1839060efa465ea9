"""Pipelines of graphs on real ranks, beside eager ones and beside the model on one stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.pipeline_cases import MICROBATCHES, PIPELINES

SCHEDULES = Job(4, "pipeline_cases:schedules:")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [train(params["name"])] if "name" in params else [SCHEDULES]


def train(name: str) -> Job:
    case = PIPELINES[name]
    one_stage = Job(case.ranks // case.degree, f"pipeline_cases:one_stage:{name}")
    after = (one_stage,) if case.beside_one_stage else ()
    return Job(case.ranks, f"pipeline_cases:train:{name}", after)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_losses_and_gradients_are_those_of_one_stage(launches: Launches, schedule: str) -> None:
    """Bit by bit, with stages of other lengths and weights that are sharded unevenly."""
    results = [rank[schedule] for rank in launches(SCHEDULES)]
    assert [result["differing"] for result in results] == [[]] * 4
    assert [result["losses"] for result in results if result["is_last"]] == [MICROBATCHES] * 2


@pytest.mark.parametrize("name", PIPELINES)
def test_the_trainer_is_bitwise_equal_to_eager_stages(launches: Launches, name: str) -> None:
    """Three steps; the ranks of a pipeline have all parameters between them, each once."""
    case, ranks = PIPELINES[name], launches(train(name))
    assert [rank["differing"] for rank in ranks] == [[]] * case.ranks
    assert all(rank["gradients"] == rank["parameters"] for rank in ranks)
    assert sum(rank["is_last"] for rank in ranks) == case.ranks // case.degree
    for rank in ranks:
        assert all((loss > 0) is rank["is_last"] for loss in rank["losses"])
    of_stage = case.ranks // case.degree
    names = [name for rank in ranks[::of_stage] for name in rank["parameters"]]
    assert len(names) == len(set(names)) > 10


@pytest.mark.parametrize("name", [n for n, case in PIPELINES.items() if case.beside_one_stage])
def test_the_trainer_is_bitwise_equal_to_one_stage(launches: Launches, name: str) -> None:
    """The same seed gives the same model, and the same microbatches the same gradients."""
    assert [rank["beside_one_stage"] for rank in launches(train(name))] == [[]] * 4
