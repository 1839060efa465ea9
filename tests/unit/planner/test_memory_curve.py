"""Step time over memory: fixed policies as points, plans within limits as a curve."""

import copy
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from graph_trainer.cli import plan_command as command
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.units import GIB, MIB
from graph_trainer.errors import ConfigError
from graph_trainer.planner import changes
from graph_trainer.planner.changes import advise, flags_of, memory_curve
from graph_trainer.planner.plan import make_plan
from graph_trainer.planner.plan_report import plan_report, readable_report
from graph_trainer.planner.plan_tables import report_text
from graph_trainer.planner.simulated_agreement import decided_by
from graph_trainer.titan.config.load import load_config
from tests.unit.planner.conftest import BFLOAT16

BUDGET = [*BFLOAT16, "--activation_checkpoint.type", "budget", "--compile.memory_limit_gib", "2.55"]


@pytest.fixture(scope="module")
def plan():
    config = load_config(
        ["--training.seq_len", "1024", "--training.local_batch_size", "8", *BUDGET], world_size=4
    )
    config.model_spec.model.layers = config.model_spec.model.layers[:3]
    return make_plan(config, 4, load_hardware("h100-sxm"), every_pass=False)


@pytest.mark.full
def test_the_curve_has_fixed_policies_and_limits_that_are_kept(plan):
    curve = memory_curve(plan, lambda line: None)
    report = plan_report(replace(plan, memory_curve=tuple(curve)))
    points = json.loads(json.dumps(report))["memory_curve"]
    fixed = [point for point in points if point["limit_bytes"] is None]
    limited = [point for point in points if point["limit_bytes"] is not None]
    assert [point["policy"] for point in fixed] == ["none", "selective", "full"]
    assert len(limited) >= 6
    for point in limited:
        assert point["policy"] == "budget"
        room = point["limit_bytes"] - point["needed_bytes"]
        assert point["peak_bytes"] < point["needed_bytes"] and 0 <= room <= 1e-4 * GIB
    # each costs more memory than the one before, and is worth it
    for less, more in pairwise(limited):
        assert less["needed_bytes"] < more["needed_bytes"]
        assert less["step_seconds"] > more["step_seconds"]
    none, _, full = (point["step_seconds"] for point in fixed)
    assert limited[-1]["step_seconds"] <= none < full
    # what a run with this limit gets
    config = copy.deepcopy(plan.config)
    config.parallelism.fsdp_reshard_after_forward = "auto"
    config.compile.memory_limit_gib = limited[1]["limit_bytes"] / GIB
    run = make_plan(config, 4, plan.hardware, every_pass=False, captures=plan.captures)
    assert run.need.total <= limited[1]["limit_bytes"]
    assert run.step_seconds <= limited[1]["step_seconds"]
    assert [point["peak_bytes"] for point in points] == [each.peak_bytes for each in curve]
    assert all(each.fits for each in curve)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(report_text(readable_report(replace(plan, memory_curve=tuple(curve)))))
    text = shown.get()
    assert "Step time over memory" in text and "Kept for backward, by op of a block" in text
    assert max(map(len, text.splitlines())) <= 100


def test_fixed_policies_are_drawn_for_a_config_that_plans_parameters(monkeypatch):
    monkeypatch.setattr(changes, "_PLANS", 2)
    flags = [*BUDGET, "--parallelism.fsdp_reshard_after_forward", "auto"]
    config = load_config(
        ["--training.seq_len", "1024", "--training.local_batch_size", "8", *flags], world_size=4
    )
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    plan = make_plan(config, 4, load_hardware("h100-sxm"), every_pass=False)
    policies = [each.config["activation_checkpoint.type"] for each in memory_curve(plan, print)]
    assert policies[:3] == ["none", "selective", "full"]
    assert set(policies[3:]) == {"budget"}


def test_ranks_whose_tables_differ_decide_otherwise(plan, monkeypatch):
    joint = plan.simulation.joint
    before = decided_by(joint)
    table = joint.decisions["plan_memory"]
    kept = next(row for row in table.rows if row.keep_in)
    other = replace(table, rows=(replace(kept, keep_in=()),))
    monkeypatch.setitem(joint.decisions, "plan_memory", other)
    assert decided_by(joint) != before


def test_the_report_has_the_table(plan):
    rows = plan_report(plan)["memory_table"]
    assert rows and {"module", "op", "nth", "keep_in", "mib", "milliseconds"} == set(rows[0])
    assert [row.key for row in plan.memory_table.rows] == [
        (row["module"], row["op"], row["nth"]) for row in rows
    ]


def test_a_plan_that_does_not_fit_is_advised_a_lower_limit(plan):
    little = replace(plan.hardware, memory_gib=(plan.need.total - 20 * MIB) / GIB)
    tried = []

    def load(flags):
        tried.append(flags)
        config = load_config(
            ["--training.seq_len", "1024", "--training.local_batch_size", "8", *BUDGET, *flags],
            world_size=4,
        )
        config.model_spec.model.layers = config.model_spec.model.layers[:3]
        return config

    (advice,) = advise(replace(plan, hardware=little), load, lambda line: None)
    assert advice.config == {"compile.memory_limit_gib": f"{little.memory_gib:g}"}
    assert [flags_of(advice.config)] == tried and advice.needed_bytes < plan.need.total


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--table", "t.toml"], "--table: there is none to write"),
        (["--memory-curve", "--like", "torchtitan"], "--memory-curve is for runs of graph_trainer"),
        (["--memory-curve", "--compare", "training.seq_len=1,2"], "--memory-curve is of one plan"),
        (["--memory-curve", "--verify-order"], "leave it or --memory-curve out"),
    ],
)
def test_flags_that_go_with_others_only(words, said):
    with pytest.raises(ConfigError, match=said):
        command.main(["--config", "debugmodel", "--world-size", "2", *words])
