"""One device: step time, peak memory and MFU of eager, torch.compile and the joint graph.

    python -m benchmarks.gpu                  # about 1B parameters, on a GPU
    python -m benchmarks.gpu --size 8b        # blocks of Llama 3 8B: eight, or --blocks
    python -m benchmarks.gpu --size tiny      # anywhere
    benchmarks/gpu.sh                         # the tests of the core with CUDA's, and all sizes

Uses the core only (torch 2.13 or newer, tomli, no torchtitan). All variants run the same weights in
bf16, kept in fp32, on the same batch in one process. All are prepared first and then step in
turns, in another order each round; a ratio is the median over the rounds of eager's seconds to
the variant's. Peak memory is that of one more step each. Eager and torch.compile run the plain
model, which suits them best; the joint graphs run it sharded by simple_fsdp over a group of one.
"joint, eager" is first compared bitwise with eager, both by deterministic kernels: cuDNN's
attention on Hopper gives other bits each time. The joint graphs have the default
passes, and beside what is measured stands what the simulator predicts for the device's profile.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from benchmarks.llama_stack import SIZES, LlamaStack, loss_fn
from benchmarks.turns import orders
from graph_trainer.core.analysis.memory import given_bytes
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.simulation.detect import detect_hardware
from graph_trainer.core.simulation.simulate import OtherMemory, simulate
from graph_trainer.core.units import GIB

# Dense bf16 peak of the tensor cores, FLOP/s, from NVIDIA's data sheets (without sparsity).
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}

VARIANTS = ("eager", "joint, eager", "torch.compile", "joint, inductor", "joint, regional")


def main() -> None:
    """Run every variant, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--blocks", type=int, help="instead of those of the size")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--variants", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--json", help="write the results to this file as well")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with_group_of_one(device)
    results = measure_all(arguments, device)
    print_table(results)
    text = json.dumps(results)
    print(text)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(text)
    dist.destroy_process_group()


def with_group_of_one(device: torch.device) -> None:
    """A process group of this process alone."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl" if device.type == "cuda" else gt.cpu_backend())


def measure_all(arguments: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Every variant on the same weights and the same batch."""
    size = SIZES[arguments.size]
    size = replace(size, layers=arguments.blocks or size.layers)
    torch.manual_seed(0)
    with device:
        plain = LlamaStack(size)
    model = copy.deepcopy(plain)
    dtypes = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    gt.simple_fsdp(model, init_device_mesh(device.type, (1,)), mp_policy=dtypes)
    tokens = torch.randint(size.vocabulary, (2, arguments.batch, arguments.sequence), device=device)
    batch = (tokens[0], tokens[1])

    hardware = detect_hardware(device).hardware
    predicted: dict[str, dict[str, float]] = {}

    def joint(backend: str) -> Callable[[], object]:
        graph = gt.capture(model, loss_fn, batch)
        gt.run_passes(graph, gt.PassConfig(reshard_after_forward="always"))
        step = gt.compile(graph, backend=backend)
        kind = find_backend(backend)
        other = OtherMemory(fused=kind.fuses_ops, in_regions=kind.compiles_regions)
        found = simulate(graph, hardware, other)
        predicted[f"joint, {backend}"] = {
            "predicted_seconds": found.timeline.step_seconds,
            "predicted_peak_gib": (found.memory.peak_bytes - given_bytes(graph, *InputKind)) / GIB,
        }
        return lambda: step(model, *batch)

    def loss_of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        cast = {name: p.to(torch.bfloat16) for name, p in parameters.items()}
        logits = torch.func.functional_call(plain, cast, batch[0])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())

    def autograd(loss: Callable[..., torch.Tensor]) -> Callable[[], object]:
        parameters = dict(plain.named_parameters())

        def run() -> object:
            value = loss(parameters)
            gradients = torch.autograd.grad(value, list(parameters.values()))
            return value, dict(zip(parameters, gradients, strict=True))

        return run

    variants: dict[str, Callable[[], Callable[[], object]]] = {
        "eager": lambda: autograd(loss_of),
        "joint, eager": lambda: joint("eager"),
        "torch.compile": lambda: autograd(torch.compile(loss_of)),
        "joint, inductor": lambda: joint("inductor"),
        "joint, regional": lambda: joint("regional"),
    }
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    torch.use_deterministic_algorithms(True)
    check_bitwise(variants["eager"]()(), variants["joint, eager"]()())
    torch.use_deterministic_algorithms(False)
    rows: dict[str, dict[str, float]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for name in VARIANTS:
        # eager runs in any case: it is what the others are compared with
        if name not in ("eager", *arguments.variants):
            continue
        prepare = variants[name]
        start = time.perf_counter()
        steps[name] = prepare()
        steps[name]()
        rows[name] = {"prepare_seconds": time.perf_counter() - start}
    gc.collect()
    for name, measured in measure(steps, arguments.steps, device).items():
        rows[name] |= measured | predicted.get(name, {})
    count = arguments.batch * arguments.sequence
    peak = next((v for k, v in PEAK_FLOPS.items() if k in device_name(device)), None)
    for row in rows.values():
        row["tokens_per_second"] = count / row["step_seconds"]
        if peak:
            row["mfu"] = row["tokens_per_second"] * size.flops_per_token(arguments.sequence) / peak
    return {
        "device": device_name(device),
        "hardware": hardware.name,
        "torch": torch.__version__,
        "size": arguments.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": arguments.batch,
        "sequence": arguments.sequence,
        "variants": rows,
    }


def check_bitwise(reference: object, result: object) -> None:
    """Stop the benchmark where the joint graph is not the same step."""
    (loss_a, grads_a), (loss_b, grads_b) = reference, result  # type: ignore[misc]
    assert torch.equal(loss_a, loss_b), (loss_a, loss_b)
    for name, gradient in grads_a.items():
        assert torch.equal(gradient, grads_b[name].to_local()), name


def measure(
    steps: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Of each step: median seconds and ratio to eager and, on a GPU, its own peak in GiB."""
    for step in steps.values():
        timed(step, device)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for names in orders(list(steps), rounds):
        for name in names:
            seconds[name].append(timed(steps[name], device))
    measured = {
        name: {
            "step_seconds": statistics.median(own),
            "ratio": statistics.median(e / o for e, o in zip(seconds["eager"], own, strict=True)),
        }
        for name, own in seconds.items()
    }
    if device.type == "cuda":
        for name, step in steps.items():
            measured[name]["peak_gib"] = peak_bytes(step) / GIB
    return measured


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of a step, until the device is done."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes that a step on a GPU holds above what was allocated before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def print_table(results: dict[str, object]) -> None:
    """The variants, one a line."""
    print(
        f"{results['device']}, torch {results['torch']}, {results['parameters']:,} parameters, "
        f"batch {results['batch']} x {results['sequence']}, profile {results['hardware']}"
    )
    print(
        f"{'variant':<18}{'ms a step':>10}{'predicted':>10}{'x eager':>9}{'peak GiB':>10}"
        f"{'predicted':>10}{'MFU':>7}{'prepare s':>11}"
    )
    for name, row in results["variants"].items():  # type: ignore[attr-defined]
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else "-"
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else "-"
        seconds = gib = "-"
        if "predicted_seconds" in row:
            seconds = f"{row['predicted_seconds'] * 1e3:.1f}"
            gib = f"{row['predicted_peak_gib']:.2f}"
        print(
            f"{name:<18}{row['step_seconds'] * 1e3:>10.1f}{seconds:>10}{row['ratio']:>9.2f}"
            f"{peak:>10}{gib:>10}{mfu:>7}{row['prepare_seconds']:>11.1f}"
        )


if __name__ == "__main__":
    main()
