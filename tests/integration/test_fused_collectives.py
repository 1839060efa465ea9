"""Collectives over two axes of a mesh become one on real ranks, with the same bits.

On eight: a mesh of 4 x 2, and two slices of 2 x 2 side by side.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches

Results = list[dict[str, Any]]

MESHES = ["4x2", "2x2"]
CASES = [f"{order} first {mesh}" for order in ("inner", "outer") for mesh in MESHES]


FUSED = Job(8, "fused_collectives_cases:run:")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [FUSED]


@pytest.fixture
def ranks(launches: Launches) -> Results:
    return launches(FUSED)


@pytest.mark.parametrize("case", CASES)
def test_fused_gathers_give_the_bits_of_the_eager_model(ranks: Results, case: str) -> None:
    for results in ranks:
        found = results[case]
        assert found["chained"] == [4, 2, 4] and found["fused"] == [2, 1, 4]
        assert found["chained equals eager"] and found["fused equals eager"]


@pytest.mark.parametrize("case", CASES)
def test_a_second_graph_finds_the_groups_of_the_first(ranks: Results, case: str) -> None:
    assert all(results[case]["same groups again"] for results in ranks)


@pytest.mark.parametrize("case", CASES)
def test_fused_reductions_leave_every_rank_its_own_sums(ranks: Results, case: str) -> None:
    """On whole numbers, since the order of summation is another."""
    for results in ranks:
        assert results[case]["reduced at once"] == [4, 2, 2]
        assert results[case]["reduced at once equals eager"]


def test_training_agrees_on_groups_and_a_rank_alone_finds_them(ranks: Results) -> None:
    for rank, results in enumerate(ranks):
        assert results["training"]["equal"] == [True, True]
        captured = 2 if rank == 2 else 1
        assert results["training"]["counts"] == [[2, 1, 4]] * captured
