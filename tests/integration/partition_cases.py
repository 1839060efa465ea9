"""The debug model's step as one graph, partitioned, and compiled again, for test_partition.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

import graph_trainer as gt
from graph_trainer.core.analysis.lifetimes import bytes_kept
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective
from graph_trainer.core.partition.repartition import PARTITIONS, repartition, repartition_by_min_cut
from graph_trainer.core.training import step_cache
from graph_trainer.core.training.step_cache import TrainStep
from tests.integration.matrix import FP32, FSDP2, FSDP2_TP2, PARTITIONED, Flags
from tests.integration.recorded import EAGER, Recorded, differing

ALWAYS: Flags = {"parallelism.fsdp_reshard_after_forward": "always"}
MIN_CUT: Flags = {"compile.partition": "min_cut"}


def gathers(graph: fx.Graph) -> int:
    return sum("all_gather" in str(node.target) for node in graph.nodes if is_collective(node))


def run(folder: Path, _: str) -> dict[str, Any]:
    """Train eagerly, and in the three ways that a captured step runs."""
    flags = FSDP2 | FP32 | ALWAYS
    eager = Recorded(flags | EAGER, folder).run()
    joint = Recorded(flags, folder).run()
    partitioned = Recorded(flags | PARTITIONED, folder).run()
    first: list[tuple[int, int, int]] = []
    again: list[tuple[int, int, int]] = []

    once = TrainStep._partitioned

    def compiled_again(train_step: TrainStep, joint: JointGraph, *call: Any) -> Any:
        step = once(train_step, joint, *call)._step
        counts = [gathers(half.graph) for half in (step.halves.forward, step.halves.backward)]
        first.append((*counts, step.halves.saved_bytes()))
        compiled = torch.compile(step, backend=gt.backend("eager", on_partition=see))
        return step_cache._Partitioned(joint, step, compiled)

    def see(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        taken = {n.name for n in backward.graph.find_nodes(op="placeholder")}
        returned = forward.graph.output_node().all_input_nodes
        kept = bytes_kept(forward.graph, [n for n in returned if n.name in taken])
        again.append((gathers(forward.graph), gathers(backward.graph), kept))

    with mock.patch.object(TrainStep, "_partitioned", compiled_again):
        compiled = Recorded(flags | PARTITIONED, folder).run()
    runs = {"joint": joint, "partitioned": partitioned, "compiled": compiled}
    result = {
        "differing": {name: differing(eager, run) for name, run in runs.items()},
        "gradients": {name: len(run.gradients[0]) for name, run in runs.items()},
        "first": first,
        "again": again,
    }
    for trained in (eager, *runs.values()):
        trained.close()
    return result


def min_cut(folder: Path, policies: str) -> dict[str, Any]:
    """By policy: train eagerly, and in two graphs that PyTorch's partitioner made of AOTAutograd's;
    count the gathers of these, and of those that our cut of the same graph gives."""
    eager = Recorded(FSDP2_TP2 | FP32 | EAGER, folder).run()
    result = {each: _by_min_cut(folder, each, eager) for each in policies.split(",")}
    eager.close()
    return result


def _by_min_cut(folder: Path, reshard: str, eager: Recorded) -> dict[str, Any]:
    flags = FSDP2_TP2 | FP32 | {"parallelism.fsdp_reshard_after_forward": reshard}
    found: dict[str, tuple[int, ...]] = {}

    def both(joint: fx.GraphModule, inputs: Any, **rest: Any) -> Any:
        graph = fx.Graph()
        output = graph.output(graph.graph_copy(joint.graph, {}))
        output.meta.update(joint.graph.output_node().meta)
        copied = fx.GraphModule(joint, graph)
        for name, partition, module in (
            ("tags", repartition, copied),
            ("min_cut", repartition_by_min_cut, joint),
        ):
            halves = partition(module, inputs, **rest)
            found[name] = tuple(gathers(half.graph) for half in halves)
        return halves

    with mock.patch.dict(PARTITIONS, min_cut=both):
        trained = Recorded(flags | PARTITIONED | MIN_CUT, folder).run()
    model = trained.trainer.model_parts[0]
    halves = gt.partition(trained.joint(), model, compare_ranks=False).halves
    found["first"] = tuple(gathers(half.graph) for half in (halves.forward, halves.backward))
    result = {"differing": differing(eager, trained), "gathers": found}
    trained.close()
    return result
