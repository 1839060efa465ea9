"""torchtitan's loop around the captured step, on two gloo ranks: everything but the step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches

LOOP = Job(2, "loop_cases:run:")


def jobs(params: dict[str, Any]) -> list[Job]:
    return [LOOP]


@pytest.fixture
def ranks(launches: Launches) -> list[dict[str, Any]]:
    return launches(LOOP)


def test_the_loop_trains_the_same_captured_and_eagerly(ranks: list[dict[str, Any]]) -> None:
    """Gradient accumulation, clipping, optimizer and schedule work on the step's gradients."""
    for rank in ranks:
        assert rank["steps"] == [4, 4, 4]
        assert rank["eager_differs"] == []


def test_a_resumed_run_equals_an_uninterrupted_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["resumed_differs"] == []
        whole, resumed = rank["rates"]
        assert whole == resumed


def test_validation_runs_and_agrees(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        whole, eager, resumed = rank["validated"]
        # torchtitan validates at step 1 and then at every second one
        assert len(whole) == 3
        assert whole == eager
        assert resumed == whole[-len(resumed) :]
        assert resumed


def test_what_a_run_leaves_behind(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["tensorboard"] == 1
    # step 2 was moved away to be resumed from
    assert ranks[0]["checkpoints"] == ["step-4"]
    assert 'base = "llama3_debugmodel"' in ranks[0]["config"]
    assert "global_batch_size = 4" in ranks[0]["config"]
