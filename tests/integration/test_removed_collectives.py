"""Collectives that structure passes remove are not missed: real ranks, with and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.removed_collectives_cases import FOLDS, TRIPS

REMOVED = Job(4, "removed_collectives_cases:run:")

GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
# case: the gathers of each rank's step, forward's and backward's, and those that are left
GATHERS = {
    "rows": (2, 0),
    "columns": (2, 0),
    "rows, gathered value read": (2, 2),
    "twice": (4, 4),
    "two dimensions": (4, 0),
    "two dimensions, rows": (4, 0),
    "third layout": (3, 1),
    "other columns": (2, 2),
}
# case: the reductions of its two parameters, each read twice
REDUCTIONS_LEFT = {
    "fully_shard": {SCATTER: 2},
    "fully_shard, mixed": {SCATTER: 2},
    "replicate": {REDUCE: 2},
    "hybrid_shard": {SCATTER: 2, REDUCE: 2},
    "hybrid_shard, mixed": {SCATTER: 2, REDUCE: 2},
}


def jobs(params: dict[str, Any]) -> list[Job]:
    return [REMOVED]


@pytest.fixture
def ranks(launches: Launches) -> list[dict[str, Any]]:
    return launches(REMOVED)


@pytest.mark.parametrize("case", TRIPS)
def test_round_trips_are_not_missed_by_a_bit(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        result = rank["trips"][case]
        assert result["same_loss"] and result["differing"] == []
        assert result["issued"] == result["expected"]
        counts = result["before"].get(GATHER, 0), result["after"].get(GATHER, 0)
        assert counts == GATHERS[case]


@pytest.mark.parametrize("case", FOLDS)
def test_folded_reductions_differ_by_the_order_of_summation(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for rank in ranks:
        result = rank["folds"][case]
        left = REDUCTIONS_LEFT[case]
        reductions = {k: n for k, n in result["before"].items() if k != GATHER}
        assert reductions == {kind: 2 * number for kind, number in left.items()}
        assert {k: n for k, n in result["after"].items() if k != GATHER} == left
        assert result["issued"] == result["expected"]
        assert result["same_loss"] and result["beyond"] == []
