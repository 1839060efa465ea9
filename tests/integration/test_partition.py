"""The debug model, its step as one graph, as two, and as two compiled again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.matrix import BOTH, GRADIENTS

JOB = Job(2, "partition_cases:run:")
MIN_CUT = Job(4, f"partition_cases:min_cut:{','.join(BOTH)}")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [MIN_CUT if "reshard" in params else JOB]


def test_all_ways_to_run_the_step_give_the_eager_models_bits(launches: Launches) -> None:
    for result in launches(JOB):
        assert result["differing"] == {"joint": [], "partitioned": [], "compiled": []}
        assert set(result["gradients"].values()) == {GRADIENTS}


def test_the_second_compilation_gathers_and_saves_what_the_first_does(launches: Launches) -> None:
    for result in launches(JOB):
        (first,) = result["first"]
        assert result["again"] == [first]
        assert min(first) > 0


@pytest.mark.parametrize("reshard", BOTH)
def test_pytorchs_partitioner_keeps_eagers_bits_and_what_is_resharded(
    launches: Launches, reshard: str
) -> None:
    for rank in launches(MIN_CUT):
        result = rank[reshard]
        assert result["differing"] == []
        found = result["gathers"]
        assert found["min_cut"] == found["tags"] == found["first"]
