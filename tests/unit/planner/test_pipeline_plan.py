"""The plan of a pipeline: its stages, the memory of its ranks, its schedule and its reports."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections import Counter
from functools import cache

import pytest

from graph_trainer.cli import plan_pipeline
from graph_trainer.cli.plan_command import main
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.ordering.sequences import issued_by
from graph_trainer.core.pipeline.schedule import SCHEDULES
from graph_trainer.core.pipeline.simulate_schedule import ScheduleTimeline, StageSeconds
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.simulate import Need, predicted_memory
from graph_trainer.core.torch_private_pipelining import ActionKind
from graph_trainer.errors import ConfigError, VerificationError
from graph_trainer.planner import pipeline_advice
from graph_trainer.planner import verify_pipeline_order as verify_pipeline_order_module
from graph_trainer.planner.changes import flags_of
from graph_trainer.planner.fake_stages import automatic_split
from graph_trainer.planner.html.schedule_page import boxes, write_schedule_page
from graph_trainer.planner.pipeline_advice import advise_pipeline, balanced, rescheduled
from graph_trainer.planner.pipeline_plan import (
    PipelinePlan,
    make_pipeline_plan,
    moments,
    timeline_of,
)
from graph_trainer.planner.pipeline_report import modules_text
from graph_trainer.planner.schedule_trace import write_schedule_trace
from graph_trainer.planner.verify_pipeline_order import verify_pipeline_order
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from tests.unit.planner.conftest import BFLOAT16

KEY = "--parallelism.pipeline_parallel"
TWICE = ("--training.global_batch_size", "16")
"""The schedule runs twice in a step."""
SMALL = ("--training.seq_len", "32", "--training.local_batch_size", "4", *BFLOAT16)


@cache
def planned(schedule: str = "1F1B") -> PipelinePlan:
    """The debug model with two layers on two ranks of a pipeline."""
    return make_pipeline_plan(configured(schedule), 4, load_hardware("h100-sxm"))


def configured(schedule: str, *more: str) -> GraphTrainerConfig:
    words = [*SMALL, f"{KEY}_degree", "2", f"{KEY}_schedule", schedule, *more]
    config = load_config(["--config", "debugmodel", *words], world_size=4)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    return config


def test_stages_are_those_of_torchtitans_split():
    plan = planned("Interleaved1F1B")
    assert [modules_text(stage.modules) for stage in plan.stages] == [
        *("tok_embeddings", "layers.0", "layers.1", "norm, lm_head")
    ]
    assert [stage.rank for stage in plan.stages] == [0, 1, 0, 1]
    assert [stage.sent_bytes > 0 for stage in plan.stages] == [True, True, True, False]


def test_stages_with_the_same_layers_differ_in_what_is_in_flight_alone():
    _, one, other, _ = planned("Interleaved1F1B").stages
    assert one.seconds == other.seconds
    more = (one.in_flight - other.in_flight) * one.microbatch_bytes
    assert one.peak_bytes - other.peak_bytes == more > 0
    # on a GPU the allocator takes them too, in pages
    simulation = one.simulation
    many = simulation.other._replace(earlier_microbatches=1000)
    memory = predicted_memory(simulation.joint, simulation.hardware, many)
    need = dataclasses.replace(simulation, memory=memory).need()
    assert need.allocated > need.alive > 1000 * one.microbatch_bytes


def test_a_rank_needs_what_its_stage_does_and_of_several_at_most_their_sum():
    for stage in planned().stages:
        # backward of the third microbatch: four outputs have been sent and its gradient received,
        # or two gradients have been sent and the fourth output received ahead
        tensors = (5 if stage.rank == 0 else 3) * planned().stages[0].sent_bytes
        assert planned().need_of(stage.rank) == tuple(num + tensors for num in stage.need)
    plan = planned("Interleaved1F1B")
    for rank in (0, 1):
        stages = plan.stages_of(rank)
        need = plan.need_of(rank)
        reserved = plan.hardware.reserved_bytes
        sent = plan.stages[0].sent_bytes * 4 * 3  # of inner stages, both ways
        assert need.total <= sum(s.need.total - reserved for s in stages) + reserved + sent
        for stage, other in itertools.permutations(stages):
            assert need.total >= stage.need.total + other.always_bytes
            at_peak = stage.simulation.memory.peak_by_category()
            state = at_peak[Category.PARAMETERS] + at_peak[Category.OPTIMIZER_STATE]
            assert stage.always_bytes >= state > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_received_is_read_and_what_is_sent_stays(schedule):
    """Also what a rank passes to a stage of its own: of each tensor that is sent or received, only
    those that were sent are there in the end, and never fewer than none."""
    plan = planned(schedule)
    for rank in plan.actions:
        stages = {
            stage.index: dataclasses.replace(
                stage, always_bytes=0, microbatch_bytes=0, split_bytes=0, unsharded_bytes=0
            )
            for stage in plan.stages_of(rank)
        }
        tensors = [num for _, num in moments(plan.actions[rank], stages, len(plan.stages), 1)]
        kinds = [action.computation_type for action in plan.actions[rank]]
        sent = kinds.count(ActionKind.SEND_F) + kinds.count(ActionKind.SEND_B)
        # the last program reads one more, unless it is the second part of a backward
        assert min(tensors) >= 0 and sent - 1 <= tensors[-1] <= sent + 1


def test_what_lives_between_two_parts_of_a_backward_counts():
    plan = planned("ZBVZeroBubble")
    assert plan.splits_backward and [stage.rank for stage in plan.stages] == [0, 1, 1, 0]
    nothing = [dataclasses.replace(stage, split_bytes=0) for stage in plan.stages]
    assert dataclasses.replace(plan, stages=tuple(nothing)).need.total < plan.need.total
    for stage in plan.stages:
        seconds = stage.seconds
        assert seconds.backward_weight > 0 and (seconds.backward_input > 0) is (stage.index > 0)
        # with a kernel more where a value is computed in the one part and read in the other
        parts = seconds.backward_input + seconds.backward_weight
        assert parts == pytest.approx(seconds.backward, rel=0.3)


def test_schedules_differ_in_bubble_and_microbatches_in_flight():
    plans = {name: planned(name) for name in ("1F1B", "GPipe", "Interleaved1F1B")}
    assert [stage.in_flight for stage in plans["1F1B"].stages] == [2, 1]
    assert [stage.in_flight for stage in plans["GPipe"].stages] == [4, 4]
    assert plans["Interleaved1F1B"].timeline.bubble < plans["1F1B"].timeline.bubble
    for plan in plans.values():
        busiest = max(plan.timeline.busy_seconds(rank) for rank in plan.actions)
        assert plan.step_seconds > plan.timeline.seconds >= busiest
        tokens = plan.tokens_per_second_per_gpu * plan.step_seconds * plan.world_size
        assert tokens == pytest.approx(4 * 32 * 2)


def test_accumulated_steps_run_the_schedule_again():
    assert planned().repeats == 1
    more = dataclasses.replace(planned(), repeats=2)
    schedules = (more.step_seconds - planned().step_seconds) / more.slowest_device
    assert schedules == pytest.approx(more.timeline.seconds)


def test_the_command_writes_what_it_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan_pipeline, "make_pipeline_plan", lambda *_, **__: planned("GPipe"))
    monkeypatch.setattr(pipeline_advice, "make_pipeline_plan", lambda *_, **__: planned("GPipe"))
    file = tmp_path / "plan.json"
    words = [f"{KEY}_degree", "2", "--json", str(file)]
    assert main(["--config", "debugmodel", "--world-size", "4", *SMALL, *words]) == 0
    report, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert report["schema"] == "graph_trainer.pipeline_plan/1"
    assert [stage["in_flight"] for stage in report["stages"]] == [4, 4]
    assert report["needed_bytes"] == max(rank["needed_bytes"] for rank in report["ranks"])
    assert f"{report['bubble']:.1%}" in shown and "layers.1, norm, lm_head" in shown
    assert len(report["spans"]) == 2 * (4 + 4 + 2)  # and a gather and a reduction
    assert [row["fits"] for row in report["advice"]] == [True] * len(report["advice"])
    assert max(map(len, shown.splitlines())) <= 100


def test_the_trace_has_every_program_and_send():
    file = io.StringIO()
    write_schedule_trace(planned("Interleaved1F1B"), file)
    events = [e for e in json.loads(file.getvalue())["traceEvents"] if e["ph"] == "X"]
    programs = Counter((e["pid"], e["cat"]) for e in events)
    assert programs[0, "forward"] == programs[1, "backward"] == 2 * 4
    assert programs[0, "send"] + programs[1, "send"] == 3 * 2 * 4
    timeline = planned("Interleaved1F1B").timeline
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(timeline.seconds * 1e6, abs=1)


def test_the_page_draws_a_row_a_rank_and_runs_no_script():
    plan, file = planned("Interleaved1F1B"), io.StringIO()
    write_schedule_page(plan, file)
    page = file.getvalue()
    drawn = boxes(plan)
    assert page.count("<title>") == 1 + len(drawn) == 1 + 4 * (4 + 4) + 3 + 4  # gathers, reductions
    assert "script-src &#39;none&#39;" in page and "<script>" not in page
    for one, other in itertools.pairwise(drawn):
        assert one.y != other.y or one.x + one.width <= other.x + 0.02


@pytest.mark.parametrize("flag", ["--memory-curve", "--like torchtitan"])
def test_what_is_of_one_stage_is_refused(flag):
    words = ["--config", "debugmodel", "--world-size", "4", *SMALL, f"{KEY}_degree", "2"]
    with pytest.raises(ConfigError, match="pipeline_parallel_degree = 2") as raised:
        main([*words, *flag.split()])
    assert flag.split()[0] in str(raised.value)


def test_a_plan_fits_where_its_worst_rank_does():
    plan = planned()
    worst = max(plan.need_of(rank).total for rank in plan.actions)
    assert plan.fits and plan.need.total == worst
    assert dataclasses.replace(plan, limit_bytes=worst).fits
    assert not dataclasses.replace(plan, limit_bytes=worst - 1).fits


def test_the_same_stages_by_another_schedule_are_not_captured_again():
    other = rescheduled(planned(), configured("GPipe"))
    plan = planned("GPipe")
    assert other.timeline.seconds == plan.timeline.seconds
    assert [other.need_of(rank) for rank in (0, 1)] == [plan.need_of(rank) for rank in (0, 1)]
    assert other.step_seconds == plan.step_seconds


def advised(plan: PipelinePlan, monkeypatch, changed: PipelinePlan | None = None):
    """The advice for a plan; what must be captured for it is `changed`."""
    monkeypatch.setattr(pipeline_advice, "make_pipeline_plan", lambda *_, **__: changed or plan)
    advice = advise_pipeline(
        plan, lambda more: configured("1F1B", *TWICE, *more), lambda line: None
    )
    return {flags: outcome for outcome in advice for flags in [flags_of(outcome.config)]}


def test_advice_is_what_is_faster_and_fits(monkeypatch):
    plan = dataclasses.replace(planned(), config=configured("1F1B", *TWICE), repeats=2)
    in_no_time = dataclasses.replace(plan, timeline=ScheduleTimeline({}, []))
    advice = advised(plan, monkeypatch, in_no_time)
    assert any("Interleaved1F1B" in flags for flags in advice)
    (batch,) = [outcome for flags, outcome in advice.items() if "local_batch_size" in flags[0]]
    assert batch.config["training.local_batch_size"] == "8"
    # another global batch is another run
    once = advised(planned(), monkeypatch, in_no_time)
    assert not any("local_batch_size" in flags[0] for flags in once)
    for outcome in advice.values():
        assert outcome.fits
        assert outcome.tokens_per_second_per_gpu > plan.tokens_per_second_per_gpu
    # with no room for the microbatches of GPipe, and slower plans elsewhere
    tight = dataclasses.replace(plan, limit_bytes=plan.need.total)
    assert not any("GPipe" in flags for flags in advised(tight, monkeypatch))


def test_advice_for_a_run_that_does_not_fit_needs_less(monkeypatch):
    plan = dataclasses.replace(planned("GPipe"), limit_bytes=1)
    less = [
        dataclasses.replace(stage, need=Need(*(num // 2 for num in stage.need)))
        for stage in plan.stages
    ]
    halved = dataclasses.replace(plan, stages=tuple(less))
    advice = advised(plan, monkeypatch, halved)
    assert any("always" in flags for flags in advice)
    assert all(outcome.needed_bytes < plan.need.total for outcome in advice.values())


def test_layers_move_away_from_a_slow_last_stage():
    stages, layers = planned("Interleaved1F1B").stages, 12
    uneven = []
    for stage, names in zip(stages, automatic_split(4, layers, 1, 1), strict=True):
        count = sum(name.startswith("layers.") for name in names)
        slow = 4 if stage.index == 3 else 0
        seconds = StageSeconds(0.01 * (count + slow), 0.02 * (count + slow))
        uneven.append(dataclasses.replace(stage, modules=tuple(names), seconds=seconds))
    plan = planned("Interleaved1F1B")
    timeline = timeline_of(uneven, plan.actions, plan.world_size, plan.hardware)
    plan = dataclasses.replace(plan, stages=tuple(uneven), timeline=timeline)
    (change,) = balanced(plan)
    assert int(change["parallelism.pipeline_parallel_last_stage_less_layers"]) > 1


def test_layers_in_a_row_are_one_name():
    names = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm"]
    assert modules_text(names) == "tok_embeddings, layers.0-2, norm"


def test_a_budget_counts_the_microbatches_in_flight():
    """The first stage has two in flight and the last one: the limit holds for both."""
    long = ("--training.seq_len", "8192")
    plans = {
        policy: make_pipeline_plan(
            configured("1F1B", *long, "--activation_checkpoint.type", policy, *more),
            *(4, load_hardware("h100-sxm")),
        )
        for policy, more in (("none", ()), ("full", ()))
    }
    most, least = (plans[policy].stages[0].need.total for policy in ("none", "full"))
    limit = (most + least) / 2 / 2**30
    budget = (
        "--activation_checkpoint.type",
        "budget",
        "--compile.memory_limit_gib",
        f"{limit:.4f}",
    )
    plan = make_pipeline_plan(configured("1F1B", *long, *budget), 4, load_hardware("h100-sxm"))
    first, last = plan.stages
    assert least < first.need.total <= limit * 2**30 + 1e6
    assert first.microbatch_bytes < plans["none"].stages[0].microbatch_bytes
    assert last.microbatch_bytes >= first.microbatch_bytes
    forward, backward = [plans[policy].stages[0].seconds.backward for policy in ("none", "full")]
    assert forward <= first.seconds.backward <= backward


def test_stages_with_several_a_rank_have_no_budget():
    budget = ("--activation_checkpoint.type", "budget", "--compile.memory_limit_gib", "4")
    with pytest.raises(ConfigError, match="several stages on a rank"):
        configured("Interleaved1F1B", *budget)


def test_gradients_are_reduced_once_where_parameters_are_kept():
    once = planned()
    in_each = make_pipeline_plan(
        configured("1F1B", "--parallelism.fsdp_reshard_after_forward", "always"),
        *(4, load_hardware("h100-sxm")),
    )
    for stage, other in zip(once.stages, in_each.stages, strict=True):
        assert stage.seconds.reduce_grad > 0 == other.seconds.reduce_grad
        # the sums are unsharded: twice the sharded gradients, in float32
        assert stage.always_bytes > other.always_bytes
    kinds = Counter(span.kind for span in once.timeline.spans[0])
    assert kinds[ActionKind.REDUCE_GRAD] == 1
    assert once.timeline.spans[0][-1].kind is ActionKind.REDUCE_GRAD


@pytest.mark.parametrize("all_ranks", [False, True])
def test_the_order_of_stages_and_schedule_is_proved(all_ranks):
    config = configured("Interleaved1F1B", "--parallelism.tensor_parallel_degree", "2")
    proof = list(verify_pipeline_order(config, 8, all_ranks=all_ranks, device="cpu"))
    schedule, *stages = proof
    assert "4 stages" in schedule and f"{3 * 2 * 4} sends" in schedule
    # two of four have the same layers
    assert [text.partition(":")[0] for text in stages] == ["Stage 0", "Stages 1, 2", "Stage 3"]
    assert all("4 ranks, " in text and " 0 collectives" not in text for text in stages)


def test_a_rank_of_a_stage_that_issues_less_is_no_proof(monkeypatch):
    calls = itertools.count(1)

    def issued(joint, world_size):
        sequence = issued_by(joint, world_size)
        return sequence[:-1] if next(calls) == 2 else sequence

    monkeypatch.setattr(verify_pipeline_order_module, "issued_by", issued)
    config = configured("1F1B")
    with pytest.raises(VerificationError, match="rank"):
        list(verify_pipeline_order(config, 4, all_ranks=True, device="cpu"))
