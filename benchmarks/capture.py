"""Capture and passes on fake ranks, ours and the peer's: seconds, nodes and predicted memory.

    python -m benchmarks.capture                       # Llama 3 8B on 16 x 8 ranks, minutes
    python -m benchmarks.capture --config debugmodel --layers 2 --fsdp 2 --tp 2 --sequence 64

Every measurement is a process of its own, and the two sides take turns, so that both meet the
same machine. Seconds are CPU seconds of the process: tracing runs on one thread, and other
processes on the machine count little in them (wall seconds are in the JSON). The garbage
collector is off, as torchtitan's trainer has it. "ours" runs our default passes, which merge and
schedule collectives as the peer's do; "plain" does neither.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POLICIES = ("always", "never")
SIDES = ("plain", "ours", "peer")


def main() -> None:
    """Measure every layer count and side, print tables and one line of JSON."""
    arguments = parse()
    if arguments.child:
        print(json.dumps(measure(json.loads(arguments.child))))
        return
    results = measure_all(arguments)
    print_tables(results)
    text = json.dumps(results)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="8b", help="a shipped config")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--fsdp", type=int, default=16)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=1, help="repetitions; the median counts")
    parser.add_argument("--json", help="write the results to this file as well")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """One row a layer count, policy and side, the sides in turn."""
    keys = ("config", "fsdp", "tp", "batch", "sequence")
    case = {key: getattr(arguments, key) for key in keys}
    rows: list[dict[str, Any]] = []
    for layers in arguments.layers:
        for policy in arguments.policies:
            runs: dict[str, list[dict[str, Any]]] = {side: [] for side in arguments.sides}
            for _ in range(arguments.rounds):
                for side in arguments.sides:
                    wanted = {**case, "layers": layers, "policy": policy, "side": side}
                    runs[side].append(in_a_process(wanted))
            rows += [median(several) for several in runs.values()]
    return {"case": case, "cores": os.cpu_count(), "rows": rows}


def in_a_process(wanted: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.capture", "--child", json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{wanted} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The same measurement several times: medians of the numbers."""
    return {
        key: statistics.median(run[key] for run in runs) if isinstance(value, float) else value
        for key, value in runs[0].items()
    }


def measure(wanted: dict[str, Any]) -> dict[str, Any]:
    """Capture once, run the passes once."""
    from benchmarks.fake_llama import Case, prepare

    fields = {f.name for f in dataclasses.fields(Case)}
    prepared = prepare(
        Case(**{key: value for key, value in wanted.items() if key in fields}),
        "peer" if wanted["side"] == "peer" else "ours",
    )
    gc.collect()
    gc.disable()
    clock = Clock()
    if wanted["side"] == "peer":
        graph = peer(prepared, clock)
    else:
        graph = ours(prepared, clock, "plain" if wanted["side"] == "plain" else "default")
    return {**wanted, **clock.seconds, **graph}


class Clock:
    """Wall and CPU seconds of the stages of a measurement."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter(), time.process_time()

    def lap(self, stage: str) -> None:
        """Note what passed since the last lap as `stage`."""
        now = time.perf_counter(), time.process_time()
        self.seconds[f"{stage}_wall_seconds"] = now[0] - self._start[0]
        self.seconds[f"{stage}_seconds"] = now[1] - self._start[1]
        self._start = now


def ours(prepared: Any, clock: Clock, variant: str) -> dict[str, int]:
    """graph_trainer: its report's measuring after every pass counts as passes too."""
    import graph_trainer as gt
    from benchmarks.simulated import passes_of_variant
    from graph_trainer.core.simulation.hardware import load_hardware
    from graph_trainer.titan.step_inputs import loss_of_batch

    loss_fn = loss_of_batch(prepared.loss_fn)
    *batch, positions = prepared.batch()
    policy = prepared.config.parallelism.fsdp_reshard_after_forward
    passes = passes_of_variant(variant, policy, load_hardware("h100-sxm"))
    clock.lap("loading")
    joint = gt.capture(prepared.model, loss_fn, batch, {"positions": positions})
    clock.lap("capture")
    nodes = len(joint.graph.nodes)
    report = gt.run_passes(joint, passes)
    clock.lap("passes")
    return summary(nodes, joint, report.last.peak_bytes)


def peer(prepared: Any, clock: Clock) -> dict[str, int]:
    """torchtitan.experiments.graph_trainer, with its default passes as far as they run here."""
    from benchmarks.peer import peer_on_cpu, run_passes_of_peer, trace_of_peer
    from graph_trainer.core.analysis.lifetimes import lifetimes
    from graph_trainer.core.graph.joint_graph import JointGraph
    from graph_trainer.core.graph.signature import Signature

    with peer_on_cpu():
        traced = trace_of_peer(prepared)
        clock.lap("capture")
        nodes = len(traced.gm.graph.nodes)
        module = run_passes_of_peer(traced, prepared)
        clock.lap("passes")
    joint = JointGraph(module, Signature((), ()))
    return summary(nodes, joint, lifetimes(joint).peak_bytes)


def summary(nodes: int, joint: Any, peak_bytes: int) -> dict[str, int]:
    """What a graph is like before and after passes."""
    from graph_trainer.core.graph.ops import is_collective

    return {
        "captured_nodes": nodes,
        "nodes": len(joint.graph.nodes),
        "collectives": sum(map(is_collective, joint.graph.nodes)),
        "peak_bytes": peak_bytes,
    }


def print_tables(results: dict[str, Any]) -> None:
    """A line for each layer count, ours and the peer's."""
    case = results["case"]
    print(
        f"Llama 3 {case['config']}, {case['fsdp'] * case['tp']} fake ranks "
        f"({case['fsdp']} x {case['tp']}), local batch {case['batch']}, "
        f"sequence {case['sequence']}; {results['cores']} cores"
    )
    print(
        f"{'layers':>6} {'reshard':<8}{'':<8}{'capture s':>10}{'ms/layer':>10}{'passes s':>10}"
        f"{'nodes':>9}{'after':>9}{'collectives':>13}{'peak GiB':>10}"
    )
    for row in results["rows"]:
        print(
            f"{row['layers']:>6} {row['policy']:<8}{row['side']:<8}{row['capture_seconds']:>10.1f}"
            f"{1e3 * row['capture_seconds'] / row['layers']:>10.0f}{row['passes_seconds']:>10.1f}"
            f"{row['captured_nodes']:>9,}{row['nodes']:>9,}{row['collectives']:>13,}"
            f"{row['peak_bytes'] / 1024**3:>10.2f}"
        )
    for own, peers in pairs(results["rows"]):
        ratios = [
            f"{stage} {peers[f'{stage}_seconds'] / own[f'{stage}_seconds']:.2f} x as fast"
            for stage in ("capture", "passes")
        ]
        print(f"{own['layers']} layers, {own['policy']}, {own['side']}: {', '.join(ratios)}")


def pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row of ours with the peer's of the same case, where there is one."""
    peers = {(row["layers"], row["policy"]): row for row in rows if row["side"] == "peer"}
    return [
        (row, peers[case])
        for row in rows
        if row["side"] != "peer" and (case := (row["layers"], row["policy"])) in peers
    ]


if __name__ == "__main__":
    main()
