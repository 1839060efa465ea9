"""Make loss function and passes of a captured step, for the trainer and the planner alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchtitan.distributed import ParallelDims

from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.core.simulation.hardware import Hardware, load_hardware
from graph_trainer.titan.activation_policies import activation_settings
from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from graph_trainer.titan.config.run_config import GraphTrainerConfig, changed_sections
from graph_trainer.titan.training_state_memory import other_memory_of


def attach_loss(loss_fn: Callable[..., Any], model: nn.Module) -> None:
    """Give the chunked loss the output head of the parallelized model; leave others alone."""
    if isinstance(loss_fn, ChunkedCrossEntropyLoss):
        loss_fn.attach(model)


def batch_of_zeros(
    rows: int, seq_len: int, device: torch.device | str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Make a batch with the shapes and dtypes of the text loaders'.

    Returns:
        ({"input": ..., "positions": ...}, labels), each int64 [rows, seq_len].
    """
    inputs, positions, labels = (
        torch.zeros(rows, seq_len, dtype=torch.int64, device=device) for _ in range(3)
    )
    return {"input": inputs, "positions": positions}, labels


def loss_of_batch(loss_fn: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Make the function that is captured from torchtitan's loss.

    Args:
        loss_fn: torchtitan's loss: (prediction, labels, number of valid tokens) -> (loss, ...).

    Returns:
        `f(model, inputs, labels, global_valid_tokens, **extra)` -> scalar loss; inputs and
        labels are int64 [local batch, sequence], global_valid_tokens an int64 scalar that may be
        left out, and `extra` goes to the model.
    """

    def loss(model: nn.Module, *batch: torch.Tensor, **extra: Any) -> torch.Tensor:
        inputs, *labels_and_tokens = batch
        prediction = model(inputs, **extra)
        positions = {"positions": extra["positions"]} if "positions" in extra else {}
        value, _ = loss_fn(prediction, *labels_and_tokens, **positions)
        return value

    return loss


def pass_config(config: GraphTrainerConfig) -> PassConfig:
    """Return what a config alone says of the passes: the list, their options and the settings.

    Raises:
        PassError: settings that exclude each other.
        ConfigError: `compile.hardware` or the memory table cannot be read.
    """
    ours, hardware = config.compile, None
    if ours.hardware is not None:
        hardware = load_hardware(ours.hardware, "compile.hardware")
    sections = changed_sections(ours).items()
    return PassConfig(
        passes=tuple(ours.passes),
        disable_passes=tuple(ours.disable_passes),
        options={pass_.name: getattr(ours, section) for section, pass_ in sections},
        bitwise=ours.bitwise,
        verify_passes=ours.verify_passes,
        memory_limit_gib=ours.memory_limit_gib,
        allow_offload=ours.allow_offload,
        hardware=hardware,
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
        **activation_settings(config.activation_checkpoint),
    )


def passes_of(
    config: GraphTrainerConfig,
    parallel_dims: ParallelDims,
    hardware: Hardware | None = None,
    **of_machine: Any,
) -> PassConfig:
    """Return `pass_config` for the ranks of a run.

    Args:
        hardware: the profile where `compile.hardware` names none.
        of_machine: other fields of `PassConfig` that no config decides: what the device and the
            host have.

    Raises:
        PassError, ConfigError: as `pass_config`.
    """
    passes = pass_config(config)
    return replace(
        passes,
        hardware=passes.hardware or hardware,
        pipeline_parallel=parallel_dims.pp_enabled,
        other_memory=other_memory_of(config, parallel_dims.dp_replicate * parallel_dims.dp_shard),
        **of_machine,
    )
