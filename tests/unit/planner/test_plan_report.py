"""The notes of a plan: what to know of it beside its figures."""

from __future__ import annotations

import io
from dataclasses import replace

from graph_trainer.core.simulation.runtimes import TORCHTITAN
from graph_trainer.planner.html.page import write_page
from graph_trainer.planner.plan_report import plan_report
from tests.unit.planner.conftest import config_of, shown


def notes_of(plan):
    return plan_report(plan)["notes"]


def test_a_config_that_names_no_data_is_told_what_it_trains_on(full):
    (note,) = notes_of(full)
    assert "Python's standard library, with a vocabulary of 2,048 of its own" in note
    write_page(full, page := io.StringIO())
    assert note in " ".join(shown(full).split()) and "<span>2,048</span>" in page.getvalue()
    assert notes_of(replace(full, config=config_of("--dataloader.dataset", "stdlib"))) == []


def test_a_mode_that_captures_nothing_is_told(full):
    eager = replace(full, config=config_of("--compile.mode", "eager"))
    assert 'compile.mode = "eager" captures no graph: all' in " ".join(shown(eager).split())
    as_torchtitan = replace(eager.simulation, runtime=TORCHTITAN)
    assert notes_of(replace(eager, simulation=as_torchtitan)) == notes_of(full)


def test_a_profile_without_the_dtype_of_the_run_is_told(full):
    slow = replace(full.hardware, name="mine", peak_flops={"float32": 66.9e12})
    told = "mine has no peak_flops.bfloat16, so times and MFU are of peak_flops.float32."
    asks = replace(full, hardware=slow)
    assert told in " ".join(shown(asks).split())
    in_float32 = config_of("--training.mixed_precision_param", "float32")
    assert notes_of(replace(asks, config=in_float32)) == notes_of(full)
