"""What `python -m benchmarks.communication` measures of one case, within its process."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import graph_trainer as gt
from graph_trainer.core.analysis.collective_purpose import Traffic, data_parallel_groups, traffic_of
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.bucketing.bucket_collectives import BucketCollectivesOptions
from graph_trainer.core.passes.overlap.schedule_overlap import schedule_overlap
from graph_trainer.core.passes.overlap.scheduler import ScheduleOverlapOptions
from graph_trainer.core.passes.pipeline import run_before
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.hardware import Hardware, Protocol, load_hardware
from graph_trainer.core.simulation.simulate import OtherMemory, Simulation, simulate
from graph_trainer.core.simulation.timeline import describe_ranks
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.titan.config.load import load_config

from torchtitan.models.common import FusedQKVLinear, Linear, QKVLinear  # isort: skip


@dataclass(frozen=True, slots=True)
class Captured:
    """A case as captured, before any pass."""

    config: Any
    parallel_dims: Any
    joint: JointGraph


def captured_case(wanted: dict[str, Any]) -> Captured:
    """Be rank 0 of a case `config:fsdp:tp:batch` and capture its step."""
    name, fsdp, tensor, batch = wanted["case"].split(":")
    ranks = int(fsdp) * int(tensor)
    os.environ.update(WORLD_SIZE=str(ranks), RANK="0", LOCAL_RANK="0", NGPU=str(ranks))
    config = load_config(
        [
            *("--config", name, "--comm.mode", "fake_backend"),
            *("--training.local_batch_size", batch, "--training.seq_len", str(wanted["sequence"])),
            *("--parallelism.data_parallel_shard_degree", fsdp),
            *("--parallelism.tensor_parallel_degree", tensor),
            *("--activation_checkpoint.type", "none", "--loss.type", "cross_entropy"),
        ],
        world_size=ranks,
    )
    config.training.mixed_precision_reduce = wanted["reduce_dtype"]  # its flag knows only one
    if wanted["layers"] is not None:
        del config.model_spec.model.layers[wanted["layers"] :]
    if wanted["unfused_qkv"]:
        for layer in config.model_spec.model.layers:
            layer.attention.qkv_linear = separate(layer.attention.qkv_linear)
    run = FakeRank(config, ranks)
    return Captured(config, run.parallel_dims, run.capture())


def simulated_caps(wanted: dict[str, Any]) -> dict[str, Any]:
    """Simulate a case with the passes of its config, whatever may be in flight.

    Returns:
        seconds of a step before `schedule_overlap` ("plain"), with its "default", and by cap
        ("fixed"); the bytes of the largest collective of a parameter or gradient, those that are
        left beside what the plain step needs, and those by which the default raises that.
    """
    name, fsdp, tensor, batch = wanted["case"].split(":")
    family, _, flavor = name.rpartition("/")
    ranks = int(fsdp) * int(tensor)
    config = load_config(
        [
            *("--module", f"graph_trainer.{family or 'llama3'}", "--config", flavor),
            *("--comm.mode", "fake_backend", "--training.local_batch_size", batch),
            *("--parallelism.tensor_parallel_degree", tensor),
        ],
        world_size=ranks,
    )
    run, hardware = FakeRank(config, ranks), load_hardware(wanted["hardware"])
    joint = run.capture()
    context = run_before(joint, run.pass_config(hardware=hardware), schedule_overlap)
    plain = context.simulate(joint)

    def scheduled(cap: float | None) -> Simulation:
        trial = copy_graph(joint)
        options = ScheduleOverlapOptions(max_in_flight_mib=cap)
        schedule_overlap.function(trial, options, context)
        return context.simulate(trial)

    default = scheduled(None)
    seconds = {cap: scheduled(cap).timeline.step_seconds for cap in wanted["caps"]}
    of_fsdp = [c.input_bytes + c.output_bytes for c in plain.collectives if c.role]
    return {
        "wanted": wanted,
        "plain": plain.timeline.step_seconds,
        "default": default.timeline.step_seconds,
        "fixed": seconds,
        "largest_bytes": max(of_fsdp),
        "left_bytes": context.allowed_bytes(joint) - plain.need().total,
        "grown_bytes": default.need().total - plain.need().total,
    }


def separate(fused: FusedQKVLinear.Config) -> QKVLinear.Config:
    """Three projections in the place of one."""
    width = {"in_features": fused.wqkv.in_features, "bias": False}
    return QKVLinear.Config(
        head_dim=fused.head_dim,
        wq=Linear.Config(out_features=fused.n_heads * fused.head_dim, **width),
        wkv=Linear.Config(out_features=fused.n_kv_heads * fused.head_dim, **width),
    )


def simulated_variants(
    case: Captured, policy: str, wanted: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each variant's name and what the simulator says of it."""
    hardware = load_hardware(wanted["hardware"])
    for name in wanted["variants"]:
        start = time.process_time()
        joint = variant(case, name, policy, hardware)
        seconds = time.process_time() - start
        simulation = simulate(joint, hardware, OtherMemory(fused=wanted["fused"]))
        yield name, {**row(simulation), "passes_seconds": seconds}


def variant(case: Captured, name: str, policy: str, hardware: Hardware) -> JointGraph:
    """The case's graph as the passes of a variant leave it."""
    if name == "peer":
        from benchmarks.peer import passes_of_peer_on

        case.config.parallelism.fsdp_reshard_after_forward = policy
        return passes_of_peer_on(case.joint, case.config, case.parallel_dims)
    joint = copy_graph(case.joint)
    gt.run_passes(joint, passes_of_variant(name, policy, hardware))
    return joint


def passes_of_variant(name: str, policy: Any, hardware: Hardware) -> gt.PassConfig:
    """The passes of "default", of "plain" (nothing merged or scheduled), or of a bucketing
    strategy, with " overlap" behind it where the result is scheduled as well."""
    config = gt.PassConfig(reshard_after_forward=policy, hardware=hardware)
    if name == "default":
        return config
    strategy, *overlap = name.replace("plain", "none").split()
    options = BucketCollectivesOptions(strategy=strategy)  # type: ignore[arg-type]
    return replace(
        config,
        disable_passes=[] if overlap else ["schedule_overlap"],
        options={"bucket_collectives": options},
    )


def row(simulation: Simulation) -> dict[str, Any]:
    """The numbers of one variant."""
    timeline, issued = simulation.timeline, simulation.collectives
    exposed = timeline.exposed_seconds()
    unshards = [c for c in issued if c.role is Role.UNSHARD]
    backward = sum(c.phase is Phase.BACKWARD for c in unshards)
    sharding = data_parallel_groups(issued)
    reductions = [c for c in issued if c.role is Role.REDUCE_GRAD]
    return {
        "gathers": len(unshards) - backward,
        "gathers_again": backward,
        "reductions": sum(c.ranks in sharding for c in reductions),
        "reductions_elsewhere": sum(c.ranks not in sharding for c in reductions),
        "exposed_seconds": {traffic.value: exposed.get(traffic, 0.0) for traffic in Traffic},
        "exposed_tensor_parallel": of_tensor_parallelism(simulation),
        "step_seconds": timeline.step_seconds,
        "peak_bytes": simulation.memory.peak_bytes,
        "floor": floor(simulation),
    }


def floor(simulation: Simulation) -> dict[str, Any]:
    """What no order of the same work goes below, in seconds.

    Returns:
        "compute": its kernels, one after the other and nothing communicating. "bandwidth": by
        group, its bytes over its links without any latency. "ends": the bytes of the first gather
        and of the last gradient's reduction; there is nothing to compute before and behind them.
    """
    issued, hardware = simulation.collectives, simulation.hardware
    endless = replace(hardware, protocols=tuple(map(_without_latency, hardware.protocols)))
    bandwidth: dict[str, float] = defaultdict(float)
    for c in issued:
        bandwidth[describe_ranks(c.ranks)] += collective_seconds(c, endless)
    ends = [c for c in issued if c.role is Role.UNSHARD][:1]
    ends += [c for c in issued if c.role is Role.REDUCE_GRAD][-1:]
    return {
        "compute": sum(cost.seconds for cost in simulation.costs.values()),
        "bandwidth": dict(bandwidth),
        "ends": sum(collective_seconds(c, endless) for c in ends),
    }


def _without_latency(protocol: Protocol) -> Protocol:
    """The protocol at which nothing but bytes takes time."""
    tree = None if protocol.tree_latency_seconds is None else 0.0
    return replace(
        protocol,
        base_seconds=0.0,
        node_latency_seconds=0.0,
        network_latency_seconds=0.0,
        post_seconds=0.0,
        tree_latency_seconds=tree,
    )


def of_tensor_parallelism(simulation: Simulation) -> list[dict[str, Any]]:
    """What tensor parallelism leaves exposed: by phase, kind and part of the model, worst first."""
    of = traffic_of(simulation.collectives)
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for c in simulation.collectives:
        if of[c.node] is Traffic.TENSOR_PARALLEL:
            found[_place(c)].append(0.0)
    for each in simulation.timeline.exposed:
        if each.traffic is Traffic.TENSOR_PARALLEL:
            found[_place(each.collective)].append(each.seconds)
    rows = [
        {
            "phase": phase,
            "kind": kind,
            "part": part,
            "collectives": seconds.count(0.0),
            "seconds": sum(seconds),
        }
        for (phase, kind, part), seconds in found.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def _place(collective: Any) -> tuple[str, str, str]:
    """Phase, kind, and the module without the number of its layer."""
    parts = (collective.module or "").split(".")
    part = ".".join("*" if word.isdigit() else word for word in parts)
    return str(collective.phase), collective.kind, part
