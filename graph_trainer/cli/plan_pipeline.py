"""graph-trainer plan for a config with a pipeline."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from rich.text import Text

from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER
from graph_trainer.core.text import WIDTH, wrapped
from graph_trainer.planner.fake_rank import check_one_stage
from graph_trainer.planner.html.schedule_page import write_schedule_page
from graph_trainer.planner.pipeline_advice import advise_pipeline
from graph_trainer.planner.pipeline_plan import PipelinePlan, make_pipeline_plan
from graph_trainer.planner.pipeline_report import pipeline_report, pipeline_text
from graph_trainer.planner.plan import LoadConfig
from graph_trainer.planner.processes import usable_processes
from graph_trainer.planner.schedule_trace import write_schedule_trace
from graph_trainer.planner.terminal import print_table, progress
from graph_trainer.planner.training_cost import cost_of
from graph_trainer.planner.verify_pipeline_order import verify_pipeline_order
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.files import published

_OF_ONE_STAGE = (
    *("compare", "memory_curve", "expert_imbalance", "routing"),
    *("rank", "save", "table"),
)
"""The flags that a pipeline cannot have."""


def check_flags_of_pipeline(flags: argparse.Namespace, config: GraphTrainerConfig) -> None:
    """Refuse what there is only for models that are not split into stages.

    Raises:
        ConfigError: the config has a pipeline, and the command line such a flag.
    """
    named = [f"--{name.replace('_', '-')}" for name in _OF_ONE_STAGE if getattr(flags, name)]
    if flags.like != GRAPH_TRAINER.name:
        named.append(f"--like {flags.like}")
    if named:
        check_one_stage(config, named[0])


def prove_order_of_pipeline(
    config: GraphTrainerConfig, world_size: int, hardware: Hardware, all_ranks: bool
) -> int:
    """Print what is proved of schedule and stages; return 0.

    Raises:
        VerificationError: the ranks can hang.
    """
    with progress("order") as say:
        for text in verify_pipeline_order(
            *(config, world_size),
            all_ranks=all_ranks,
            device=hardware.device,
            processes=usable_processes(),
            on_progress=say,
        ):
            print("\n".join(wrapped(line, WIDTH) for line in text.splitlines()), flush=True)
    return 0


def plan_pipeline(
    config: GraphTrainerConfig,
    load: LoadConfig,
    world_size: int,
    hardware: Hardware,
    files: Mapping[str, Path],
    flags: argparse.Namespace,
) -> int:
    """Plan all stages and their schedule, print the tables and write the files; return 0.

    Args:
        load: loads changed configs for the advice.
        files: by flag.
        flags: those of `add_cost_flags` are read.

    Raises:
        GraphTrainerError: as `make_pipeline_plan`.
    """
    with progress("plan") as say:
        plan = make_pipeline_plan(config, world_size, hardware, on_progress=say)
    with progress("what would help") as say:
        plan = replace(plan, advice=tuple(advise_pipeline(plan, load, say)))
    stdout_is_a_file = Path("/dev/stdout").resolve() in {path.resolve() for path in files.values()}
    report = pipeline_report(plan)
    print_table(pipeline_text(report), stderr=stdout_is_a_file)
    cost = cost_of(flags, world_size, report)
    if cost is not None and plan.fits:
        print_table(Text(f"{cost}."), stderr=stdout_is_a_file)
    for flag, path in files.items():
        with published(path) as file:
            _WRITERS[flag](plan, file)
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _write_json(plan: PipelinePlan, file: IO[str]) -> None:
    file.write(json.dumps(pipeline_report(plan), indent=2) + "\n")


_WRITERS: dict[str, Callable[[PipelinePlan, IO[str]], None]] = {
    "--json": _write_json,
    "--trace": write_schedule_trace,
    "--html": write_schedule_page,
}
