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

from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.units import GIB
from graph_trainer.planner.pipeline_plan import make_pipeline_plan
from graph_trainer.titan.config.load import load_config

SOURCE = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 5"
PUBLISHED = {"1F1B": (100, 82.5), "Interleaved1F1B": (128, 72.7)}
"""By schedule: tokens per second and GPU, and GiB."""
_MICROBATCH = {"1F1B": 4, "Interleaved1F1B": 2}
_RANKS = 512


def main() -> None:
    """Plan both runs, print a table and the ratios, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    file = parser.parse_args().json
    rows = {schedule: planned(schedule) for schedule in PUBLISHED}
    print(f"{'':<16} {'tok/s/GPU':>9} {'GiB':>6} {'bubble':>7} {'step s':>7} {'planned in s':>12}")
    for schedule, row in rows.items():
        print(
            f"{schedule:<16} {row['tokens_per_second']:>9.1f} {row['gib']:>6.1f} "
            f"{row['bubble']:>7.1%} {row['step_seconds']:>7.1f} {row['seconds']:>12.1f}"
        )
    one, other = rows["1F1B"], rows["Interleaved1F1B"]
    speed, memory = (other[key] / one[key] for key in ("tokens_per_second", "gib"))
    measured = [b / a for a, b in zip(*PUBLISHED.values(), strict=True)]
    print(f"interleaved / 1F1B, planned: speed {speed:.2f}, memory {memory:.2f}")
    print(f"published ({SOURCE}): speed {measured[0]:.2f}, memory {measured[1]:.2f}")
    document = json.dumps({"rows": rows, "ratios": {"speed": speed, "memory": memory}})
    if file is not None:
        file.write_text(document + "\n")
    print(document)


def planned(schedule: str) -> dict[str, float]:
    """Plan 405B by a schedule: FSDP 8, tensor parallelism 8, pipeline 8, full recomputation."""
    words = ["--config", "405b", "--training.local_batch_size", "32"]
    words += ["--parallelism.tensor_parallel_degree", "8"]
    words += ["--parallelism.pipeline_parallel_degree", "8"]
    words += ["--parallelism.pipeline_parallel_schedule", schedule]
    words += ["--parallelism.pipeline_parallel_microbatch_size", str(_MICROBATCH[schedule])]
    config = load_config(words, world_size=_RANKS)
    start = time.perf_counter()
    plan = make_pipeline_plan(config, _RANKS, load_hardware("h100-grand-teton"))
    return {
        "tokens_per_second": plan.tokens_per_second_per_gpu,
        "gib": plan.need.allocated / GIB,
        "bubble": plan.timeline.bubble,
        "step_seconds": plan.step_seconds,
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    main()
