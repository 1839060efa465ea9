"""What a run prints of its passes, and of its plan beside what it measured."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graph_trainer.core.passes.report import PassReport, Report
from graph_trainer.core.sharding.collectives import all_gather, all_reduce
from graph_trainer.errors import ConfigError
from graph_trainer.planner.console import WIDTH, print_table
from graph_trainer.planner.plan_check import PlanCheck
from graph_trainer.planner.planned_run import (
    ReportedRun,
    comparison,
    comparison_table,
    save_comparison,
)
from graph_trainer.planner.run_metrics import WARM_UP, IssuedCollectives, Measured, StepTimes
from graph_trainer.testing import become

GATHERS = {("all_gather_into_tensor", "forward"): 12_345}
BIG = PassReport("capture", 1.0, 60_000, GATHERS, 900 * 1024**3, 90 * 1024**3)
CHANGED = PassReport("functionalize_writes", 99.9, 55_555, {}, 0, 10 * 1024**3)


def test_rank_0_prints_the_largest_graphs_in_a_hundred_columns(capsys) -> None:
    ReportedRun(rank=1).graph_reported(Report([BIG, CHANGED]))
    assert not capsys.readouterr().out
    ReportedRun(rank=0).graph_reported(Report([BIG, CHANGED]))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "What each pass did to the joint graph" in text
    # Nothing is cut, and a change stands beside its number.
    for part in ("functionalize_writes", "60,000", "55,555", "-4,445", "12,345", "-12,345"):
        assert part in text
    assert "…" not in text


def compared(plan, **measured):
    given = {"sees_memory": True, "parameter_bytes": 2**20, "optimizer_bytes": 0}
    return comparison(plan, 0, Measured(**(given | measured)))


def test_the_table_shows_predicted_measured_and_ratio(plan, saved, tmp_path, capsys):
    predicted = plan.of_rank(0).predicted
    found = compared(
        plan,
        made_bytes=2 * predicted.made_bytes,
        step_seconds=predicted.step_seconds / 2,
        steps_timed=6,
        issued=predicted.counts() | {"all_to_all_single": 1},
    )
    rows = {row.what: row for row in found}
    assert rows["made by the graph"].ratio == 2 and rows["step"].ratio == 0.5
    assert rows["step"].how == "median of 6 steps after 3 of warm-up"
    assert rows["all_gather_into_tensor"].ratio == 1
    # What was issued without being planned has a row.
    assert (rows["all_to_all_single"].predicted, rows["all_to_all_single"].measured) == (0, 1)
    assert rows["peak memory"].measured is None and "not measured" in rows["peak memory"].how
    print_table(comparison_table(plan, 0, found))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any("all_gather_into_tensor" in line and "1.000" in line for line in lines)
    path = save_comparison(PlanCheck(plan, saved, (), ()), 0, found, str(tmp_path))
    written = json.loads(path.read_text())
    assert written["rows"][0]["measured"] is None and len(written["rows"]) == len(found)
    assert written["hardware"] == "cpu" and written["plan"] == str(saved)
    with pytest.raises(ConfigError, match="predicted and measured cannot be written"):
        save_comparison(PlanCheck(plan, Path("p"), (), ()), 0, found, str(tmp_path / "none"))


def test_a_short_run_says_what_it_did_not_measure(plan):
    rows = {row.what: row for row in compared(plan)}
    assert rows["step"].how == "not measured: the first 3 steps are warm-up"
    assert rows["made by the graph"].how == "not measured: that is done in step 2"
    assert all(row.ratio is None for row in rows.values() if row.measured is None)
    rows = {row.what: row for row in compared(plan, sees_memory=False)}
    assert rows["made by the graph"].how == "not measured: compiled code allocates unseen"


def test_steps_of_warm_up_do_not_count():
    times = StepTimes(torch.device("cpu"))
    for step in range(WARM_UP):
        with times.timing():
            time.sleep(0.05)
        assert (times.steps, times.timed, times.median()) == (step + 1, 0, None)
    for _ in range(4):
        with times.timing():
            pass
    assert times.timed == 4 and times.median() < 0.05


def test_collectives_are_counted_where_they_are_started():
    become(0, 2)
    group = dist.group.WORLD
    x = torch.ones(4, 2)
    with IssuedCollectives() as issued:
        all_reduce(all_gather(x, group), group)
        all_reduce(x, group)
    all_reduce(x, group)
    assert issued.count == {"all_gather_into_tensor": 1, "all_reduce": 2}
