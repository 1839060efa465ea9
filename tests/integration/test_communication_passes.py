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
def test_it_trains_with_the_plain_graphs_loss_and_gradients(launches, mesh, variant):
    for entry in entries(launches, mesh, variant):
        ours, plain = entry["losses"]
        assert ours == plain, "what is gathered is the same bit by bit"
        assert entry["gradients"] == GRADIENTS
        assert entry["beyond"] == []
        assert entry["least_bound"] > 0
        assert math.isfinite(entry["trained"])


@pytest.mark.parametrize(("mesh", "variant"), [run for run in MERGES if RANKS[run[0]] == 2])
def test_on_two_ranks_gradients_are_the_same_bit_by_bit(launches, mesh, variant):
    for entry in entries(launches, mesh, variant):
        assert entry["unlike"] == []


@pytest.mark.parametrize(("mesh", "variant"), RUNS)
def test_the_process_groups_are_asked_for_what_the_graph_lists(launches, mesh, variant):
    for entry in entries(launches, mesh, variant):
        assert entry["issued"] == entry["expected"]
        merged, plain = sum(entry["merged"]), sum(entry["plain"])
        assert merged < plain if variant != "none" else merged == plain
