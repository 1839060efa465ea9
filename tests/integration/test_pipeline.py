"""Pipelines of graphs on real ranks, beside the whole model on one stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.pipeline_cases import MICROBATCHES

SCHEDULES = Job(4, "pipeline_cases:schedules:")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [SCHEDULES]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_losses_and_gradients_are_those_of_one_stage(launches: Launches, schedule: str) -> None:
    """Bit by bit, with stages of other lengths and weights that are sharded unevenly."""
    results = [rank[schedule] for rank in launches(SCHEDULES)]
    assert [result["differing"] for result in results] == [[]] * 4
    assert [result["losses"] for result in results if result["is_last"]] == [MICROBATCHES] * 2
