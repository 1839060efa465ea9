"""A step partitioned, then compiled by torch.compile: is the second partition the first one?

    python -m benchmarks.partition                      # Llama 3 8B on 16 x 8 ranks, minutes
    python -m benchmarks.partition --config debugmodel --layers 2 --fsdp 2 --tp 2 --sequence 64

One process is rank 0 of as many fake ranks, and the model is on meta: AOTAutograd traces and
partitions, and no kernel is compiled. "first" is `gt.partition`, "again" what AOTAutograd makes of
it with `gt.backend`, "min-cut" what it makes with PyTorch's own partitioner. "plain" neither merges
nor moves collectives. Peaks are those of the graphs, beside parameters and batch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from benchmarks.simulated import passes_of_variant
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.torch_private_compile import standard_partition
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.device import setup

setup()  # before any torchtitan import

import graph_trainer as gt  # noqa: E402
from graph_trainer.core.analysis.lifetimes import bytes_kept  # noqa: E402
from graph_trainer.core.partition import backend as compile_backend  # noqa: E402
from graph_trainer.core.partition.again import partition_again  # noqa: E402
from graph_trainer.planner.fake_rank import FakeRank  # noqa: E402

GIB = 1024**3


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="8b", help="a shipped config")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--fsdp", type=int, default=16)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--activations", default="none", help="activation_checkpoint.type")
    parser.add_argument("--variants", nargs="+", default=["plain", "default"])
    parser.add_argument("--min-cut", action="store_true", help="PyTorch's partitioner as well")
    return parser.parse_args()


def main() -> None:
    """Measure every variant, print a table and one line of JSON."""
    arguments = parse()
    rows = [row for name in arguments.variants for row in measure(arguments, name)]
    ranks = arguments.fsdp * arguments.tp
    print(
        f"Llama 3 {arguments.config}, {arguments.layers} layers, {ranks} fake ranks "
        f"({arguments.fsdp} x {arguments.tp}), local batch {arguments.batch}, sequence "
        f"{arguments.sequence}"
    )
    print(
        f"{'passes':<9}{'partition':<10}{'gathers fwd':>12}{'bwd':>6}{'saved GiB':>11}"
        f"{'peak fwd':>10}{'bwd':>8}{'nodes':>9}{'seconds':>9}"
    )
    for row in rows:
        peaks = [f"{peak / GIB:.2f}" if peak else "" for peak in row["peaks"]]
        print(
            f"{row['passes']:<9}{row['partition']:<10}{row['forward_gathers']:>12}"
            f"{row['backward_gathers']:>6}{row['saved_bytes'] / GIB:>11.3f}{peaks[0]:>10}"
            f"{peaks[1]:>8}{row['nodes']:>9,}{row['seconds']:>9.1f}"
        )
    print(json.dumps(rows))


def measure(arguments: argparse.Namespace, variant: str) -> list[dict[str, Any]]:
    """Partition, then compile twice."""
    rank = fake_rank(arguments)
    joint = rank.capture()
    passes = passes_of_variant(variant, "always", load_hardware("h100-sxm"))
    policy = rank.pass_config().activation_policy
    gt.run_passes(joint, replace(passes, activation_policy=policy))
    start = time.perf_counter()
    step = gt.partition(joint, compare_ranks=False)
    halves = step.halves
    first = describe(
        halves.forward.graph_module, halves.backward.graph_module, halves.saved_bytes()
    )
    seconds = time.perf_counter() - start
    rows = [{"partition": "first", **first, "peaks": halves.peak_bytes(), "seconds": seconds}]
    partitions = {"again": partition_again} | (
        {"min-cut": standard_partition} if arguments.min_cut else {}
    )
    args, kwargs = rank.batch()
    for name, partition in partitions.items():
        start = time.perf_counter()
        rows.append({"partition": name, **compiled(step, partition, args, kwargs)})
        rows[-1]["seconds"] = time.perf_counter() - start
    return [{"passes": variant, **row} for row in rows]


def fake_rank(arguments: argparse.Namespace) -> FakeRank:
    """Rank 0 of the mesh, with the model on meta."""
    ranks = arguments.fsdp * arguments.tp
    os.environ.update(WORLD_SIZE=str(ranks), RANK="0", LOCAL_RANK="0", NGPU=str(ranks))
    config = load_config(
        [
            *("--config", arguments.config, "--comm.mode", "fake_backend"),
            *("--training.local_batch_size", str(arguments.batch)),
            *("--training.seq_len", str(arguments.sequence)),
            *("--parallelism.data_parallel_shard_degree", str(arguments.fsdp)),
            *("--parallelism.tensor_parallel_degree", str(arguments.tp)),
            *("--activation_checkpoint.type", arguments.activations),
        ],
        world_size=ranks,
    )
    spec = config.model_spec
    assert spec is not None
    spec.model.layers = spec.model.layers[: arguments.layers]
    return FakeRank(config, ranks)


def compiled(step: Any, partition: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Compile with a partitioner, run forward and backward, and describe what was partitioned."""
    seen: list[dict[str, Any]] = []

    def see(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        taken = {n.name for n in backward.graph.find_nodes(op="placeholder")}
        returned = forward.graph.output_node().all_input_nodes
        kept = bytes_kept(forward.graph, [n for n in returned if n.name in taken])
        seen.append({**describe(forward, backward, kept), "peaks": (0, 0)})

    before = compile_backend.partition_again
    compile_backend.partition_again = partition
    try:
        torch.compiler.reset()
        torch.compile(step, backend=gt.backend("eager", on_partition=see))(*args, **kwargs)
    finally:
        compile_backend.partition_again = before
    return seen[0]


def describe(forward: fx.GraphModule, backward: fx.GraphModule, saved: int) -> dict[str, Any]:
    """Gathers of each graph, and bytes saved."""
    return {
        "forward_gathers": gathers(forward),
        "backward_gathers": gathers(backward),
        "saved_bytes": saved,
        "nodes": len(forward.graph.nodes) + len(backward.graph.nodes),
    }


def gathers(module: fx.GraphModule) -> int:
    """Count the all-gathers of a graph, of parameters and of activations."""
    return sum("all_gather" in str(node.target) for node in module.graph.nodes)


if __name__ == "__main__":
    main()
