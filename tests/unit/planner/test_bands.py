"""The band of a plan: made of the errors of published runs, and beside every time and speed."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import asdict, replace
from datetime import date

import pytest
from scipy import stats

from benchmarks.published.runs import RUNS
from benchmarks.published.tables import judged
from graph_trainer.core.simulation.hardware import Calibration, load_hardware
from graph_trainer.planner.bands import (
    Band,
    Kind,
    PublishedError,
    band_of,
    kind_of,
    prediction_interval,
    published_band,
    published_errors,
)
from graph_trainer.planner.changes import outcome_of
from graph_trainer.planner.html.page import write_comparison, write_page
from graph_trainer.planner.plan_report import plan_report
from graph_trainer.planner.plan_tables import comparison_table
from graph_trainer.titan.config.load import load_config
from tests.unit.planner.conftest import config_of, shown

DENSE, EXPERTS = Kind(experts=False, compiled=False), Kind(experts=True, compiled=False)


def errors_of(ratios, kind=DENSE, name="run"):
    today = date(2026, 11, 28)
    return [
        PublishedError(f"{name} {number}", kind, ratio, "b200", today)
        for number, ratio in enumerate(ratios)
    ]


@pytest.fixture
def on_gpu(full):
    return replace(full, hardware=load_hardware("h100-sxm"))


def test_the_errors_are_those_of_the_suite_that_are_not_kept_back():
    """After a change of the suite: python -m benchmarks.published --write-errors."""
    errors = published_errors()
    assert [error.name for error in errors] == [run.name for run in RUNS if not run.kept_back]
    assert any(run.kept_back for run in RUNS)
    by_name = {run.name: run for run in RUNS}
    for error in errors:
        run = by_name[error.name]
        config = load_config(list(run.flags), world_size=run.ranks)
        assert (error.kind, error.hardware) == (kind_of(config), run.hardware)


def test_a_band_contains_nine_in_ten_of_what_comes_next():
    random.seed(1)
    inside = 0
    for _ in range(2000):
        *ratios, following = (math.exp(random.gauss(-0.05, 0.08)) for _ in range(6))
        band = prediction_interval(ratios, "")
        inside += band.low <= following <= band.high
    assert 0.88 < inside / 2000 < 0.92


def test_the_interval_is_the_textbook_one():
    ratios = [0.9, 1.0, 1.1]
    logs = stats.describe([math.log(ratio) for ratio in ratios])
    half = stats.t.ppf(0.95, 2) * math.sqrt(logs.variance * (1 + 1 / 3))
    band = prediction_interval(ratios, "why")
    assert band.low == pytest.approx(math.exp(logs.mean - half))
    assert band.high == pytest.approx(math.exp(logs.mean + half))
    assert (band.source, band.runs) == ("why", 3)
    assert prediction_interval([1.0], "") is None


def test_fewer_than_three_of_a_kind_take_those_of_the_kind_of_model_or_all():
    errors = errors_of([0.9, 1.0, 1.1]) + errors_of([0.5, 0.6], EXPERTS, "experts")
    assert published_band(DENSE, errors).runs == 3
    few = published_band(EXPERTS, errors)
    assert few.runs == 5 and "all published runs" in few.source
    compiled = errors_of([0.7], EXPERTS._replace(compiled=not EXPERTS.compiled), "compiled")
    few = published_band(EXPERTS, errors + compiled)
    assert few.runs == 3 and "all published runs" not in few.source
    assert published_band(DENSE, errors, without={"run 0"}).runs == 4


def test_a_row_is_judged_without_its_own_error():
    from benchmarks.published.tables import Row

    def row(name, ratio, kept_back=False):
        return Row(
            name, "", "b200", DENSE, kept_back, 1.0, ratio, ratio, *[None] * 2, 1.0, *[None] * 2
        )

    rows = [row(str(n), 1 + n / 100) for n in range(5)]
    alone, kept = row("far", 2.0), row("kept", 1.02, kept_back=True)
    found = {row.run: row for row in judged([*rows, alone, kept])}
    assert found["far"].in_band is False and found["far"].band.runs == 5
    assert found["kept"].band.runs == 6, "a run that is kept back makes no band"
    assert found["kept"].in_band


def test_kinds_are_of_model_and_backend():
    eager = config_of("--compile.backend", "eager")
    assert kind_of(eager) == Kind(False, False)
    assert kind_of(config_of("--compile.backend", "inductor")) == Kind(False, True)
    experts = ["--module", "graph_trainer.deepseek_v3", "--config", "debugmodel"]
    assert kind_of(load_config(experts, world_size=2)).experts
    assert band_of(eager, load_hardware("cpu")) is None
    assert band_of(eager, load_hardware("b200")).runs >= 3


def test_every_speed_time_and_mfu_has_its_range(on_gpu):
    band, report = on_gpu.band, json.loads(json.dumps(plan_report(on_gpu)))
    assert report["band"] == asdict(band)
    for key in ("tokens_per_second_per_gpu", "mfu", "mfu_causal"):
        expected = [report[key] * band.low, report[key] * band.high]
        assert report[f"{key}_range"] == pytest.approx(expected)
    seconds = [report["step_seconds"] / band.high, report["step_seconds"] / band.low]
    assert report["step_seconds_range"] == pytest.approx(seconds)
    text = shown(on_gpu)
    assert max(map(len, text.splitlines())) <= 100
    assert band.source in " ".join(text.split())
    write_page(on_gpu, page := io.StringIO())
    assert page.getvalue().count("<small>") >= 3


def test_combinations_have_the_range_of_their_kind(on_gpu):
    rows = [asdict(outcome_of({"training.seq_len": n}, on_gpu)) for n in ("32", "64")]
    assert rows[0]["tokens_per_second_per_gpu_range"] == on_gpu.band.of_rate(
        on_gpu.tokens_per_second_per_gpu
    )
    table = comparison_table(rows, on_gpu.hardware.memory_bytes)
    assert "range" in [str(column.header) for column in table.columns]
    assert table.caption.count(on_gpu.band.source) == 1
    document = {
        "rows": rows,
        "hardware": asdict(on_gpu.hardware),
        "world_size": 2,
        "runtime": "graph_trainer",
        "config": "",
        "versions": {},
    }
    write_comparison(document, "model", on_gpu.hardware.memory_bytes, page := io.StringIO())
    assert on_gpu.band.source in page.getvalue()


def test_a_plan_for_a_cpu_says_that_it_has_no_range(full):
    report = plan_report(full)
    assert full.band is report["band"] is report["mfu_range"] is None
    assert "no run on a CPU was published" in " ".join(shown(full).split())
    row = asdict(outcome_of({"training.seq_len": "32"}, full))
    assert row["step_seconds_range"] is None
    assert "No ranges" in comparison_table([row], full.hardware.memory_bytes).caption


def test_a_calibrated_profile_makes_the_band_of_its_spread(full):
    """Nine in ten of what is normally distributed, on a CPU too."""
    calibration = Calibration(
        samples=12, spread=0.1, device_name="EPYC", date="2026-11-28", torch="2.13"
    )
    band = band_of(full.config, replace(full.hardware, calibration=calibration))
    few = replace(full.hardware, calibration=replace(calibration, samples=9))
    inside = stats.norm.cdf([math.log(band.low), math.log(band.high)], scale=0.1)
    assert inside == pytest.approx([0.05, 0.95])
    assert band_of(full.config, few) is None
    assert band.runs == 12 and "EPYC" in band.source
    assert plan_report(replace(full, hardware=replace(full.hardware, calibration=calibration)))[
        "band"
    ]["low"] == pytest.approx(band.low)


def test_ends_of_a_range_keep_their_order():
    band = Band(0.8, 1.25, "", 3)
    assert band.of_rate(100) == (80, 125)
    assert band.of_time(1.0) == (0.8, 1.25)
