"""The chunked cross-entropy on two gloo ranks that share the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.loss_cases import INPUTS, LABELS, VOCABULARIES

RANKS = 2
LOSS = Job(RANKS, "loss_cases:run:")
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-9}


def jobs(params: dict[str, Any]) -> list[Job]:
    return [LOSS]


@pytest.fixture
def ranks(launches: Launches) -> list[dict[str, Any]]:
    return launches(LOSS)


# Two ranks round each summand of the hidden states' gradient, and their sum, where one rank
# rounds once; the softmax's sum comes in another order. Everything else is the same arithmetic:
# two roundings more than the two of one rank, and sums of ten float32 terms.
TOLERANCE = {dtype: math.sqrt(4) * u + 10 * UNIT["fp32"] for dtype, u in UNIT.items()}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_split_vocabulary_gives_the_whole_ones_numbers(
    ranks: list[dict[str, Any]], vocabulary: int, dtype: str, given: str
) -> None:
    rows_of_rank = {8: (4, 4), 7: (4, 3), 1: (1, 0)}[vocabulary]
    for rank, rows in zip(ranks, rows_of_rank, strict=True):
        case = rank["split"][f"{vocabulary}-{dtype}-{given}"]
        for name in ("loss", "hidden", "weight"):
            assert case[name] < TOLERANCE[dtype], name
        assert case["same_loss"], "the ranks do not agree on the loss"
        assert case["validation_same"]
        assert case["weight_placements"] == "(Shard(dim=0),)"
        assert case["local_rows"] == rows


def test_the_gradient_of_hidden_states_has_their_placements(ranks: list[dict[str, Any]]) -> None:
    """What was split by sequence gets its part of the gradient; the sum is a reduce-scatter."""
    found = {g: ranks[0]["split"][f"7-fp32-{g}"]["hidden_placements"] for g in INPUTS}
    assert found == {
        "plain": "None",
        "replicated": "(Replicate(),)",
        "by_sequence": "(Shard(dim=1),)",
    }


def test_a_head_that_is_not_split_is_computed_whole(ranks: list[dict[str, Any]]) -> None:
    assert [rank["whole"] for rank in ranks] == [{"hidden": True, "weight": True}] * RANKS


def test_a_bad_label_raises_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for message in rank["bad_labels"]:
            assert "out of bounds" in message


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("axis", ["dp_shard", "cp"])
def test_the_losses_that_are_logged_are_those_of_the_tokens(
    ranks: list[dict[str, Any]], axis: str, labels: tuple[int, int]
) -> None:
    """The largest is that of a rank with labels, and of sequences that CP has split: of all."""
    for rank in ranks:
        case = rank["logged"][f"{axis}-{labels}"]
        assert case["found"] == pytest.approx(case["expected"], rel=2**-22)
