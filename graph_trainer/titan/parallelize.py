"""All parallelisms, activation checkpointing and SimpleFSDP on any torchtitan decoder."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from graph_trainer.core.names import clean_fqn
from graph_trainer.core.sharding.initialize import SameOnAnyMesh
from graph_trainer.core.sharding.simple_fsdp import (
    MixedPrecisionPolicy,
    Mode,
    ShardOver,
    shard_of,
    sharded_parameters,
    simple_fsdp,
)
from graph_trainer.errors import ConfigError
from graph_trainer.titan.activation_policies import POLICIES
from graph_trainer.titan.parallelize_context import (
    Applied,
    applied_method,
    apply_context_parallel,
)

SUPPORTED: dict[str, bool | int | str] = {
    "training.enable_cpu_offload": False,
    "parallelism.spmd_backend": "partial_dtensor",
}
"""Key -> the only value that sharding supports."""


def parallelize_decoder(
    model: nn.Module,
    *,
    dump_folder: str,
    ac_config: ActivationCheckpointingConfig,
    compile_config: CompileConfig,
    parallel_dims: ParallelDims,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
) -> nn.Module:
    """Parallelize a decoder on meta, in place, and return it: a torchtitan `parallelize_fn`.

    Context parallelism wraps the model's attention; tensor and sequence parallelism follow the
    sharding configuration of the model; data parallelism is `simple_fsdp` in the mode that the
    degrees decide. Where the step is captured, the policies of [activation_checkpoint] are left to
    passes. Gradients are summed, not averaged: torchtitan's loss is divided by the global number of
    tokens already.

    Raises:
        ConfigError: a parallelism that a captured step does not support, for configs that are made
            in Python: the check of a config file refuses it before any rank starts.
    """
    sections = {"parallelism": parallelism, "training": training}
    for key, supported in SUPPORTED.items():
        section, _, name = key.partition(".")
        value = getattr(sections[section], name)
        if value != supported:
            raise ConfigError(
                f"{key} is {value!r}, which graph_trainer's sharding does not support: set it to "
                f"{supported!r}"
            )
    ours: Any = parallelism  # a GraphParallelismConfig, whose file imports this one
    shares = parallel_dims.get_mesh("cp").get_group() if parallel_dims.cp_enabled else None
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    reduce_dtype = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    method: Applied = "all_gather"
    if shares is not None:
        layers: Any = model.config.layers  # type: ignore[union-attr]
        degrees = parallel_dims.cp, parallel_dims.tp
        method = applied_method(ours.context_parallel_method, layers, *degrees)
        logger.info(f"Applied context parallelism ({method}) over {parallel_dims.cp} ranks")
    apply_context_parallel(model, shares, method, dtype, document_mask=ours.document_mask)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)  # type: ignore[operator]
        if getattr(model, "enable_weight_tying", False):
            # each of the two has been distributed, and a plan never initializes the model, which
            # would tie them again
            model.tok_embeddings.weight = model.lm_head.weight  # type: ignore[union-attr]
    if parallel_dims.ep_enabled:
        _check_experts(model, parallel_dims)
    is_captured = getattr(compile_config, "mode", "eager") != "eager"
    if ac_config is not None and not (type(ac_config) in POLICIES and is_captured):
        ac_config.build(dump_folder=dump_folder).apply(model)
    mode: Mode = "fully_shard"
    sharded_over: str | list[str] = "fsdp"
    if parallel_dims.dp_replicate_enabled:
        mode, sharded_over = "replicate", "dp_replicate"
        if parallel_dims.fsdp_enabled:
            mode, sharded_over = "hybrid_shard", ["dp_replicate", "fsdp"]
    mesh = parallel_dims.get_mesh(sharded_over)
    simple_fsdp(
        model,
        mesh,
        mode,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype),
        gradient_divide_factor=1.0,
        shard_over=partial(
            _expert_sharding, parallel_dims, ShardOver(mesh=mesh, mode=mode), _experts_of(model)
        ),
    )
    logger.info(f"Applied SimpleFSDP ({mode}) over {mesh.size()} data-parallel ranks")
    initialize = model.init_states

    def init_states(*, buffer_device: torch.device | None = None) -> None:
        # what the model writes are shards, with the same numbers on any mesh and under any policy
        with (
            sharded_parameters(),
            SameOnAnyMesh(),
            drawn_without_communication(model),
            seeded_by_name(model, _seed_of_run(parallel_dims)),
        ):
            initialize(buffer_device=buffer_device)  # type: ignore[operator]

    model.init_states = init_states  # type: ignore[assignment]
    return model


@contextlib.contextmanager
def seeded_by_name(model: nn.Module, seed: int) -> Iterator[None]:
    """While entered, what a module of torchtitan's draws for its parameters depends on the seed and
    its FQN alone, and on nothing that other modules have drawn.

    So a stage of a pipeline begins with the values that the whole model has, and blocks with the
    same values whether or not they are in checkpoint wrappers. Random generators are left as they
    were.
    """
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, Module)]
    device = next(model.parameters()).device

    def seeded(name: str, draw: Callable[[], None]) -> None:
        digest = hashlib.sha256(f"{seed} {clean_fqn(name)}".encode()).digest()
        number = int.from_bytes(digest[:8], "big")
        # the generators in use alone: torch.manual_seed looks for every device, for milliseconds
        torch.default_generator.manual_seed(number)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(number)
        draw()

    for name, module in modules:
        draw = module._init_self_parameters
        module._init_self_parameters = partial(seeded, name, draw)
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            yield
    finally:
        for _, module in modules:
            del module._init_self_parameters  # the class has it again


@contextlib.contextmanager
def drawn_without_communication(model: nn.Module) -> Iterator[None]:
    """While entered, a parameter that a function of torch.nn.init initializes is drawn as a plain
    full tensor, of which the rank keeps its shard.

    These functions write all of a tensor and use none of its old values. `trunc_normal_` reads
    after each draw whether to draw again, and of a sharded parameter `SameOnAnyMesh` would have to
    all-reduce the answer. Other functions get the parameter itself: they may leave it as it is.
    """
    modules = [m for m in model.modules() if isinstance(m, Module)]

    def drawn(module: Module, name: str, parameter: nn.Parameter) -> None:
        initialize = (module._param_init or {}).get(name)
        function = initialize.func if isinstance(initialize, partial) else initialize
        of_torch = getattr(function, "__module__", "") == nn.init.__name__
        if initialize is None or not of_torch or not isinstance(parameter, DTensor):
            type(module)._init_param(module, name, parameter)
            return
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        initialize(full)
        with torch.no_grad():
            parameter.to_local().copy_(shard_of(full, parameter))

    for module in modules:
        module._init_param = partial(drawn, module)
    try:
        yield
    finally:
        for module in modules:
            del module._init_param  # the class has it again


def _seed_of_run(dims: ParallelDims) -> int:
    """Return the seed that all ranks share: torchtitan's `set_determinism`, the last to seed before
    parameters are initialized, adds to it the rank's place in a pipeline and nothing else."""
    stage = dims.get_mesh("pp").get_local_rank() if dims.pp_enabled else 0
    return (torch.initial_seed() - stage) % 2**64


def parallelized(model: nn.Module, config: Trainer.Config, dims: ParallelDims) -> nn.Module:
    """Parallelize a model on meta as the trainer of a config does, and return it in train mode."""
    assert config.model_spec is not None
    sections = sections_of(config)
    parallel: nn.Module = config.model_spec.parallelize_fn(model, parallel_dims=dims, **sections)
    return parallel.train()


def sections_of(config: Trainer.Config) -> dict[str, Any]:
    """Return the sections of a config that torchtitan's functions on models take, by argument."""
    return {
        "ac_config": config.activation_checkpoint,
        "compile_config": config.compile,
        "dump_folder": config.dump_folder,
        "parallelism": config.parallelism,
        "training": config.training,
    }


def _experts_of(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters of a model's experts, whose first dimension is the experts."""
    experts: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            experts.update(module.parameters())
    return frozenset(experts)


def _expert_sharding(
    dims: ParallelDims,
    of_model: ShardOver,
    experts: frozenset[nn.Parameter],
    fqn: str,
    parameter: nn.Parameter,
) -> ShardOver | None:
    """Return how to shard experts, if not as the model; None for other parameters.

    Those that `Module.parallelize` has put on the expert mesh are sharded over the ranks that have
    the same experts. Where there are fewer experts than ranks, their second dimension is split, as
    by FSDP2 in torchtitan (`apply_fsdp_to_decoder`, which counts the copies of HSDP as ranks only
    without expert parallelism): a split of the first one would need padding.
    """
    if _is_parallel_expert(parameter):
        ranks = dims.get_mesh("efsdp").size() * dims.ep
        dim = 1 if ranks > parameter.shape[0] else 0
        if dims.dp_replicate_enabled:
            mesh = dims.get_mesh(["dp_replicate", "efsdp"])
            return ShardOver(mesh=mesh, mode="hybrid_shard", dim=dim)
        return ShardOver(mesh=dims.get_mesh("efsdp"), mode="fully_shard", dim=dim)
    if parameter in experts and of_model.mesh.size() > parameter.shape[0]:
        return replace(of_model, dim=1)
    return None


def _is_parallel_expert(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _check_experts(model: nn.Module, dims: ParallelDims) -> None:
    """Refuse a model that expert parallelism leaves as it was, or whose dispatcher is not ours.

    A stage of a pipeline may have no experts: the first layers of DeepSeek V3, or the head.
    """
    key = f"parallelism.expert_parallel_degree is {dims.ep}"
    if not dims.pp_enabled and not any(map(_is_parallel_expert, model.parameters())):
        raise ConfigError(
            f"{key}, and {type(model).__name__} has no experts to divide: set it to 1, or train a "
            "mixture of experts"
        )
    for name, module in model.named_modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None and type(dispatcher) is not AllToAllTokenDispatcher:
            raise ConfigError(
                f"{key}, and '{name}' sends tokens to experts by {type(dispatcher).__name__}, "
                "whose kernels no graph holds: use torchtitan's standard dispatcher, "
                "AllToAllTokenDispatcher, or set the degree to 1"
            )
