"""Predictions beside what torchtitan published, run by torchtitan as it was.

    python -m benchmarks.published

Each run is planned with `--like torchtitan`, cross-entropy over whole logits as torchtitan computed
it then, and a hardware profile whose constants come from other sources than these figures. The
published figures are read here and nowhere else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.simulation.runtimes import TORCHTITAN
from graph_trainer.core.simulation.simulate import OtherMemory, simulate
from graph_trainer.planner.plan import Plan, make_plan
from graph_trainer.titan.config.load import load_config

GIB = 1024**3

H100 = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3"
A100 = "pytorch/torchtitan, docs/performance.md as of 2024, Llama 3 on 64 A100 (80 GB)"

TITAN_3816 = "pytorch/torchtitan issue 3816: expert parallelism 1, the loss compiled alone"
PITH_79 = "mlc-ai/pith-train issue 79: torchtitan, blocks and loss compiled"


@dataclass(frozen=True, slots=True)
class Published:
    """One run that somebody published."""

    name: str
    source: str
    hardware: str
    ranks: int
    flags: tuple[str, ...]
    tokens_per_second: int
    """Per GPU."""
    memory_gib: float | None
    """torchtitan's metric: the most that the allocator reserved."""


def _8b(batch: int, backend: str) -> tuple[str, ...]:
    return (
        *("--config", "8b", "--training.local_batch_size", str(batch)),
        *("--loss.type", "cross_entropy", "--compile.backend", backend),
    )


_70B = (
    *("--config", "70b", "--training.local_batch_size", "1", "--loss.type", "cross_entropy"),
    *("--activation_checkpoint.type", "full", "--compile.backend", "eager"),
    *("--parallelism.tensor_parallel_degree", "1"),
)

_EXPERTS = ("--activation_checkpoint.type", "selective", "--loss.type", "chunked_cross_entropy")
_DEEPSEEK_16B = (
    *("--module", "graph_trainer.deepseek_v3", "--config", "16b", *_EXPERTS),
    *("--training.local_batch_size", "4", "--compile.backend", "eager"),
)
_QWEN3_30B = (
    *("--module", "graph_trainer.qwen3", "--config", "30b-a3b", *_EXPERTS),
    *("--training.seq_len", "8192", "--training.local_batch_size", "8"),
    *("--training.global_batch_size", "64", "--compile.backend", "inductor"),
)

RUNS = (
    Published("8B, 8 H100", H100, "h100-grand-teton", 8, _8b(2, "eager"), 5762, 82.4),
    Published("8B, 8 H100, compile", H100, "h100-grand-teton", 8, _8b(2, "inductor"), 6667, 77.0),
    Published("8B, 128 H100", H100, "h100-grand-teton", 128, _8b(2, "eager"), 5605, 67.0),
    Published(
        "8B, 128 H100, compile", H100, "h100-grand-teton", 128, _8b(2, "inductor"), 6514, 62.0
    ),
    Published("8B, 64 A100", A100, "a100-80g", 64, _8b(1, "eager"), 2973, None),
    Published("70B, 64 A100, full AC", A100, "a100-80g", 64, _70B, 331, None),
    Published("DeepSeek 16B, 8 B200", TITAN_3816, "b200", 8, _DEEPSEEK_16B, 17_500, None),
    Published("Qwen3 30B-A3B, 8 B200", PITH_79, "b200", 8, _QWEN3_30B, 19_500, 141.8),
)


def predict(run: Published) -> Plan:
    """The plan of a published run."""
    flags = tuple("eager" if word == "inductor" else word for word in run.flags)
    eager, compiled = _planned(flags, run.ranks, run.hardware)
    return eager if flags == run.flags else compiled


@cache
def _planned(flags: tuple[str, ...], ranks: int, hardware: str) -> tuple[Plan, Plan]:
    """The plan of an eager run, and that of the same graph compiled, captured once."""
    config = load_config(list(flags), world_size=ranks)
    plan = make_plan(config, ranks, load_hardware(hardware), runtime=TORCHTITAN, every_pass=False)
    state = plan.simulation.memory.by_category[Category.OPTIMIZER_STATE][0]
    simulation = simulate(
        plan.simulation.joint,
        plan.hardware,
        OtherMemory(optimizer_bytes=state, fused=True),
        TORCHTITAN,
    )
    return plan, replace(plan, simulation=simulation, need=simulation.need())


def compare(run: Published) -> dict[str, Any]:
    """What was published, what is predicted, and their ratios."""
    plan = predict(run)
    memory = plan.need.allocated / GIB
    return {
        "run": run.name,
        "source": run.source,
        "published_tokens_per_second": run.tokens_per_second,
        "predicted_tokens_per_second": plan.tokens_per_second_per_gpu,
        "tokens_ratio": plan.tokens_per_second_per_gpu / run.tokens_per_second,
        "published_gib": run.memory_gib,
        "predicted_gib": memory,
        "memory_ratio": None if run.memory_gib is None else memory / run.memory_gib,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", help="only the runs whose names contain one of these")
    wanted = parser.parse_args(argv).runs
    rows = [
        compare(run) for run in RUNS if wanted is None or any(text in run.name for text in wanted)
    ]
    print(f"{'run':<24}{'tok/s/GPU':>11}{'predicted':>11}{'ratio':>7}", end="")
    print(f"{'GiB':>8}{'predicted':>11}{'ratio':>7}")
    for row in rows:
        memory = (
            f"{row['published_gib']:>8.1f}{row['predicted_gib']:>11.1f}{row['memory_ratio']:>7.2f}"
            if row["published_gib"]
            else f"{'-':>8}{row['predicted_gib']:>11.1f}{'':>7}"
        )
        print(
            f"{row['run']:<24}{row['published_tokens_per_second']:>11,}"
            f"{row['predicted_tokens_per_second']:>11,.0f}{row['tokens_ratio']:>7.2f}{memory}"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
