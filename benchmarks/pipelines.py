"""Plans of 405B in a pipeline on 512 H100 by two schedules, beside torchtitan's published runs.

The published runs computed in float8 with asynchronous tensor parallelism, which no plan has, so
that only the ratios of the two schedules can be compared. The report does not state microbatches:
torchtitan of December 2024 made as many as there are stages unless a config said otherwise, of the
32 sequences of a rank.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.units import GIB
from graph_trainer.planner.pipeline_plan import make_pipeline_plan
from graph_trainer.titan.config.load import load_config

SOURCE = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 5"
PUBLISHED = {"1F1B": (100, 82.5), "Interleaved1F1B": (128, 72.7)}
"""By schedule: tokens per second and GPU, and GiB."""
RUNS = (("1F1B", 4), ("1F1B", 2), ("Interleaved1F1B", 2))
"""Schedules, each with the sequences of a microbatch."""
_RANKS = 512


def main() -> None:
    """Plan all runs, print a table with the ratios to the first, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    file = parser.parse_args().json
    rows = [planned(schedule, size) for schedule, size in RUNS]
    first = rows[0]
    print(f"{'':<16} microbatches tok/s/GPU speed    GiB memory bubble  step s  planned in s")
    for row in rows:
        row["speed"] = row["tokens_per_second"] / first["tokens_per_second"]
        row["memory"] = row["gib"] / first["gib"]
        print(
            f"{row['schedule']:<16} {row['microbatches']:>12} {row['tokens_per_second']:>9.1f} "
            f"{row['speed']:>5.2f} {row['gib']:>6.1f} {row['memory']:>6.2f} {row['bubble']:>6.1%} "
            f"{row['step_seconds']:>7.1f} {row['seconds']:>13.1f}"
        )
    speed, memory = (b / a for a, b in zip(*PUBLISHED.values(), strict=True))
    print(f"published, interleaved over 1F1B: speed {speed:.2f}, memory {memory:.2f} ({SOURCE})")
    document = json.dumps({"rows": rows, "published": {"speed": speed, "memory": memory}})
    if file is not None:
        file.write_text(document + "\n")
    print(document)


def planned(schedule: str, size: int) -> dict[str, Any]:
    """Plan 405B by a schedule: FSDP 8, tensor parallelism 8, pipeline 8, full recomputation.

    Args:
        size: sequences of a microbatch.
    """
    words = ["--config", "405b", "--training.local_batch_size", "32"]
    words += ["--parallelism.tensor_parallel_degree", "8"]
    words += ["--parallelism.pipeline_parallel_degree", "8"]
    words += ["--parallelism.pipeline_parallel_schedule", schedule]
    words += ["--parallelism.pipeline_parallel_microbatch_size", str(size)]
    config = load_config(words, world_size=_RANKS)
    start = time.perf_counter()
    plan = make_pipeline_plan(config, _RANKS, load_hardware("h100-grand-teton"))
    return {
        "schedule": schedule,
        "microbatches": plan.num_microbatches,
        "tokens_per_second": plan.tokens_per_second_per_gpu,
        "gib": plan.need.allocated / GIB,
        "bubble": plan.timeline.bubble,
        "step_seconds": plan.step_seconds,
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    main()
