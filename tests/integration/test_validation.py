"""Validation through a captured graph of forward and loss, on two gloo ranks, against eager."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.validation_cases import SIZES

VALIDATED = Job(2, "validation_cases:run:")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [VALIDATED]


@pytest.fixture
def ranks(launches: Launches) -> list[dict[str, Any]]:
    return launches(VALIDATED)


def test_losses_are_those_of_eager_validation(ranks: list[dict[str, Any]]) -> None:
    """After both steps, and with batches of another size than the first ones or training's."""
    for rank in ranks:
        found, expected = rank["aot_fx_trace"], rank["eager"]
        assert found["validated"] == expected["validated"]
        assert len(set(expected["validated"])) == len(expected["validated"]) == 3


def test_nothing_else_is_touched(ranks: list[dict[str, Any]]) -> None:
    """Gradients stay, the model trains on, random numbers are where eager leaves them."""
    for rank in ranks:
        found, expected = rank["aot_fx_trace"], rank["eager"]
        assert found["left"] == expected["left"] == [[True, True]] * 3
        assert found["random"] == expected["random"]


def test_one_graph_without_backward_serves_all_validations_of_a_shape(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        found = rank["aot_fx_trace"]
        assert found["lost"].startswith("step 2: the gather failed: Connection closed by peer. ")
        assert found["outputs"] == [["loss"]] * len(set(SIZES))
        assert len(found["graphs"]) == len(set(SIZES))
        assert not found["in_training"]
        for passes in found["graphs"]:
            assert "deduplicate_unshards" in passes and "overlap_fsdp" in passes
        # buckets: the embedding, the layer, the final norm with the head
        assert found["issued"] == found["expected"] == {"ordered_gloo:all_gather": 3}
        assert found["roles"] == ["unshard"]


def test_data_without_a_batch_or_a_label_are_the_reason_in_the_error(
    ranks: list[dict[str, Any]],
) -> None:
    for number, rank in enumerate(ranks):
        ignored, empty = rank["eager"]["refused"]
        assert "step 2: " in ignored and "ignored (-100) on every rank" in ignored
        assert f"less than one batch for data-parallel rank {number} of 2" in empty
