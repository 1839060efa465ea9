"""The notes of a plan: what to know of it beside its figures."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from importlib import resources

from markupsafe import escape

from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.simulation.runtimes import TORCHTITAN
from graph_trainer.planner.changes import outcome_of
from graph_trainer.planner.html.drawn import KINDS
from graph_trainer.planner.html.page import write_page
from graph_trainer.planner.plan_report import plan_report
from graph_trainer.planner.plan_tables import comparison_table
from graph_trainer.titan.model_flops import FlopsPerToken
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


def test_both_counts_of_flops_are_shown_and_named_where_they_differ(full):
    near = replace(full, flops_per_token=FlopsPerToken(1000, 901))
    far = replace(full, flops_per_token=FlopsPerToken(1000, 899))
    names = ("MFU (torchtitan's count)", "MFU (causal)")
    for plan, both in ((near, False), (far, True)):
        write_page(plan, page := io.StringIO())
        outcome = asdict(outcome_of({}, plan))
        table = comparison_table([outcome], plan.hardware.memory_bytes)
        headings = [str(column.header) for column in table.columns]
        for name in names:
            assert (name in shown(plan)) is both is (f"<dt>{escape(name)}</dt>" in page.getvalue())
            assert (name in headings) is both
        assert ("MFU" in headings) is not both
        report = plan_report(plan)
        assert (report["mfu"], report["mfu_causal"]) == (plan.mfu, plan.mfu_causal)


def test_everything_that_the_page_draws_has_a_colour():
    css = (resources.files("graph_trainer.planner.html") / "page.css").read_text(encoding="utf-8")
    drawn = [*KINDS, *(category.value for category in Category)]
    assert [key for key in drawn if f"--{key}: #" not in css] == []
