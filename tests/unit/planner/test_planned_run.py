"""What a run prints of its plan beside what it measured."""

from __future__ import annotations

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from graph_trainer.core.sharding.functional_collectives import all_gather, all_reduce
from graph_trainer.core.text import WIDTH
from graph_trainer.errors import ConfigError
from graph_trainer.planner.plan_check import PlanCheck
from graph_trainer.planner.planned_run import (
    WARM_UP,
    IssuedCollectives,
    PlannedRun,
    comparison,
    comparison_table,
)
from graph_trainer.planner.terminal import print_table
from graph_trainer.testing import become
from graph_trainer.titan.training_state_memory import local_bytes
from tests.unit.planner.conftest import config_of


def compared(plan, issued=None, steps=0, **measured):
    given = {"parameter_bytes": 2**20, "optimizer_bytes": 0}
    rows = comparison(plan.of_rank(0).predicted, given | measured, issued, steps)
    return {row.what: row for row in rows}


def test_the_table_shows_predicted_measured_and_ratio(plan, capsys):
    predicted = plan.of_rank(0).predicted
    rows = compared(
        plan,
        predicted.collectives | {"all_to_all_single": 1},
        steps=8,
        peak_bytes=predicted.peak_bytes,
        made_bytes=2 * predicted.made_bytes,
        step_seconds=predicted.step_seconds / 2,
    )
    assert rows["made by the graph"].ratio == 2 and rows["step"].ratio == 0.5
    assert rows["step"].how == "median of 6 steps after 2 of warm-up"
    assert rows["all_gather_into_tensor"].ratio == 1
    # What was issued without being planned has a row.
    assert (rows["all_to_all_single"].predicted, rows["all_to_all_single"].measured) == (0, 1)
    # a CPU's allocator has no maximum, and the machine's memory no reserve
    assert rows["peak memory"].how.startswith("resident: growth in step 2")
    assert "reserved memory" not in rows and "needed of the device" not in rows
    print_table(comparison_table("Predicted", rows.values()))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any("all_gather_into_tensor" in line and "1.000" in line for line in lines)


def test_a_short_run_says_what_it_did_not_measure(plan):
    rows = compared(plan)
    assert rows["peak memory"].how == "not measured: that is done in step 2, on Linux"
    assert rows["step"].how == "not measured: no step was run"
    assert rows["made by the graph"].how == "not measured: that is done in step 2"
    assert all(row.ratio is None for row in rows.values() if row.measured is None)
    assert rows["all_gather_into_tensor"].how == "not measured: that is done in step 2"
    rows = compared(plan, issued={}, steps=2, step_seconds=1.0)
    assert rows["step"].how == "step 2 alone, itself of warm-up"
    assert rows["made by the graph"].how == "not measured: compiled code allocates unseen"


def test_a_gpu_s_rows_are_of_its_allocator(plan):
    rows = compared(plan, peak_bytes=1, reserved_bytes=2, needed_bytes=3)
    assert rows["peak memory"].how == rows["reserved memory"].how == "CUDA allocator's maximum"
    assert rows["needed of the device"].measured == 3


def test_the_run_is_written_and_steps_of_warm_up_do_not_count(plan, saved, tmp_path, capsys):
    become(0, 2)
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(64)
    optimizer.step()
    moments = optimizer.state[weight].values()
    run = PlannedRun(PlanCheck(plan, saved, ()), config_of("--dump_folder", str(tmp_path)))

    def written():
        run.finished([weight], [optimizer])
        document = json.loads((tmp_path / "predicted_and_measured.json").read_text())
        rows = {row["what"]: row for row in document.pop("rows")}
        return document, rows["step"], rows["peak memory"]

    for _ in range(WARM_UP):
        with run.step():
            time.sleep(0.05)
    run.memory_grew(2**20)
    document, step, peak = written()
    assert document == {
        "schema": "graph_trainer.predicted_and_measured/1",
        "plan": str(saved),
        "hardware": "cpu",
        "rank": 0,
        "world_size": 2,
    }
    assert step["measured"] >= 0.05 and step["how"] == "step 2 alone, itself of warm-up"
    assert peak["measured"] == 2**20 + sum(map(local_bytes, ([weight], moments)))
    assert "Predicted for cpu, measured on cpu: rank 0 of 2" in capsys.readouterr().out
    for _ in range(4):
        with run.step():
            pass
    _, step, _ = written()
    assert step["measured"] < 0.05 and step["how"] == "median of 4 steps after 2 of warm-up"
    tmp_path.joinpath("predicted_and_measured.json").unlink()
    tmp_path.joinpath("predicted_and_measured.json").mkdir()
    with pytest.raises(ConfigError, match="predicted and measured cannot be written"):
        run.finished([], [])


def test_collectives_are_counted_where_they_are_started():
    become(0, 2)
    group = dist.group.WORLD
    x = torch.ones(4, 2)
    with IssuedCollectives() as issued:
        all_reduce(all_gather(x, group), group)
        all_reduce(x, group)
    all_reduce(x, group)
    assert issued.count == {"all_gather_into_tensor": 1, "all_reduce": 2}
