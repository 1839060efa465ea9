"""Predicted peak memory against the allocator's, for whole training steps on real ranks.

The plan's own simulation is held to the bytes that torch's allocator had handed out at the peak
of a step: parameters, buffers, optimizer state, batch, gradients, everything the graph makes and
what gloo copies inside a collective. The requirement is 5% of the whole. What is asserted is
less: a handful of small tensors, because nothing else is left to be off by.
"""

from __future__ import annotations

import functools
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch import run_ranks
from tests.integration.predicted_memory_worker import LEFT_BYTES, POLICIES, cases

WORKER = Path(__file__).with_name("predicted_memory_worker.py")
RANKS = (1, 2, 4)

CASES = [
    (ranks, f"{name} {policy}")
    for ranks in RANKS
    for name, (_, _, policies) in cases(ranks).items()
    for policy in policies
]
COMPARED = [(ranks, name) for ranks in RANKS for name in ("debug", "wide")]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """What every rank reported, by case; each number of ranks is launched once."""

    @functools.cache
    def results(ranks: int) -> list[dict[str, Any]]:
        return run_ranks(WORKER, ranks, [str(tmp_path_factory.mktemp("memory"))], timeout=280)

    return results


def table(reported: list[dict[str, Any]]) -> str:
    """All that a launch measured, for a person."""
    lines = [f"{'rank':>4} {'case':<24}{'measured':>14}{'predicted':>14}{'off by':>12}  peak at"]
    for rank, found in enumerate(reported):
        for name, case in found.items():
            if "error" in case:
                lines.append(f"{rank:>4} {name}: {case['error']}")
                continue
            off = case["predicted"] - case["measured"]
            lines.append(
                f"{rank:>4} {name:<24}{case['measured']:>14,}{case['predicted']:>14,}{off:>+12,}"
                f"  {case['at']}"
            )
    return "\n".join(lines)


def small_tensors(case: dict[str, Any]) -> int:
    """What a prediction may be off by: the batch, whose tensors share storages as it suits the
    loader, and scalars of the training loop."""
    return case["batch"] + LEFT_BYTES


@pytest.mark.parametrize(("ranks", "name"), CASES, ids=lambda value: str(value).replace(" ", "_"))
def test_the_predicted_peak_is_the_allocators(launch, ranks, name):
    reported = launch(ranks)
    for found in reported:
        assert name in found, table(reported)
        case = found[name]
        off = abs(case["predicted"] - case["measured"])
        assert off <= small_tensors(case), table(reported)
        assert off <= 0.05 * case["measured"], table(reported)


@pytest.mark.parametrize(("ranks", "name"), COMPARED)
def test_policies_are_ordered_as_measured(launch, ranks, name):
    for found in launch(ranks):
        for one, two in combinations(POLICIES, 2):
            a, b = found[f"{name} {one}"], found[f"{name} {two}"]
            measured, predicted = (b[k] - a[k] for k in ("measured", "predicted"))
            # two that differ by less than a batch are the same
            same = abs(predicted) <= small_tensors(a)
            assert same == (abs(measured) <= small_tensors(a)), table(launch(ranks))
            assert same or (measured > 0) == (predicted > 0), table(launch(ranks))


def test_the_policies_matter_where_they_are_compared(launch):
    """Or the order of policies above would be that of equal numbers."""
    for ranks, name in COMPARED:
        if (ranks, name) != (1, "wide"):
            always, never = (launch(ranks)[0][f"{name} {p}"] for p in ("always", "never"))
            assert never["measured"] > always["measured"] + 10 * small_tensors(always)
