"""A train step on real CPU ranks: ours, the same model eagerly, and the peer, in one launch.

    python -m benchmarks.step                                  # eight ranks, minutes
    python -m benchmarks.step --fsdp 2 --tp 1 --variants eager never --rounds 2

All variants live in the same processes and step in turns, in another order each round, so that
all meet the same machine. A ratio is to the eager step of the same round: the median of a rank's
rounds, then the mean over the ranks. "eager" is torchtitan's loop on the model as graph_trainer
shards it; the others name the reshard policy, with the default passes. "plain" merges nothing and
waits for each collective in place, "auto" merges as much as the profile of a CPU asks for. All
talk over the ordered_gloo of `cpu_backend`, those with "gloo" over torch's own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("never", "default", "always")
WAYS = ("plain", "auto", "regional", "gloo")
VARIANTS = (
    "eager",
    "eager gloo",
    *POLICIES,
    *(f"{policy} {way}" for way in WAYS for policy in POLICIES),
    *(f"peer {policy}" for policy in POLICIES),
    *(f"peer {policy} gloo" for policy in POLICIES),
)
_MAY_CRASH = tuple(f"{policy} gloo" for policy in POLICIES)
"""Several gathers in flight on torch's gloo: see docs/troubleshooting.md."""
PARTS = ("compute", "gloo", "python", "clip", "optimizer", "rest")
HEADINGS = {"optimizer": "optim"}
_MIB = 1024**2


def main() -> None:
    """Launch the ranks, print tables and one line of JSON."""
    arguments = parse()
    results = measure_all(arguments)
    print_tables(results)
    text = json.dumps(results)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="debugmodel", help="a shipped config")
    parser.add_argument("--fsdp", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument(
        "--variants",
        choices=VARIANTS,
        nargs="+",
        default=[
            v
            for v in VARIANTS
            if v not in _MAY_CRASH and not {"default", "regional"} & {*v.split()}
        ],
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for all")
    parser.add_argument("--json", help="write the results to this file as well")
    return parser.parse_args()


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Launch the ranks and put together what they saw."""
    flags = {
        "--config": arguments.config,
        "--training.local_batch_size": arguments.batch,
        "--training.seq_len": arguments.sequence,
        "--parallelism.data_parallel_shard_degree": arguments.fsdp,
        "--parallelism.tensor_parallel_degree": arguments.tp,
        "--metrics.log_freq": 1_000_000,
    }
    plan = {
        "flags": [str(word) for flag in flags.items() for word in flag],
        "variants": arguments.variants,
        "warmup": arguments.warmup,
        "rounds": arguments.rounds,
    }
    ranks = launch(plan, arguments.fsdp * arguments.tp, arguments.timeout)
    keys = ("config", "fsdp", "tp", "batch", "sequence", "rounds")
    return {
        "case": {key: getattr(arguments, key) for key in keys},
        "cores": os.cpu_count(),
        "variants": {name: summary(name, ranks) for name in arguments.variants},
    }


def launch(plan: dict[str, Any], ranks: int, timeout: float) -> list[dict[str, Any]]:
    """Run the worker on CPU ranks of this machine; what each of them wrote."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "plan.json"
        path.write_text(json.dumps(plan))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(ranks), "-m", "benchmarks.step_worker", str(path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        log = Path(name) / "log"
        with log.open("w") as output:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            )
        if done.returncode:
            raise SystemExit(f"the ranks failed:\n{log.read_text()[-6000:]}")
        return [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(ranks)]


def summary(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One variant: what its step costs, and where that goes, as the mean of all ranks."""
    mine = [rank[name] for rank in ranks]
    seconds = {
        part: statistics.fmean(statistics.median(r["seconds"][part]) for r in mine)
        for part in mine[0]["seconds"]
    }
    result: dict[str, Any] = {
        "step_seconds": seconds["step"],
        "main_thread_cpu_seconds": seconds["main_cpu"],
        "other_threads_cpu_seconds": seconds["all_cpu"] - seconds["main_cpu"],
        "shares": shares(seconds, [r["profile"] for r in mine]),
        **mine[0]["memory"],
    }
    if "eager" in ranks[0]:
        result["times_eager"] = statistics.fmean(times_eager(name, rank) for rank in ranks)
    return result


def times_eager(name: str, rank: dict[str, Any]) -> float:
    """How much faster than eager one rank saw a variant: the median over its rounds."""
    steps = (rank[variant]["seconds"]["step"] for variant in ("eager", name))
    return statistics.median(eager / own for eager, own in zip(*steps, strict=True))


def shares(seconds: dict[str, float], profiles: list[dict[str, float]]) -> dict[str, float]:
    """Where the wall time of a step goes, parts of 1.

    What is outside of forward and backward comes from the timed steps, the division within from
    a profiled one: kernels, starting and waiting for collectives, and the rest, which is Python.
    """
    step = seconds["step"]
    inside = {p: statistics.fmean(r[p] for r in profiles) for p in ("compute", "gloo")}
    profiled = statistics.fmean(r["forward_backward"] for r in profiles)
    of_step = seconds["forward_backward"] / step
    found = {part: value / profiled * of_step for part, value in inside.items()}
    found["python"] = of_step - sum(found.values())
    found |= {part: seconds[part] / step for part in ("clip", "optimizer")}
    return {**found, "rest": 1 - sum(found.values())}


def print_tables(results: dict[str, Any]) -> None:
    """The variants: how fast, where the time goes, what they hold."""
    case = results["case"]
    print(
        f"Llama 3 {case['config']}, {case['fsdp'] * case['tp']} ranks ({case['fsdp']} x "
        f"{case['tp']}), local batch {case['batch']}, sequence {case['sequence']}, "
        f"{case['rounds']} rounds; {results['cores']} cores"
    )
    print(
        f"{'variant':<18}{'ms a step':>10}{'x eager':>8}"
        + "".join(f"{HEADINGS.get(part, part):>8}" for part in PARTS)
        + f"{'CPU ms':>8}{'+ gloo':>8}"
    )
    for name, row in results["variants"].items():
        ratio = f"{row['times_eager']:.2f}" if "times_eager" in row else "-"
        print(
            f"{name:<18}{1e3 * row['step_seconds']:>10.0f}{ratio:>8}"
            + "".join(f"{row['shares'][part]:>8.0%}" for part in PARTS)
            + f"{1e3 * row['main_thread_cpu_seconds']:>8.0f}"
            + f"{1e3 * row['other_threads_cpu_seconds']:>8.0f}"
        )
    print(
        f"{'':<18}{'nodes':>8}{'collectives':>13}{'live MiB':>10}{'predicted MiB':>15}  transport"
    )
    for name, row in results["variants"].items():
        transport = "gloo" if "gloo" in name else "ordered_gloo"
        if "nodes" in row:
            print(
                f"{name:<18}{row['nodes']:>8,}{row['collectives']:>13}"
                f"{row['live_bytes'] / _MIB:>10.1f}{row['predicted_bytes'] / _MIB:>15.1f}"
                f"  {transport}"
            )
        else:
            print(f"{name:<18}{'':>46}  {transport}")


if __name__ == "__main__":
    main()
