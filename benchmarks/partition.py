"""A step partitioned, then compiled by torch.compile: is the second partition the first one?

    python -m benchmarks.partition                      # Llama 3 8B on 16 x 8 ranks, minutes
    python -m benchmarks.partition --config debugmodel --layers 2 --fsdp 2 --tp 2 --sequence 64

One process is rank 0 of as many fake ranks, and the model is on meta: AOTAutograd traces and
partitions, and no kernel is compiled. "first" is `gt.partition`; "tags" and "min_cut" are what
`gt.ExportedStep` makes of it; "again" is `torch.compile` with `gt.backend`, "untagged" the same
with PyTorch's partitioner and no tags. "plain" neither merges nor moves collectives. Peaks are
measured on each pair of graphs, beside parameters and batch.
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
from benchmarks.halves import peaks_of  # noqa: E402
from graph_trainer.core.analysis.lifetimes import bytes_kept  # noqa: E402
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
    parser.add_argument("--reshard", default="always", help="fsdp_reshard_after_forward")
    parser.add_argument("--partitions", nargs="+", default=["tags", "min_cut"])
    return parser.parse_args()


def main() -> None:
    """Measure every variant, print a table and one line of JSON."""
    arguments = parse()
    rows = [row for name in arguments.variants for row in measure(arguments, name)]
    ranks = arguments.fsdp * arguments.tp
    print(
        f"Llama 3 {arguments.config}, {arguments.layers} layers, {ranks} fake ranks "
        f"({arguments.fsdp} x {arguments.tp}),\nlocal batch {arguments.batch}, sequence "
        f"{arguments.sequence}, reshard {arguments.reshard}, activations {arguments.activations}"
    )
    print(
        f"{'passes':<9}{'partition':<10}{'gathers fwd':>12}{'bwd':>6}{'saved GiB':>11}"
        f"{'peak fwd':>10}{'bwd':>8}{'nodes':>9}{'seconds':>9}"
    )
    for row in rows:
        peaks = [f"{peak / GIB:.2f}" for peak in row["peaks"]]
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
    passes = passes_of_variant(variant, arguments.reshard, load_hardware("h100-sxm"))
    policy = rank.pass_config().activation_policy
    gt.run_passes(joint, replace(passes, activation_policy=policy))
    start = time.perf_counter()
    step = gt.partition(joint, compare_ranks=False)
    halves = step.halves
    graphs = halves.forward.graph_module, halves.backward.graph_module
    first = describe(*graphs, halves.saved_bytes())
    seconds = time.perf_counter() - start
    rows = [{"partition": "first", **first, "peaks": peaks_of(*graphs), "seconds": seconds}]
    args, kwargs = rank.batch()
    for name in arguments.partitions:
        start = time.perf_counter()
        compile_again = exported if name in ("tags", "min_cut") else compiled
        rows.append({"partition": name, **compile_again(step, name, args, kwargs)})
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


def exported(step: Any, partition: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Partition AOTAutograd's joint graph of the step, and describe the two graphs."""
    seen: list[dict[str, Any]] = []
    with gt.ExportedStep(step, *args, **kwargs) as joint:
        joint.refresh()
        joint.remove_unused_waits()
        joint.compile(partition=partition, on_partition=lambda *g: seen.append(second(*g)))
    return seen[0]


def compiled(step: Any, partition: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Compile with `torch.compile`, run forward, and describe what was partitioned."""
    seen: list[dict[str, Any]] = []
    backend = gt.backend("eager", on_partition=lambda *graphs: seen.append(second(*graphs)))
    if partition == "untagged":
        backend._repartition = standard_partition
    torch.compiler.reset()
    torch.compile(step, backend=backend)(*args, **kwargs)
    return seen[0]


def second(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[str, Any]:
    """Describe the two graphs of a second partition."""
    taken = {n.name for n in backward.graph.find_nodes(op="placeholder")}
    returned = forward.graph.output_node().all_input_nodes
    kept = bytes_kept(forward.graph, [n for n in returned if n.name in taken])
    return {**describe(forward, backward, kept), "peaks": peaks_of(forward, backward)}


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
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return sum("all_gather" in str(node.target) for node in calls)


if __name__ == "__main__":
    main()
