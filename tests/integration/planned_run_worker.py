"""Runs that are compared with a plan; test_plan_is_the_run.py asserts. Two ranks.

The last case ends the process group, as training does.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from graph_trainer.planner.train_planned import main as train_planned
from graph_trainer.train import leave, run
from tests.integration.launch import report

STEPS = 5
PLANNED = [
    *("--config", "debugmodel", "--training.seq_len", "256", "--training.local_batch_size", "4"),
    # two microbatches a step
    *("--training.global_batch_size", "16", "--debug.seed", "42"),
]


def words(folder: Path, plan: str, name: str, *flags: str) -> list[str]:
    dumped = str(folder / "out" / name)
    return ["--plan", str(folder / plan), *PLANNED, "--dump_folder", dumped, *flags]


def refused(folder: Path, name: str, *flags: str, plan: str = "plan.json") -> dict[str, Any]:
    """What `python -m graph_trainer.planner.train_planned` makes of it on this rank."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = run(words(folder, plan, name, *flags), train_planned)
    _, start, rest = said.getvalue().partition("error: ")
    return {"status": status, "error": start + " ".join(rest.split())}


def trained(folder: Path) -> dict[str, Any]:
    """The planned run."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        flags = words(folder, "plan.json", "trained", "--training.steps", str(STEPS))
        status = run(flags, train_planned)
    path = folder / "out/trained/predicted_and_measured.json"
    rows = json.loads(path.read_text())["rows"] if os.environ["RANK"] == "0" else []
    return {"status": status, "shown": shown.getvalue(), "rows": rows}


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    policy = ("--parallelism.fsdp_reshard_after_forward", "always")
    yield "policy", refused(folder, "policy", *policy)
    passes = ("--compile.disable_passes", "deduplicate_unshards")
    yield "passes", refused(folder, "passes", *passes)
    yield "one rank", refused(folder, "one rank", plan="other.json")
    yield "trained", trained(folder)


def main() -> None:
    torch.set_num_threads(1)
    report(dict(cases(Path(sys.argv[1]))))
    leave(0)


if __name__ == "__main__":
    main()
