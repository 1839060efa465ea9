"""Merged and scheduled collectives on real ranks: every strategy, on every kind of mesh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration.communication import EIGHT, MESHES, TWO, VARIANTS
from tests.integration.launch import run_ranks

pytestmark = pytest.mark.timeout(900)

WORKER = Path(__file__).with_name("communication_worker.py")
GRADIENTS = 45


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What every rank found, by mesh."""
    found = {}
    for ranks, names in ((8, EIGHT), (2, TWO)):
        words = [str(tmp_path_factory.mktemp("communication")), *names]
        by_rank = run_ranks(WORKER, ranks, words, timeout=850)
        found.update({name: [rank[name] for rank in by_rank] for name in names})
    return found


def entries(launches: dict[str, list[dict[str, Any]]], mesh: str, variant: str) -> list[Any]:
    """What each rank found with each policy."""
    found = [rank[f"{policy} {variant}"] for rank in launches[mesh] for policy in MESHES[mesh][1]]
    assert found
    return found


MERGES = [name for name in VARIANTS if name != "none"]


@pytest.mark.parametrize("mesh", [*EIGHT, *TWO])
@pytest.mark.parametrize("variant", MERGES)
def test_it_trains_with_the_plain_graphs_loss_and_gradients(launches, mesh, variant):
    for entry in entries(launches, mesh, variant):
        ours, plain = entry["losses"]
        assert ours == plain, "what is gathered is the same bit by bit"
        assert entry["gradients"] == GRADIENTS
        assert entry["beyond"] == []
        assert entry["least_bound"] > 0
        assert math.isfinite(entry["trained"])


@pytest.mark.parametrize("mesh", TWO)
@pytest.mark.parametrize("variant", MERGES)
def test_on_two_ranks_gradients_are_the_same_bit_by_bit(launches, mesh, variant):
    for entry in entries(launches, mesh, variant):
        assert entry["unlike"] == []


@pytest.mark.parametrize("mesh", [*EIGHT, *TWO])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_process_groups_are_asked_for_what_the_graph_lists(launches, mesh, variant):
    for entry in entries(launches, mesh, variant):
        assert entry["issued"] == entry["expected"]
        merged, plain = sum(entry["merged"]), sum(entry["plain"])
        assert merged < plain if variant != "none" else merged == plain
