"""A plan of a pipeline as one structure of plain values, and as tables for a terminal.

The structure is the JSON document of the plan; docs/reading_a_plan.md describes its keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import RenderableType, group
from rich.text import Text

from graph_trainer.planner.changes import flags_of
from graph_trainer.planner.measures import duration
from graph_trainer.planner.pipeline_plan import PipelinePlan, StagePlan
from graph_trainer.planner.plan import versions
from graph_trainer.planner.plan_report import EAGER, notes_on, settings_text
from graph_trainer.planner.plan_tables import fit_and_speed, make_table
from graph_trainer.planner.terminal import PlainTable
from graph_trainer.titan.config.check_pipeline import schedule_of
from graph_trainer.titan.config.write_toml import config_to_toml

SCHEMA = "graph_trainer.pipeline_plan/1"
"""Changes when a key changes its meaning or goes; new keys do not change it."""


def pipeline_report(plan: PipelinePlan) -> dict[str, Any]:
    """Make the report of a plan."""
    need, timeline = plan.need, plan.timeline
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "headline": plan.headline,
        "settings": settings_text(
            plan.config, plan.world_size, plan.data_parallel_degree, plan.repeats
        ),
        "notes": list(_notes(plan)),
        "config": config_to_toml(plan.config),
        "hardware": dataclasses.asdict(plan.hardware),
        "world_size": plan.world_size,
        "parameters": plan.num_parameters,
        "schedule": schedule_of(plan.config),
        "splits_backward": plan.splits_backward,
        "schedule_microbatches": plan.num_microbatches,
        "schedules": plan.repeats,
        "microbatches": plan.num_microbatches * plan.repeats,
        "stages": [_stage(stage) for stage in plan.stages],
        "ranks": [_rank(plan, rank) for rank in plan.actions],
        "bubble": timeline.bubble,
        "schedule_seconds": timeline.seconds,
        "outside_seconds": plan.outside_seconds,
        "slowest_device": plan.slowest_device,
        "step_seconds": plan.step_seconds,
        "tokens_per_second_per_gpu": plan.tokens_per_second_per_gpu,
        "mfu": plan.mfu,
        "mfu_causal": plan.mfu_causal,
        # no pipeline has been compared with a measured run
        "band": None,
        "tokens_per_second_per_gpu_range": None,
        "step_seconds_range": None,
        "mfu_range": None,
        "mfu_causal_range": None,
        "expert_imbalance": plan.config.compile.expert_imbalance or 1.0,
        "peak": {"bytes": need.alive},
        "allocated_bytes": need.allocated,
        "needed_bytes": need.total,
        "limit_bytes": plan.limit_bytes,
        "headroom_bytes": plan.headroom_bytes,
        "fits": plan.fits,
        "advice": [
            {
                "flags": flags_of(outcome.config),
                "needed_bytes": outcome.needed_bytes,
                "tokens_per_second_per_gpu": outcome.tokens_per_second_per_gpu,
                "step_seconds": outcome.step_seconds,
                "fits": outcome.fits,
            }
            for outcome in plan.advice
        ],
        "spans": [
            {
                "rank": span.rank,
                "stage": span.stage,
                "kind": span.kind.name.lower(),
                "microbatch": span.microbatch,
                "start": span.start,
                "seconds": span.seconds,
            }
            for rank in plan.actions
            for span in timeline.spans[rank]
        ],
    }


def _notes(plan: PipelinePlan) -> Iterator[str]:
    yield from notes_on(plan.config, plan.hardware)
    if plan.config.compile.mode == "eager":
        yield EAGER
    if len(plan.stages) > plan.num_ranks:
        yield (
            "A rank with several stages needs at most what is shown: the most that one of them "
            "needs while it runs, and what the others keep at this time."
        )


def _stage(stage: StagePlan) -> dict[str, Any]:
    at_peak = stage.simulation.memory.peak_by_category()
    return {
        "stage": stage.index,
        "rank": stage.rank,
        "modules": list(stage.modules),
        "nodes": len(stage.simulation.joint.graph.nodes),
        "in_flight": stage.in_flight,
        "peak_bytes": stage.peak_bytes,
        "peak_by_category": {category.value: num for category, num in at_peak.items()},
        "microbatch_bytes": stage.microbatch_bytes,
        "forward_seconds": stage.seconds.forward,
        "backward_seconds": stage.seconds.backward,
        "backward_input_seconds": stage.seconds.backward_input,
        "backward_weight_seconds": stage.seconds.backward_weight,
        "unshard_seconds": stage.seconds.unshard,
        "reduce_grad_seconds": stage.seconds.reduce_grad,
        "sent_bytes": stage.sent_bytes,
    }


def _rank(plan: PipelinePlan, rank: int) -> dict[str, Any]:
    need, timeline = plan.need_of(rank), plan.timeline
    return {
        "rank": rank,
        "stages": [stage.index for stage in plan.stages_of(rank)],
        "peak_bytes": need.alive,
        "needed_bytes": need.total,
        "fits": need.total <= plan.allowed_bytes,
        "busy_seconds": timeline.busy_seconds(rank),
        "bubble_seconds": timeline.bubble_seconds(rank),
        "exposed_seconds": timeline.exposed_seconds(rank),
    }


@group()
def pipeline_text(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Make all tables of a report."""
    yield Text(f"{report['headline']}\n{report['settings']}", style="bold")
    for note in report["notes"]:
        yield Text(f"{note}\n")
    yield from pipeline_tables(report)
    yield Text(schedule_text(report))
    yield Text(fit_and_speed(report))
    if report["advice"]:
        yield pipeline_advice_table(report)


def pipeline_advice_table(report: dict[str, Any]) -> PlainTable:
    """Make the table of changes that help, where there are some."""
    rows = report["advice"]
    return make_table(
        "What would make it faster" if report["fits"] else "What would help most",
        ("flags", "name", [" ".join(row["flags"]).replace(" --", "\n--") for row in rows]),
        ("needs", "bytes", _of(rows, "needed_bytes")),
        ("step", "seconds", _of(rows, "step_seconds")),
        ("tok/s/GPU", "count", _of(rows, "tokens_per_second_per_gpu")),
        ("fits", "text", ["yes" if row["fits"] else "no" for row in rows]),
    )


def pipeline_tables(report: dict[str, Any]) -> list[PlainTable]:
    """Make a table with a row a stage, and one with a row a rank where ranks have several."""
    stages, ranks = report["stages"], report["ranks"]
    of_stages = [
        ("stage", "text", _of(stages, "stage")),
        ("modules", "name", [modules_text(stage["modules"]) for stage in stages]),
        ("in flight", "count", _of(stages, "in_flight")),
        ("peak", "bytes", _of(stages, "peak_bytes")),
    ]
    of_programs = [
        ("forward", "seconds", _of(stages, "forward_seconds")),
        ("backward", "seconds", _of(stages, "backward_seconds")),
    ]
    if report["splits_backward"]:
        parts = [("of input", "backward_input_seconds"), ("of weights", "backward_weight_seconds")]
        of_programs[1:] = [
            (f"backward\n{part}", "seconds", _of(stages, key)) for part, key in parts
        ]
    seconds = report["schedule_seconds"]
    of_ranks = [
        ("needs", "bytes", _of(ranks, "needed_bytes")),
        ("busy", "seconds", _of(ranks, "busy_seconds")),
        ("bubble", "part", [row["bubble_seconds"] / seconds for row in ranks]),
        ("exposed sends", "part", [row["exposed_seconds"] / seconds for row in ranks]),
        ("fits", "text", ["yes" if row["fits"] else "NO" for row in ranks]),
    ]
    if len(stages) == len(ranks):
        table = make_table("Stages, one on each rank of the pipeline", *of_stages, *of_ranks)
        table.columns[2].header = "in\nflight"
        table.columns[-2].header = "exposed\nsends"
        return [table]
    on_rank = ("rank", "text", _of(stages, "rank"))
    listed = [", ".join(map(str, row["stages"])) for row in ranks]
    return [
        make_table("Stages", of_stages[0], on_rank, *of_stages[1:], *of_programs),
        make_table(
            "Ranks of the pipeline",
            ("rank", "text", _of(ranks, "rank")),
            ("stages", "name", listed),
            *of_ranks,
        ),
    ]


def _of(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows]


def schedule_text(report: dict[str, Any]) -> str:
    """Format how long the schedule takes, and which part of it ranks are idle."""
    microbatches, exposed = report["schedule_microbatches"], _of(report["ranks"], "exposed_seconds")
    part = sum(exposed) / len(exposed) / report["schedule_seconds"]
    return (
        f"{report['schedule']} runs {microbatches} microbatches in "
        f"{duration(report['schedule_seconds'])}: a rank is idle for {report['bubble']:.1%} of it "
        f"in the bubble, and for {part:.1%} while it waits for sends, on average."
    )


def modules_text(names: Sequence[str]) -> str:
    """Format the parts of a model: 'tok_embeddings, layers.0-14'."""
    parts = []
    for is_layer, run in groupby(names, key=lambda name: name.startswith("layers.")):
        listed = list(run)
        if not is_layer or len(listed) == 1:
            parts += listed
        else:
            parts.append(f"{listed[0]}-{listed[-1].removeprefix('layers.')}")
    return ", ".join(parts)
