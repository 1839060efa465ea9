"""Backends "regional" and "inductor" on the debug model: compiling, step, memory, collectives.

    python -m benchmarks.regional                   # 6 and 24 layers on 4 fake ranks, minutes
    python -m benchmarks.regional --layers 2 --compare-layers 2 --steps 3

Each compilation is a process with an empty cache of its own, in turn. The steps of both backends
run in one process, in turn; nothing is communicated, since the other ranks are fake.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BACKENDS = ("inductor", "regional")
_MIB = 1024**2


def main() -> None:
    """Compile at each depth, compare the steps, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--compare-layers", type=int, default=6, help="of the steps compared")
    parser.add_argument("--fsdp", type=int, default=4)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--whole", type=int, default=6, help="most layers compiled as a whole")
    parser.add_argument("--json", help="write the results to this file as well")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child = json.loads(arguments.child)
        print(json.dumps(CHILDREN[child["what"]](child)))
        return
    wanted = vars(arguments)
    compiled = [
        in_a_process({**wanted, "what": "compile", "layers": layers, "backend": backend})
        for layers in arguments.layers
        for backend in BACKENDS
        if backend == "regional" or layers <= arguments.whole
    ]
    step = in_a_process({**wanted, "what": "step", "layers": arguments.compare_layers})
    results = {"cores": os.cpu_count(), "compiled": compiled, "step": step}
    print_tables(results)
    text = json.dumps(results)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text)


def in_a_process(wanted: dict[str, Any]) -> dict[str, Any]:
    """Run one of CHILDREN in a process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.regional", "--child", json.dumps(wanted)],
            capture_output=True,
            text=True,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder},
        )
    if done.returncode:
        raise SystemExit(f"{wanted} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def captured(wanted: dict[str, Any]) -> tuple[Any, tuple[torch.Tensor, ...], Any]:
    """The model with values on the CPU, a batch, and its graph after the default passes."""
    import graph_trainer as gt
    from benchmarks.fake_llama import Case, prepare
    from graph_trainer.titan.step_inputs import loss_of_batch, passes_of

    fields = ("layers", "fsdp", "tp", "batch", "sequence")
    case = Case(config="debugmodel", **{key: wanted[key] for key in fields})
    prepared = prepare(case, "ours")
    model: Any = prepared.model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    shape = (wanted["batch"], wanted["sequence"])
    tokens = torch.randint(0, 2048, (2, *shape))
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    batch = (tokens[0], tokens[1], torch.tensor(tokens[0].numel()), positions)
    loss = loss_of_batch(prepared.loss_fn)

    def of_batch(model: Any, *given: torch.Tensor) -> torch.Tensor:
        return loss(model, *given[:3], positions=given[3])

    joint = gt.capture(model, of_batch, batch)
    gt.run_passes(joint, passes_of(prepared.config, prepared.parallel_dims))
    return model, batch, joint


def compile_alone(wanted: dict[str, Any]) -> dict[str, Any]:
    """Seconds that one backend takes to compile, on the clock and of all cores."""
    import graph_trainer as gt

    _, _, joint = captured(wanted)
    start, spent = time.perf_counter(), cpu_seconds()
    gt.compile(joint, backend=wanted["backend"], compare_ranks=False)
    return {
        "layers": wanted["layers"],
        "backend": wanted["backend"],
        "seconds": time.perf_counter() - start,
        "cpu_seconds": cpu_seconds() - spent,
        "nodes": len(joint.graph.nodes),
    }


def cpu_seconds() -> float:
    """CPU seconds of this process, Inductor's workers and the compilers that they ran."""
    own = psutil.Process()
    return sum(sum(p.cpu_times()[:4]) for p in (own, *own.children(recursive=True)))


def kind_of(op: Any) -> str:
    """The collective's name; Inductor calls the variants that write into a buffer of its own."""
    return str(op._schema.name).split("::")[1].removesuffix("_out").removesuffix("_")


class Issued(TorchDispatchMode):
    """Notes the collectives and waits of a step, with the shapes that they take."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "_c10d_functional":
            self.calls.append((kind_of(op), tuple(args[0].shape)))
        return op(*args, **(kwargs or {}))


def steps(wanted: dict[str, Any]) -> dict[str, Any]:
    """Both backends' steps in turn, their peaks, and whether they issue what the graph has."""
    import graph_trainer as gt
    from graph_trainer.core.analysis.lifetimes import live_bytes
    from graph_trainer.core.graph.annotations import tensor_of
    from graph_trainer.core.graph.ops import is_collective, is_wait
    from graph_trainer.core.simulation.hardware import load_hardware
    from graph_trainer.core.simulation.simulate import OtherMemory, predicted_memory

    model, batch, joint = captured(wanted)
    in_graph = [
        (kind_of(node.target), tuple(tensor_of(node.all_input_nodes[0]).shape))
        for node in joint.graph.nodes
        if is_collective(node) or is_wait(node)
    ]
    compiled = {b: gt.compile(joint, backend=b, compare_ranks=False) for b in BACKENDS}
    rows: dict[str, Any] = {}
    for name, step in compiled.items():
        step(model, *batch)
        with Issued() as issued:
            step(model, *batch)
        other = OtherMemory(fused=True, in_regions=name == "regional")
        memory = predicted_memory(joint, load_hardware("cpu"), other)
        spans = ((s.born, s.last, s.bytes) for s in memory.storages)
        rows[name] = {
            "order": issued.calls == in_graph,
            "predicted_bytes": max(live_bytes(len(memory.total), spans)),
            "peak_bytes": peak_of(lambda step=step: step(model, *batch)),
        }
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for turn in range(wanted["steps"]):
        for name in BACKENDS if turn % 2 else BACKENDS[::-1]:
            start = time.perf_counter()
            compiled[name](model, *batch)
            seconds[name].append(time.perf_counter() - start)
    for name in BACKENDS:
        rows[name]["step_seconds"] = statistics.median(seconds[name])
    pairs = zip(seconds["regional"], seconds["inductor"], strict=True)
    return {**rows, "ratio": statistics.median(own / whole for own, whole in pairs)}


def peak_of(run: Any) -> int:
    """The most bytes that a call allocates at once, by the profiler's record of the allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    alive = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak


CHILDREN = {"compile": compile_alone, "step": steps}


def print_tables(results: dict[str, Any]) -> None:
    """What compiling costs at each depth, and how the steps compare."""
    print(f"Llama 3 debug model on fake ranks; {results['cores']} cores")
    print(f"{'backend':<10}{'layers':>7}{'nodes':>8}{'compile s':>11}{'CPU s':>8}")
    for row in results["compiled"]:
        print(
            f"{row['backend']:<10}{row['layers']:>7}{row['nodes']:>8,}{row['seconds']:>11.1f}"
            f"{row['cpu_seconds']:>8.1f}"
        )
    step = results["step"]
    print(f"{'backend':<10}{'ms a step':>10}{'peak MiB':>10}{'predicted':>10}{'order':>8}")
    for name in BACKENDS:
        row = step[name]
        order = "graph's" if row["order"] else "other"
        print(
            f"{name:<10}{1e3 * row['step_seconds']:>10.0f}{row['peak_bytes'] / _MIB:>10.1f}"
            f"{row['predicted_bytes'] / _MIB:>10.1f}{order:>8}"
        )
    print(f"regional: {step['ratio']:.2f} times the seconds of inductor's step")


if __name__ == "__main__":
    main()
