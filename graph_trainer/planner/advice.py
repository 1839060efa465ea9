"""Advise what to change where a run does not fit: each setting tried, the most helpful first."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

from graph_trainer.core.graph.annotations import Phase, layer_of, module_of, phase_of
from graph_trainer.core.names import without_layer
from graph_trainer.core.runtime.backends.registry import BACKENDS, find_backend
from graph_trainer.errors import GraphTrainerError
from graph_trainer.planner.console import OnProgress
from graph_trainer.planner.plan import Advice, LoadConfig, Plan, make_plan
from graph_trainer.titan.config.run_config import GraphTrainerConfig


def advise(plan: Plan, load: LoadConfig, on_progress: OnProgress) -> list[Advice]:
    """Plan the run again with one setting changed at a time.

    A change is estimated from the first three and the first five layers of the model, so that
    this takes seconds for a model of any depth: memory at every node, and time, grow linearly
    with the number of layers. Where a limit or a table decides what is kept, in blocks that a
    shallow model lacks, only a lower limit is tried, on the whole model.

    Args:
        plan: the plan of a run that does not fit.
        load: loads the config of the same command line.
        on_progress: called before each change.

    Returns:
        the changes that need less memory, the one that needs least first, without those that
        the config excludes.
    """
    if plan.memory_table is not None:
        return _with_a_lower_limit(plan, load, on_progress)
    on_progress("estimating from a few layers")
    peak, speed = estimate(plan.config, plan)
    advice = []
    for flags in changes(plan.config, plan.world_size):
        on_progress(f"trying {' '.join(flags)}")
        try:
            new_peak, new_speed = estimate(load(flags), plan)
        except GraphTrainerError:  # this config excludes the change
            continue
        grown = (new_peak / peak - 1) * plan.need.allocated
        needs = plan.need.total + int(grown)
        if needs < (1 - _LEAST) * plan.need.total:
            tokens = plan.tokens_per_second_per_gpu * new_speed / speed
            advice.append(Advice(flags, needs, tokens, needs <= plan.allowed_bytes))
    return sorted(advice, key=lambda a: a.needed_bytes)


def _with_a_lower_limit(plan: Plan, load: LoadConfig, on_progress: OnProgress) -> list[Advice]:
    """Plan the run within what the device has."""
    flags = ("--compile.memory_limit_gib", f"{plan.hardware.memory_gib:g}")
    on_progress(f"trying {' '.join(flags)}")
    try:
        planned = make_plan(
            load(flags), plan.world_size, plan.hardware, rank=plan.rank, every_pass=False
        )
    except GraphTrainerError:  # nothing can be done within it
        return []
    if planned.need.total >= plan.need.total:  # a table that no limit changes
        return []
    tokens = planned.tokens_per_second_per_gpu
    return [Advice(flags, planned.need.total, tokens, planned.fits)]


# with fewer layers the ends of a step take up too much of what a schedule may spend
_FEW, _MORE = 3, 5
_LEAST = 0.005
"""The smallest saving that is worth a mention, as a part of the whole."""

_Place = tuple[Phase | None, str, str, str, int]
"""Phase, which layer, module, op and the number of such nodes before: one node at any depth."""


def estimate(config: GraphTrainerConfig, plan: Plan) -> tuple[float, float]:
    """Estimate a config's peak bytes and tokens/s/GPU from lines through two depths of its model.

    What is alive at a node of the first or the last layer, or outside the layers, grows
    linearly with the number of layers, and between the first and the last layer it changes
    evenly. So the peak is the highest of these lines at the model's depth, wherever the peak
    of the shallow models is.
    """
    assert config.model_spec is not None
    depth = len(getattr(config.model_spec.model, "layers", ()))
    few, more = (_planned(config, plan, layers) for layers in (_FEW, _MORE))
    times = (depth - _FEW) / (_MORE - _FEW) if depth > _MORE else 1.0

    def line(a: float, b: float) -> float:
        return a + (b - a) * times

    low, high = _memory_by_place(few), _memory_by_place(more)
    seconds = line(few.step_seconds, more.step_seconds)
    peak = max(line(low[place], high[place]) for place in low.keys() & high.keys())
    return peak, more.tokens_per_step / more.ranks_per_batch / seconds


def _memory_by_place(plan: Plan) -> dict[_Place, int]:
    """Return the bytes alive at every node of the first and last layer and outside the layers."""
    simulation = plan.simulation
    nodes = list(simulation.joint.graph.nodes)
    layers = [layer for node in nodes if (layer := layer_of(module_of(node))) is not None]
    names = {min(layers): "first", max(layers): "last"} if layers else {}
    seen: Counter[tuple[Phase | None, str, str, str]] = Counter()
    memory = {}
    for node, num in zip(nodes, simulation.memory.total, strict=True):
        module = module_of(node) or ""
        layer = layer_of(module)
        if layer is not None and layer not in names:
            continue
        which = "" if layer is None else names[layer]
        like = (phase_of(node), which, without_layer(module), str(node.target))
        if node.op == "call_function":
            memory[(*like, seen[like])] = num
            seen[like] += 1
    return memory


def _planned(config: GraphTrainerConfig, plan: Plan, layers: int) -> Plan:
    """Plan the first layers of a model; the whole model where it has no list of layers."""
    spec = config.model_spec
    assert spec is not None
    model = copy.deepcopy(spec.model)
    if hasattr(model, "layers"):
        model.layers = model.layers[:layers]
    shallow = copy.copy(config)
    shallow.model_spec = replace(spec, model=model)
    return make_plan(
        shallow,
        plan.world_size,
        plan.hardware,
        rank=plan.rank,
        runtime=plan.simulation.runtime,
        every_pass=False,
    )


def changes(config: Any, world_size: int) -> list[tuple[str, ...]]:
    """List the settings that could still save memory, as flags."""
    flags: list[tuple[str, ...]] = []
    training, parallelism = config.training, config.parallelism
    if parallelism.fsdp_reshard_after_forward != "always":
        flags.append(("--parallelism.fsdp_reshard_after_forward", "always"))
    kind = type(config.activation_checkpoint).__qualname__ if config.activation_checkpoint else ""
    if "Full" not in kind:
        flags.append(("--activation_checkpoint.type", "full"))
    if not kind:
        flags.append(("--activation_checkpoint.type", "selective"))
    if "Chunked" not in type(config.loss).__qualname__:
        flags.append(("--loss.type", "chunked_cross_entropy"))
    if training.local_batch_size > 1:
        flags.append(("--training.local_batch_size", str(training.local_batch_size // 2)))
    if not find_backend(config.compile.backend).fuses_ops:
        fusing = (backend.name for backend in BACKENDS.values() if backend.fuses_ops)
        flags += [("--compile.backend", name) for name in fusing]
    tensor = parallelism.tensor_parallel_degree * 2
    if parallelism.data_parallel_shard_degree == -1 and world_size % tensor == 0:
        flags.append(("--parallelism.tensor_parallel_degree", str(tensor)))
    context = parallelism.context_parallel_degree * 2
    if parallelism.data_parallel_shard_degree == -1 and world_size % context == 0:
        flags.append(("--parallelism.context_parallel_degree", str(context)))
    if parallelism.data_parallel_replicate_degree > 1:
        flags.append(
            ("--parallelism.data_parallel_replicate_degree", "1")
            + ("--parallelism.data_parallel_shard_degree", "-1")
        )
    flags.append(("--training.seq_len", str(training.seq_len // 2)))
    return flags
