"""Validation through a captured graph of forward and loss, on two gloo ranks, against eager."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.validation_cases import CASES, SIZES

JOBS = {case: Job(2, f"validation_cases:run:{case}") for case in CASES}


def jobs(params: dict[str, Any]) -> list[Job]:
    return [JOBS[params["case"]]]


@pytest.fixture
def ranks(launches: Launches, case: str) -> list[dict[str, Any]]:
    return launches(JOBS[case])


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_eager_validation(ranks: list[dict[str, Any]], case: str) -> None:
    """After both steps, and with batches of another size than the first ones or training's."""
    for rank in ranks:
        found, expected = rank["aot_fx_trace"], rank["eager"]
        assert found["validated"] == expected["validated"]
        assert len(expected["validated"]) == 3
        # with tensor parallelism the last one repeats the one before: same weights, same batch
        assert len(set(expected["validated"])) == (2 if case == "tp2" else 3)


@pytest.mark.parametrize("case", CASES)
def test_nothing_else_is_touched(ranks: list[dict[str, Any]], case: str) -> None:
    """Gradients stay, the model trains on, random numbers are where eager leaves them."""
    for rank in ranks:
        found, expected = rank["aot_fx_trace"], rank["eager"]
        assert found["left"] == expected["left"] == [[True, True]] * 3
        assert found["random"] == expected["random"]


@pytest.mark.parametrize("case", CASES)
def test_one_graph_without_backward_serves_all_validations_of_a_shape(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for rank in ranks:
        found = rank["aot_fx_trace"]
        assert found["lost"].startswith("step 2: the gather failed: Connection closed by peer. ")
        shapes = len(set(SIZES[case]))
        assert found["outputs"] == [["loss"]] * shapes
        assert len(found["graphs"]) == shapes
        assert not found["in_training"]
        for passes in found["graphs"]:
            assert "deduplicate_unshards" in passes
            assert ("overlap_fsdp" in passes) == (case == "fsdp2_chunked_loss")
        assert found["issued"] == found["expected"]
        if case == "fsdp2_chunked_loss":
            # buckets: the embedding, the layer, the final norm with the head
            assert found["issued"] == {"gloo:all_gather": 3}
    roles = {"fsdp2_chunked_loss": ["unshard"], "tp2": ["None"]}
    assert ranks[0]["aot_fx_trace"]["roles"] == roles[case]
