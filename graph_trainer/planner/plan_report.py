"""A plan as one structure of plain values: bytes, seconds and names.

The structure is the JSON document of a plan; docs/reading_a_plan.md describes every key. The tables
for a terminal and the page are made from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from heapq import nlargest
from itertools import pairwise
from typing import Any

from graph_trainer.core.analysis.collective_purpose import Traffic
from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.annotations import is_backward, owner_of, parameters_of, phase_of
from graph_trainer.core.names import without_layer
from graph_trainer.core.passes.rematerialize import rematerialize
from graph_trainer.core.passes.report import standing_remarks
from graph_trainer.core.simulation.hardware import Hardware, load_hardware
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER
from graph_trainer.core.simulation.timeline import ExposedWait
from graph_trainer.core.units import GIB, gib
from graph_trainer.planner.bands import NO_BAND, Band
from graph_trainer.planner.changes import POLICY, RESHARD, flags_of
from graph_trainer.planner.ledger import LedgerRow
from graph_trainer.planner.plan import Outcome, Plan, versions
from graph_trainer.titan.activation_policies import POLICIES
from graph_trainer.titan.config.core_settings import IMBALANCE_KEY, LIMIT_KEY, with_config_keys
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.write_toml import config_to_toml
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer
from graph_trainer.titan.memory_table_file import in_ranges
from graph_trainer.titan.parallelize_context import applied_method

SCHEMA = "graph_trainer.plan/2"
"""Changes when a key changes its meaning or goes; new keys do not change it."""

LARGEST_SHOWN = 20
"""The number of items in the lists of tensors, modules and waits."""

EAGER = (
    'compile.mode = "eager" captures no graph: all figures are those of the captured step, as '
    'compile.mode = "aot_fx_trace" runs it.'
)
"""A remark on the mode."""

_LEAST = 0.02
"""Of the memory and of the step, what is worth a remark on room to spare."""

CATEGORIES = {
    Category.PARAMETERS: "parameters",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.BUFFERS: "buffers and batch",
    Category.GRADIENTS: "gradients",
    Category.UNSHARDED: "unsharded parameters",
    Category.ACTIVATIONS: "activations kept for backward",
    Category.TEMPORARIES: "temporaries",
    Category.COMMUNICATION: "communication buffers",
}
"""The names of the categories of memory in tables."""


def plan_report(plan: Plan) -> dict[str, Any]:
    """Make the report of a plan."""
    simulation = plan.simulation
    remarks = [(row.name, row.remarks) for row in plan.rows if row.remarks]
    band, tokens = plan.band, plan.tokens_per_second_per_gpu
    longest = nlargest(LARGEST_SHOWN, simulation.timeline.exposed, key=lambda w: w.seconds)
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "headline": plan.headline,
        "notes": list(_notes(plan)),
        "config": config_to_toml(plan.config),
        "hardware": dataclasses.asdict(plan.hardware),
        "runtime": simulation.runtime.name,
        "world_size": plan.world_size,
        "rank": plan.rank,
        "context_parallel_method": context_parallel_method(plan.config),
        "parameters": plan.num_parameters,
        "nodes": plan.rows[-1].nodes,
        "ledger": [_row(row) for row in plan.rows],
        "remarks": [with_config_keys(remark) for remark in standing_remarks(remarks)],
        "peak": _peak(plan),
        "allocated_bytes": plan.need.allocated,
        "needed_bytes": plan.need.total,
        "limit_bytes": plan.limit_bytes,
        "headroom_bytes": plan.headroom_bytes,
        "fits": plan.fits,
        "advice": [_advice(change) for change in plan.advice],
        "memory_table": _memory_table(plan),
        "memory_curve": [_curve_point(point) for point in plan.memory_curve],
        "expert_imbalance": plan.expert_imbalance,
        "expert_loads": dataclasses.asdict(plan.expert_loads) if plan.expert_loads else None,
        "microbatches": plan.microbatches,
        "graph_seconds": simulation.timeline.step_seconds,
        "outside_seconds": plan.outside_seconds,
        "slowest_device": plan.slowest_device,
        "step_seconds": plan.step_seconds,
        "host_bytes": simulation.memory.host_bytes,
        "copy_wait_seconds": simulation.timeline.copy_wait_seconds,
        "host_wait_seconds": simulation.timeline.host_wait_seconds,
        "busy_seconds": simulation.timeline.busy,
        "exposed_waits": [_wait(w) for w in longest],
        "exposed_by_module": _exposed_by_module(simulation.timeline.exposed),
        "tokens_per_second_per_gpu": tokens,
        "mfu": plan.mfu,
        "mfu_causal": plan.mfu_causal,
        "band": dataclasses.asdict(band) if band else None,
        "tokens_per_second_per_gpu_range": band.of_rate(tokens) if band else None,
        "step_seconds_range": band.of_time(plan.step_seconds) if band else None,
        "mfu_range": band.of_rate(plan.mfu) if band else None,
        "mfu_causal_range": band.of_rate(plan.mfu_causal) if band else None,
        "limits": [dataclasses.asdict(limit) for limit in plan.limits],
    }


PURPOSES = {
    Traffic.UNSHARD.value: "gathers parameters",
    Traffic.REDUCE_GRAD.value: "reduces gradients",
    Traffic.TENSOR_PARALLEL.value: "tensor parallelism",
    Traffic.CONTEXT_PARALLEL.value: "context parallelism",
    Traffic.EXPERT_PARALLEL.value: "expert parallelism",
    Traffic.OTHER.value: "other communication",
}
"""The names of the purposes of collectives in tables."""


def readable_report(plan: Plan) -> dict[str, Any]:
    """Make the report for tables and the page: settings in a line, nodes with module and op."""
    replicas = plan.world_size // plan.ranks_per_batch
    report = plan_report(plan) | {
        "settings": settings_text(plan.config, plan.world_size, replicas, plan.microbatches),
        "spare": _spare(plan),
        "certainty": how_sure(plan.band),
        "limited_by": _limited_by(plan),
    }
    nodes = {node.name: node for node in plan.simulation.joint.graph.nodes}

    def described(name: str) -> str:
        node = nodes[name]
        op, _, _ = getattr(node.target, "__name__", node.op).partition(".")
        description = (
            name if name.startswith(op) else f"{name}, {op}"
        )  # names are ops with a number
        return description + (f" in {owner}" if (owner := owner_of(node)) else "")

    report["peak"]["node"] = described(report["peak"]["node"])
    for allocation in report["peak"]["largest"]:
        allocation["node"] = described(allocation["node"])
    for wait in report["exposed_by_module"]:
        wait["purpose"] = PURPOSES[wait["role"]]
        reader = wait["holds_up"]
        wait["holds_up"] = described(reader) if reader else "the end of the step"
    return report


def context_parallel_method(config: GraphTrainerConfig) -> str | None:
    """Return how attention sees a sequence that ranks share; None where each has its own."""
    parallelism, spec = config.parallelism, config.model_spec
    degree = parallelism.context_parallel_degree
    if spec is None or degree == 1:
        return None
    layers: Any = spec.model.layers
    method = parallelism.context_parallel_method
    return applied_method(method, layers, degree, parallelism.tensor_parallel_degree)


def settings_text(config: GraphTrainerConfig, world_size: int, replicas: int, batches: int) -> str:
    """Format what was planned: mesh, batch, sequence, activation policy, reshard, backend.

    Args:
        replicas: the number of different batches in a step.
        batches: how many local batches a rank runs in a step.
    """
    training, parallelism = config.training, config.parallelism
    others = {
        "pp": parallelism.pipeline_parallel_degree,
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
    }
    mesh = {"dp_shard": world_size // math.prod(others.values()), **others}
    mesh["ep"] = parallelism.expert_parallel_degree
    shown = " x ".join(f"{name} {degree}" for name, degree in mesh.items() if degree > 1)
    method = context_parallel_method(config)
    batch = training.local_batch_size
    section = config.activation_checkpoint
    policy = POLICIES.get(type(section), type(section).__qualname__) if section else "none"
    limit = config.compile.memory_limit_gib
    return (
        f"mesh {shown or 'of one rank'}; batch {batch} local, "
        f"{batch * batches * replicas:,} global; sequence {training.seq_len:,}"
        f"{f', split by {method}' if method else ''}; "
        f"activation policy {policy}; reshard {parallelism.fsdp_reshard_after_forward}; "
        f"backend {config.compile.backend}" + (f"; limit {limit:g} GiB" if limit else "")
    )


def _spare(plan: Plan) -> str:
    """Say what less recomputation would give a run that has memory left; empty where it is little.

    What backward makes again takes what compute took longer once `rematerialize` had run, and what
    compute waits in backward for gathered parameters.
    """
    if plan.simulation.runtime is not GRAPH_TRAINER:
        return ""
    policy = POLICIES.get(type(plan.config.activation_checkpoint))
    seconds = sum(
        row.step_seconds - row.exposed - (before.step_seconds - before.exposed)
        for before, row in pairwise(plan.rows)
        if row.name == rematerialize.name
    )
    seconds += sum(
        exposed.seconds
        for exposed in plan.simulation.timeline.exposed
        if exposed.traffic is Traffic.UNSHARD and is_backward(exposed.wait)
    )
    part = plan.microbatches * seconds / plan.step_seconds
    room = plan.headroom_bytes / plan.allowed_bytes
    if policy not in ("selective", "full") or plan.limit_bytes or room < _LEAST or part < _LEAST:
        return ""
    limit = math.floor(10 * plan.allowed_bytes / GIB) / 10
    return (
        f"What backward makes again, activations and gathered parameters, takes {part:.1%} of the "
        f"step, and there is room to keep more: --{POLICY} budget --{LIMIT_KEY} {limit:g} "
        f"--{RESHARD} auto makes again only what does not fit, and --memory-curve shows what each "
        "limit gives."
    )


def how_sure(band: Band | None) -> str:
    """Say what the ranges of a plan's times are made of."""
    if band is None:
        return f"Times have no range: {NO_BAND}."
    return (
        f"Ranges contain {band.source} (of {band.runs}): they take {1 / band.high:.2f} to "
        f"{1 / band.low:.2f} times as long as planned. So may all other times."
    )


def _limited_by(plan: Plan) -> str:
    """Say in one sentence what limits the step, and what a tenth less of it would do."""
    if not plan.limits:
        return ""
    most, *others = plan.limits
    also = ", ".join(f"{limit.change} {limit.longer:.1%}" for limit in others)
    return (
        f"Limited most by {most.what}: with {most.change} a step takes {most.longer:.1%} longer; "
        f"with {also}."
    )


def notes_on(config: GraphTrainerConfig, hardware: Hardware) -> Iterator[str]:
    """Yield remarks on a config as a whole: its data, and its passes and dtype on the hardware."""
    data, tokenizer = config.dataloader, config.tokenizer
    if isinstance(data, TextDataLoader.Config) and not (data.dataset or data.dataset_path):
        learned = isinstance(tokenizer, ByteBPETokenizer.Config)
        vocabulary = f", with a vocabulary of {tokenizer.vocab_size:,} of its own" * learned
        yield (
            f"The config names no data, so it trains on Python's standard library{vocabulary}. Set "
            "dataloader.dataset_path to train on your text."
        )
    named = config.compile.hardware
    if named is not None and load_hardware(named, "compile.hardware") != hardware:
        yield (
            f"Passes that decide by simulation do so for {named}, as compile.hardware says; what "
            f"they made is simulated on {hardware.name}."
        )
    dtype = config.training.mixed_precision_param
    if dtype not in hardware.peak_flops:
        yield (
            f"{hardware.name} has no peak_flops.{dtype}, so times and MFU are of "
            f"peak_flops.float32. Add peak_flops.{dtype} to its file."
        )


def _notes(plan: Plan) -> Iterator[str]:
    """Yield remarks on the plan as a whole: its config, mode, machines, limit and host memory."""
    yield from notes_on(plan.config, plan.hardware)
    if plan.config.compile.mode == "eager" and plan.simulation.runtime is GRAPH_TRAINER:
        yield EAGER
    if plan.config.compile.memory_limit_gib and plan.world_size > 1:
        yield (
            f"compile.memory_limit_gib is compared here with what rank {plan.rank} needs. In "
            "training the rank that needs most decides for all, as it does in --save and "
            "--verify-order."
        )
    if plan.expert_imbalance != 1:
        yield (
            f"Memory is that of a rank whose experts receive {plan.expert_imbalance:g} times their "
            f"even share in every layer, and time is that of even shares: {IMBALANCE_KEY} = "
            f"{plan.expert_imbalance:g}, in training too."
        )
    if on_host := plan.simulation.memory.host_bytes:
        waits = plan.simulation.timeline.copy_wait_seconds
        yield (
            f"Up to {gib(on_host)} GiB of activations are in host memory between forward and "
            f"backward; compute waits {waits * 1e3:,.1f} ms of a step for their copies."
        )


def _row(row: LedgerRow) -> dict[str, Any]:
    collectives: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for (kind, phase, traffic), volume in row.collectives.items():
        by_phase = collectives.setdefault(kind, {}).setdefault(phase, {})
        by_phase[traffic.value] = {"count": volume.count, "bytes": volume.bytes}
    return {
        "pass": row.name,
        "nodes": row.nodes,
        "collectives": collectives,
        "peak_bytes": row.peak_bytes,
        "step_seconds": row.step_seconds,
        "exposed_seconds": {t.value: row.exposed_seconds.get(t, 0.0) for t in Traffic},
        "host_wait_seconds": row.host_wait_seconds,
        "pass_seconds": row.seconds,
        "rolled_back": with_config_keys(row.rolled_back) or None,
        "remarks": [with_config_keys(remark) for remark in row.remarks],
    }


def _memory_table(plan: Plan) -> list[dict[str, Any]]:
    table = plan.memory_table
    rows = table.rows if table is not None else ()
    return [dataclasses.asdict(row) | {"keep_in": in_ranges(row.keep_in)} for row in rows]


def _advice(outcome: Outcome) -> dict[str, Any]:
    return {
        "flags": flags_of(outcome.config),
        "needed_bytes": outcome.needed_bytes,
        "tokens_per_second_per_gpu": outcome.tokens_per_second_per_gpu,
        "fits": outcome.fits,
    }


def _curve_point(outcome: Outcome) -> dict[str, Any]:
    limit = outcome.config.get(LIMIT_KEY)
    return {
        "policy": outcome.config[POLICY],
        "limit_bytes": int(float(limit) * GIB) if limit else None,
        "peak_bytes": outcome.peak_bytes,
        "needed_bytes": outcome.needed_bytes,
        "step_seconds": outcome.step_seconds,
    }


def _peak(plan: Plan) -> dict[str, Any]:
    simulation = plan.simulation
    memory, place = simulation.memory, simulation.memory.peak_position
    node = list(simulation.joint.graph.nodes)[place]
    phase = phase_of(node)
    live = memory.live_at(place)
    modules: dict[tuple[str, ...], dict[str, Any]] = {}
    for s in live:
        key = {"module": without_layer(s.owner), "category": s.category.value}
        group = modules.setdefault(tuple(key.values()), {**key, "tensors": 0, "bytes": 0})
        group["tensors"] += 1
        group["bytes"] += s.bytes
    return {
        "bytes": memory.peak_bytes,
        "by_category": {c.value: num for c, num in memory.peak_by_category().items()},
        "node": node.name,
        "phase": phase.value if phase else None,
        "seconds": simulation.timeline.starts[place],
        "tensors": len(live),
        "tensor_bytes": sum(s.bytes for s in live),
        "modules": sorted(modules.values(), key=lambda g: -g["bytes"])[:LARGEST_SHOWN],
        "largest": [
            {"node": s.node.name, "owner": s.owner, "category": s.category.value, "bytes": s.bytes}
            for s in live[:LARGEST_SHOWN]
        ],
    }


def _wait(w: ExposedWait) -> dict[str, Any]:
    return {
        "seconds": w.seconds,
        "role": w.traffic.value,
        "collective": w.collective.node.name,
        "kind": w.collective.kind,
        "module": w.collective.module,
        "parameter": w.collective.parameter,
        "holds_up": None if w.delayed is None else w.delayed.name,
    }


def _exposed_by_module(waits: list[ExposedWait]) -> list[dict[str, Any]]:
    """Sum the waits for collectives of one role, kind and owner, all layers together."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for wait in waits:
        several = parameters_of(wait.collective.node)
        owner = owner_of(wait.collective.node)
        if not owner and several:  # a bucket over several modules
            owner = f"{len(several)} parameters, {several[0]} to {several[-1]}"
        key = {
            "role": wait.traffic.value,
            "kind": wait.collective.kind,
            "owner": without_layer(owner),
        }
        first = {**key, "count": 0, "seconds": 0.0, "holds_up": _wait(wait)["holds_up"]}
        group = groups.setdefault(tuple(key.values()), first)
        group["count"] += 1
        group["seconds"] += wait.seconds
    return sorted(groups.values(), key=lambda g: -g["seconds"])[:LARGEST_SHOWN]
