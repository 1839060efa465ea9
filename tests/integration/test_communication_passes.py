"""Merged and scheduled collectives on real ranks: every strategy, on every kind of mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.integration.communication_cases import RANKS, RUNS
from tests.integration.launches import Job, Launches
from tests.integration.matrix import GRADIENTS


def job(mesh: str) -> Job:
    return Job(RANKS[mesh], f"communication_cases:run:{mesh}")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [job(params["mesh"])]


def entries(launches: Launches, mesh: str, variant: str) -> list[Any]:
    """What each rank found."""
    return [rank[variant] for rank in launches(job(mesh))]


MERGES = [(mesh, name) for mesh, name in RUNS if name != "none"]


@pytest.mark.parametrize(("mesh", "variant"), MERGES)
def test_it_trains_with_the_plain_graphs_bits(launches, mesh, variant):
    """CPU ranks add in rank order: no sum depends on the bucket that it travels in."""
    for entry in entries(launches, mesh, variant):
        ours, plain = entry["losses"]
        assert ours == plain
        assert entry["gradients"] == GRADIENTS
        assert entry["unlike"] == []
        assert math.isfinite(entry["trained"])


@pytest.mark.parametrize(("mesh", "variant"), RUNS)
def test_the_process_groups_are_asked_for_what_the_graph_lists(launches, mesh, variant):
    for entry in entries(launches, mesh, variant):
        assert entry["issued"] == entry["expected"]
        *gathers, reductions = entry["merged"]
        *plain_gathers, plain_reductions = entry["plain"]
        assert (sum(gathers) < sum(plain_gathers)) is (variant != "none" and sum(gathers) > 0)
        assert (reductions < plain_reductions) is (variant not in ("none", "bitwise"))
