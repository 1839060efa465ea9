"""Tensor parallelism, activation checkpointing and SimpleFSDP on any torchtitan decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.tools.logging import logger

from graph_trainer.core.sharding.initialize import SameOnAnyMesh
from graph_trainer.core.sharding.simple_fsdp import (
    MixedPrecisionPolicy,
    Mode,
    sharded_parameters,
    simple_fsdp,
)
from graph_trainer.errors import ConfigError


def parallelize_decoder(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
) -> nn.Module:
    """Parallelize a decoder on meta, in place. torchtitan calls this as a `parallelize_fn`.

    Tensor and sequence parallelism follow the sharding configuration of the model; data
    parallelism is `simple_fsdp` in the mode that the degrees decide. Gradients are summed, not
    averaged: torchtitan's loss is divided by the global number of tokens already.

    Args:
        model: a torchtitan decoder.
        parallel_dims: the meshes.
        training: dtypes of mixed precision.
        parallelism: the section [parallelism].
        compile_config: the section [compile]; unused.
        ac_config: activation checkpointing; None for none.
        dump_folder: where activation checkpointing may write.

    Returns:
        The model.

    Raises:
        ConfigError: a parallelism that a captured step does not support.
    """
    _check_supported(parallel_dims, parallelism, training)
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)  # type: ignore[operator]
        _tie_again(model)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    mode, mesh = _data_parallel_mesh(parallel_dims)
    simple_fsdp(
        model,
        mesh,
        mode,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        ),
        gradient_divide_factor=1.0,
    )
    logger.info(f"Applied SimpleFSDP ({mode}) over {mesh.size()} data-parallel ranks")
    _initialize_shards(model)
    return model


def _check_supported(
    parallel_dims: ParallelDims, parallelism: ParallelismConfig, training: TrainingConfig
) -> None:
    if parallelism.spmd_backend != "partial_dtensor":
        raise ConfigError(
            f"parallelism.spmd_backend is '{parallelism.spmd_backend}'; graph_trainer shards "
            "with DTensors: set it to 'partial_dtensor'"
        )
    for key, degree in (
        ("pipeline_parallel_degree", parallel_dims.pp),
        ("context_parallel_degree", parallel_dims.cp),
        ("expert_parallel_degree", parallel_dims.ep),
    ):
        if degree > 1:
            raise ConfigError(
                f"parallelism.{key} is {degree}; graph_trainer does not support it yet: set it to 1"
            )
    if training.enable_cpu_offload:
        raise ConfigError(
            "training.enable_cpu_offload is true; a captured step keeps parameters on their "
            "device: set it to false"
        )


def _data_parallel_mesh(parallel_dims: ParallelDims) -> tuple[Mode, Any]:
    if not parallel_dims.dp_replicate_enabled:
        return "fully_shard", parallel_dims.get_mesh("fsdp")
    if parallel_dims.dp_shard_enabled:
        return "hybrid_shard", parallel_dims.get_mesh(["dp_replicate", "fsdp"])
    return "replicate", parallel_dims.get_mesh("dp_replicate")


def _tie_again(model: nn.Module) -> None:
    """Tie embedding and output head again: tensor parallelism has distributed each of them.

    torchtitan ties them again only when it initializes the model, which a plan never does.
    """
    if getattr(model, "enable_weight_tying", False):
        model.tok_embeddings.weight = model.lm_head.weight  # type: ignore[union-attr]


def _initialize_shards(model: nn.Module) -> None:
    """Let the model's initialisation write shards, with the same numbers on any mesh."""
    initialize = model.init_states

    def init_states(*, buffer_device: torch.device | None = None) -> None:
        with sharded_parameters(), SameOnAnyMesh():
            initialize(buffer_device=buffer_device)  # type: ignore[operator]

    model.init_states = init_states  # type: ignore[assignment]
