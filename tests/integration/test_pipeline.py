"""Pipelines of graphs on real ranks, beside eager ones and beside the model on one stage."""

from __future__ import annotations

from typing import Any

import pytest

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.planner.pipeline_plan import make_pipeline_plan
from graph_trainer.titan.config.load import load_config
from tests.integration.launches import Job, Launches
from tests.integration.matrix import COMMON, TOLERANCE, arguments
from tests.integration.pipeline_cases import MICROBATCHES, PIPELINES, REDUCED_ONCE, Pipeline
from tests.layers import with_few_layers

SCHEDULES = Job(4, "pipeline_cases:schedules:")
CHECKPOINTS = Job(4, "pipeline_cases:checkpoints:")
FAILS = {
    what: Job(4, f"pipeline_cases:one_rank_fails:{what}")
    for what in ("capture", "compile", "schedule")
}


def jobs(params: dict[str, Any]) -> list[Job]:
    if "name" in params:
        return [train(params["name"])]
    return [FAILS[params["what"]]] if "what" in params else [SCHEDULES, CHECKPOINTS]


def train(name: str) -> Job:
    if name == "reduced_once":
        return CHECKPOINTS
    case = PIPELINES[name]
    one_stage = Job(case.ranks // case.degree, f"pipeline_cases:one_stage:{name}")
    after = (one_stage,) if case.beside_one_stage else ()
    return Job(case.ranks, f"pipeline_cases:train:{name}", after)


IN_ORDER = ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]


@pytest.mark.parametrize("schedule", [*IN_ORDER, "DualPipeV", "file"])
def test_losses_and_gradients_are_those_of_one_stage(launches: Launches, schedule: str) -> None:
    """Bit by bit, with stages of other lengths and weights that are sharded unevenly."""
    results = [rank[schedule] for rank in launches(SCHEDULES)]
    assert [result["differing"] for result in results] == [[]] * 4
    assert [result["losses"] for result in results if result["is_last"]] == [MICROBATCHES] * 2


def names(comparison: str) -> list[str]:
    return [name for name, case in PIPELINES.items() if getattr(case, comparison)]


@pytest.mark.parametrize("name", names("beside_eager"))
def test_the_trainer_is_bitwise_equal_to_eager_stages(launches: Launches, name: str) -> None:
    assert [rank["differing"] for rank in launches(train(name))] == [[]] * PIPELINES[name].ranks


@pytest.mark.parametrize("name", names("beside_one_stage"))
def test_the_trainer_is_equal_to_one_stage(launches: Launches, name: str) -> None:
    """The same seed gives the same model, and the same microbatches the same gradients: the same
    bits where they are reduced in every microbatch."""
    found = [rank["beside_one_stage"] for rank in launches(train(name))]
    assert found == [[]] * PIPELINES[name].ranks


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_have_all_parameters_between_them(launches: Launches, name: str) -> None:
    case, ranks = PIPELINES[name], launches(train(name))
    of_stage = case.ranks // case.degree
    assert all(rank["gradients"] == rank["parameters"] for rank in ranks)
    last = 0 if "ZBV" in case.flags["parallelism.pipeline_parallel_schedule"] else case.degree - 1
    assert [rank["is_last"] for rank in ranks[::of_stage]] == [
        i == last for i in range(case.degree)
    ]
    for rank in ranks:
        assert all((loss > 0) is rank["is_last"] for loss in rank["losses"])
    found = [name for rank in ranks[::of_stage] for name in rank["parameters"]]
    assert len(found) == len(set(found)) > 10


@pytest.mark.parametrize("name", ["reduced_once", "pp2_cp2_interleaved"])
def test_a_plan_predicts_the_peak_that_training_does(launches: Launches, name: str) -> None:
    """Of each stage, with its microbatches in flight and the sums of their gradients."""
    case = Pipeline(4, REDUCED_ONCE) if name == "reduced_once" else PIPELINES[name]
    config = load_config(arguments(COMMON | case.flags), world_size=case.ranks)
    with_few_layers(config)
    plan = make_pipeline_plan(config, case.ranks, load_hardware("cpu"))
    for rank, trained in enumerate(launches(train(name))[:: case.ranks // case.degree]):
        planned = [
            [stage.peak_bytes, lifetimes(stage.simulation.joint).peak_bytes]
            for stage in plan.stages_of(rank)
        ]
        assert planned == trained["predicted"]


def test_checkpoints_go_on_with_other_stages(launches: Launches) -> None:
    """On no pipeline, and on twice as many stages; the weights for Hugging Face are the same."""
    for rank in launches(CHECKPOINTS):
        tolerance = TOLERANCE["float32"]
        assert rank["fsdp4"] == pytest.approx(rank["losses"], rel=tolerance)
        assert rank["pp4"] == pytest.approx(rank["losses"], rel=tolerance)
        of_pipeline, of_fsdp = rank["exported"]
        assert of_pipeline == of_fsdp and len(of_pipeline) == 2 * 9 + 3
        assert rank["error"] < 1e-4


def test_what_is_kept_is_gathered_and_reduced_once_a_step(launches: Launches) -> None:
    """GPipe keeps parameters ("never"), and ZBVZeroBubble too, but is bitwise, where each gradient
    is reduced by itself. 1F1B gathers in forward and in backward of all microbatches ("always")."""
    for rank in launches(SCHEDULES):
        once, kept, freed = rank["GPipe"], rank["ZBVZeroBubble"], rank["1F1B"]
        assert 0 < once["reductions"] == once["gathers"] <= once["parameters"]
        assert 0 < kept["gathers"] <= kept["parameters"]
        assert kept["reductions"] == MICROBATCHES * kept["parameters"]
        assert freed["reductions"] == MICROBATCHES * freed["parameters"]
        assert freed["gathers"] >= 2 * MICROBATCHES
        assert freed["gathers"] % (2 * MICROBATCHES) == 0


def test_a_rank_draws_stage_by_stage_and_microbatch_by_microbatch(launches: Launches) -> None:
    assert [rank["dropout"] for rank in launches(SCHEDULES)] == [[]] * 4


@pytest.mark.parametrize("what", FAILS)
def test_a_stage_that_fails_on_one_rank_is_an_error_on_all(launches: Launches, what: str) -> None:
    errors = launches(FAILS[what])
    if what == "schedule":
        assert len(errors) == 4 and all("different schedules" in error for error in errors)
        return
    assert len(errors) == 4 and all("not on this rank" in error for error in errors)
    assert all("rank 3 could not" in error for error in errors[:3])


def test_compiled_stages_train_alike(launches: Launches) -> None:
    """Fused kernels round once where eager rounds at every operator."""
    for rank in launches(SCHEDULES):
        assert rank["compiled"]["error"] < TOLERANCE["float32"]


@pytest.mark.parametrize("schedule", ["GPipe", "LoopedBFS"])
def test_another_order_adds_up_to_the_same(launches: Launches, schedule: str) -> None:
    """Of ranks and microbatches, where gradients are reduced once. LoopedBFS also runs the backward
    of the last microbatch first."""
    for rank in launches(SCHEDULES):
        result = rank[schedule]
        assert "loss" not in result["differing"]
        assert result["error"] < TOLERANCE["float32"]
