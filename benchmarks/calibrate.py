"""A calibrated profile on real CPU ranks: predicted step times beside measured ones.

    python -m benchmarks.calibrate                 # two gloo ranks, about fifteen minutes

Three configs are measured op by op, as `graph-trainer calibrate --measure` does. The profile that
follows predicts the step of ten other configs, which train for some steps; the median step counts.
All have two ranks, one core each where no other process takes it: a profile holds for as many ranks
on as many cores as were measured, and for as many other processes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.planner.calibration import Calibrated, Samples, calibrated
from graph_trainer.planner.captures import Captures
from graph_trainer.planner.measure_ranks import Job, measure
from graph_trainer.planner.measured_calls import collective_calls, op_calls
from graph_trainer.planner.plan import Plan, make_plan
from graph_trainer.titan.config.load import load_config

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
_SAME = ("--training.mixed_precision_param", "float32", "--metrics.log_freq", "1000000")
# float32: a CPU without instructions for bfloat16 multiplies some layouts 30 times slower
_TENSOR = ("--parallelism.tensor_parallel_degree", "2")
_CONTEXT = ("--parallelism.context_parallel_degree", "2")
_REPLICATE = (
    *("--parallelism.data_parallel_replicate_degree", "2"),
    *("--parallelism.data_parallel_shard_degree", "1"),
)
_EXPERTS = (
    *("--module", "graph_trainer.deepseek_v3"),
    *("--parallelism.expert_parallel_degree", "2"),
)


def _config(name: str, batch: int, sequence: int, *flags: str) -> tuple[str, list[str]]:
    """Return the name and the flags of a debug model."""
    sizes = ["--training.local_batch_size", str(batch), "--training.seq_len", str(sequence)]
    return f"{name}, {batch} x {sequence}", ["--config", "debugmodel", *flags, *_SAME, *sizes]


CALIBRATED = (
    _config("fsdp 2", 4, 256),
    _config("tp 2", 4, 256, *_TENSOR),
    _config("ep 2", 2, 128, *_EXPERTS),
)
PREDICTED = (
    _config("fsdp 2", 2, 256),
    _config("fsdp 2", 8, 128),
    _config("fsdp 2", 2, 512),
    _config("fsdp 2, full AC", 4, 256, "--activation_checkpoint.type", "full"),
    _config(
        "fsdp 2, selective AC, always",
        *(4, 256, "--activation_checkpoint.type", "selective"),
        *("--parallelism.fsdp_reshard_after_forward", "always"),
    ),
    _config("ddp 2", 4, 128, *_REPLICATE),
    _config("tp 2", 8, 128, *_TENSOR),
    _config("tp 2", 2, 512, *_TENSOR),
    _config("cp 2", 2, 512, *_CONTEXT),
    _config("ep 2", 4, 128, *_EXPERTS),
)


def main() -> None:
    """Measure, calibrate and predict; print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=7, help="timed steps of a config")
    parser.add_argument("--seconds", type=float, default=90.0, help="for the ops of one config")
    parser.add_argument("--json", help="write the results to this file as well")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result, plans = calibrate(arguments.seconds)
    steps = launch(arguments.steps)
    rows = []
    for (name, flags), seconds in zip(PREDICTED, steps, strict=True):
        before = predict(flags, load_hardware("cpu"), plans)
        after = predict(flags, result.hardware, plans)
        rows.append(
            {
                "config": name,
                "measured": statistics.median(seconds),
                "steps": seconds,
                "before": before.step_seconds,
                "after": after.step_seconds,
            }
        )
    results = {"date": datetime.date.today().isoformat(), "rows": rows, **summary(rows)}
    record = result.hardware.calibration
    assert record is not None
    results["calibration"] = {"samples": record.samples, "spread": record.spread}
    print_table(results)
    text = json.dumps(results)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text)


def calibrate(seconds: float) -> tuple[Calibrated, Captures]:
    """Measure the three configs, and fit one profile to all samples."""
    base, samples, captures = load_hardware("cpu"), Samples(), Captures(most=20)
    for name, flags in CALIBRATED:
        plan = predict(flags, base, captures)
        issued, _ = collective_calls(plan.simulation, RANKS, 200)
        ops = op_calls(plan.simulation, base, 200)
        job = Job(ops, issued, "cpu", RANKS, seconds)
        measured, failed = measure(job, lambda line, name=name: progress(f"{name}: {line}"))
        for line in failed:
            progress(f"{name}: not measured: {line}")
        samples.ops += measured.ops
        samples.collectives += measured.collectives
        samples.launches += measured.launches
        samples.overlaps += measured.overlaps
        for key, values in measured.host.items():
            samples.host.setdefault(key, []).extend(values)
    today = datetime.date.today().isoformat()
    return calibrated(base, samples, device_name="CPU", date=today), captures


def predict(flags: list[str], hardware: Any, captures: Captures) -> Plan:
    """Plan a config on some hardware."""
    config = load_config(flags, world_size=RANKS, reads_text=False)
    config.compile = replace(config.compile, hardware="cpu")
    return make_plan(config, RANKS, hardware, every_pass=False, captures=captures)


def launch(steps: int) -> list[list[float]]:
    """Train all configs in one launch; return the seconds of their steps, of the slower rank."""
    plan = {"configs": [flags for _, flags in PREDICTED], "warmup": 2, "steps": steps}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "plan.json"
        path.write_text(json.dumps(plan))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(RANKS), "-m", "benchmarks.calibrate_worker", str(path)]
        log = Path(name) / "log"
        progress(f"training {len(PREDICTED)} configs for {steps + 2} steps")
        with log.open("w") as output:
            done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode:
            raise SystemExit(f"the ranks failed:\n{log.read_text()[-6000:]}")
        ranks = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return [
        [max(pair) for pair in zip(*of_config, strict=True)]
        for of_config in zip(*ranks, strict=True)
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Typical error of step time, and rank correlation, before and after."""
    results: dict[str, Any] = {}
    for side in ("before", "after"):
        logs = [abs(math.log(row[side] / row["measured"])) for row in rows]
        results[f"error_{side}"] = math.exp(statistics.median(logs)) - 1
        results[f"worst_{side}"] = math.exp(max(logs)) - 1
        predicted, measured = [row[side] for row in rows], [row["measured"] for row in rows]
        results[f"rank_correlation_{side}"] = float(spearmanr(predicted, measured).statistic)
    return results


def print_table(results: dict[str, Any]) -> None:
    """Print measured and predicted step times, and their ratio."""
    heading = ("measured ms", "before ms", "x", "after ms", "x")
    print(f"{'config':<34}" + "".join(f"{text:>12}" for text in heading))
    for row in results["rows"]:
        measured = row["measured"]
        numbers = f"{measured * 1e3:>12.0f}"
        for side in ("before", "after"):
            numbers += f"{row[side] * 1e3:>12.0f}{row[side] / measured:>12.2f}"
        print(f"{row['config']:<34}{numbers}")
    for side in ("before", "after"):
        print(
            f"{side}: median error {results[f'error_{side}']:.0%}, worst "
            f"{results[f'worst_{side}']:.0%}, rank correlation "
            f"{results[f'rank_correlation_{side}']:.2f}"
        )


def progress(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
