"""Llama 3 on meta, parallelized for one rank of many fake ones, as torchtitan's trainer does it.

Side "ours" or "peer": graph_trainer or torchtitan.experiments.graph_trainer 0.3.0, on the same
model with the same attention (scaled dot product) and the same loss (plain cross-entropy).
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.device import setup
from graph_trainer.titan.parallelize import parallelized

setup()  # before any torchtitan import

from torchtitan.distributed import ParallelDims, utils as dist_utils  # noqa: E402  # isort: skip

Side = Literal["ours", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is captured."""

    config: str = "8b"
    """Name of a shipped config: "debugmodel", "8b" and so on."""
    layers: int | None = None
    """Number of layers; None leaves the model's own."""
    fsdp: int = 16
    tp: int = 8
    batch: int = 2
    sequence: int = 8192
    policy: str = "default"
    """fsdp_reshard_after_forward."""

    @property
    def ranks(self) -> int:
        """The number of ranks that the degrees multiply to."""
        return self.fsdp * self.tp


@dataclass(frozen=True, slots=True)
class Prepared:
    """What capture takes."""

    config: Any
    model: nn.Module
    loss_fn: Any
    parallel_dims: ParallelDims
    inputs: torch.Tensor
    labels: torch.Tensor
    valid_tokens: torch.Tensor
    positions: torch.Tensor

    def batch(self) -> tuple[torch.Tensor, ...]:
        """What a step takes, in order."""
        return self.inputs, self.labels, self.valid_tokens, self.positions


def prepare(case: Case, side: Side) -> Prepared:
    """Be rank 0 of `case.ranks` fake ranks and build the model on meta."""
    os.environ.update(WORLD_SIZE=str(case.ranks), RANK="0", LOCAL_RANK="0", NGPU=str(case.ranks))
    config = load_config(
        [
            *("--config", case.config, "--comm.mode", "fake_backend"),
            *("--training.local_batch_size", str(case.batch)),
            *("--training.seq_len", str(case.sequence)),
            *("--parallelism.data_parallel_shard_degree", str(case.fsdp)),
            *("--parallelism.tensor_parallel_degree", str(case.tp)),
            *("--parallelism.fsdp_reshard_after_forward", case.policy),
            *("--activation_checkpoint.type", "none", "--loss.type", "cross_entropy"),
        ],
        world_size=case.ranks,
    )
    if side == "peer":
        from benchmarks.peer import config_of_peer

        config = config_of_peer(config)
    dist_utils.init_fake_mode(case.ranks)
    dist_utils.set_spmd_backend("partial_dtensor")
    dims = ParallelDims.from_config(config.parallelism, case.ranks)
    spec = config.model_spec
    if case.layers is not None:
        first = spec.model.layers[0]
        spec.model.layers = [copy.deepcopy(first) for _ in range(case.layers)]
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
        inputs, labels, positions = torch.zeros(3, case.batch, case.sequence, dtype=torch.int64)
        valid_tokens = torch.zeros((), dtype=torch.int64)
    model = parallelized(model, config, dims)
    loss_fn = config.loss.build(compile_config=config.compile)
    return Prepared(config, model, loss_fn, dims, inputs, labels, valid_tokens, positions)
