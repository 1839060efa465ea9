"""Checkpoints across meshes and programs: what one saved, another goes on from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.launches import Job, Launches
from tests.integration.matrix import TOLERANCE

PLAIN = "plain_torchtitan_worker.py"
SAVED = Job(4, "checkpoint_cases:saved:")
ONE_RANK = Job(1, "checkpoint_cases:resumed_on_one_rank:", after=(SAVED,), phase=2)
PLAIN_SAVES = Job(1, "save", phase=0, script=PLAIN)
FROM_PLAIN = Job(4, "checkpoint_cases:resumed_from_plain_torchtitan:", after=(PLAIN_SAVES,))
TIED = Job(4, "checkpoint_cases:tied_across_meshes:")
PLAIN_LOADS = Job(1, "load", after=(SAVED,), phase=2, script=PLAIN)


def jobs(params: dict[str, Any]) -> list[Job]:
    return [params["job"]]


def near(losses: list[float]) -> Any:
    """Another mesh sums in another order, and both go on from the same bits."""
    assert len(losses) == 2
    return pytest.approx(losses, rel=TOLERANCE["float32"])


@pytest.mark.quick
@pytest.mark.parametrize("job", [SAVED])
def test_a_resumed_run_equals_an_uninterrupted_one(launches: Launches, job: Job) -> None:
    for rank in launches(job):
        assert rank["resumed_at"] == 2
        assert rank["differing"] == []


@pytest.mark.quick
@pytest.mark.parametrize("job", [SAVED])
def test_saved_on_fsdp4_it_goes_on_on_fsdp2_tp2(launches: Launches, job: Job) -> None:
    for rank in launches(job):
        assert rank["fsdp2_tp2"] == near(rank["losses"][2:])


@pytest.mark.parametrize("job", [ONE_RANK])
def test_saved_on_fsdp4_it_goes_on_on_one_rank(launches: Launches, job: Job) -> None:
    assert launches(job)[0] == near(launches(SAVED)[0]["losses"][2:])


@pytest.mark.parametrize("job", [PLAIN_LOADS])
def test_plain_torchtitan_goes_on_from_our_checkpoint(launches: Launches, job: Job) -> None:
    """The second loss needs the optimizer's state and the schedule as well."""
    (plain,) = launches(job)
    assert plain["imported"] == []
    assert plain["step"] == 4
    assert plain["losses"] == near(launches(SAVED)[0]["losses"][2:])


@pytest.mark.parametrize("job", [FROM_PLAIN])
def test_we_go_on_from_plain_torchtitans_checkpoint(launches: Launches, job: Job) -> None:
    (plain,) = launches(PLAIN_SAVES)
    assert plain["imported"] == []
    for losses in launches(job):
        assert losses == near(plain["losses"][2:])


@pytest.mark.parametrize("job", [TIED])
def test_tied_weights_go_on_on_another_mesh(launches: Launches, job: Job) -> None:
    for rank in launches(job):
        assert rank["other"] == near(rank["after"])
        assert rank["after"][0] < rank["before"][0]
