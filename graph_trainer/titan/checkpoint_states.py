"""What a checkpoint holds beside the model, the random generators of every rank among it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    OPTIMIZER,
    TRAIN_STATE,
)
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.distributed import ParallelDims

GENERATORS: Final = "generators"

StateName = Literal["optimizer", "lr_scheduler", "dataloader", "train_state", "generators"]
WITHOUT: dict[StateName, str] = {
    OPTIMIZER: "its moments begin at zero; the learning rate follows the schedule",
    LR_SCHEDULER: "the learning rate begins with the first step of the schedule",
    DATALOADER: "data are read from their beginning",
    TRAIN_STATE: "steps and tokens are counted from zero",
    GENERATORS: "random numbers, as of dropout, come from debug.seed and the step",
}
"""The states of a checkpoint beside the model, and what starts anew where one is not loaded."""


class Generators(Stateful):
    """The random generators of this rank, the CPU's and the device's, as a state of checkpoints.

    Its names in a checkpoint hold the mesh and the rank: a run on another mesh has other names,
    as each of its ranks computes another part of the step.
    """

    def __init__(self, dims: ParallelDims, device: torch.device) -> None:
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        degrees = [f"{name} {getattr(dims, name)}" for name in names if getattr(dims, name) > 1]
        self.mesh = " x ".join(degrees) or "one rank"
        self._rank = f"rank {dist.get_rank()}"
        self._device = device
        self._seed = torch.initial_seed()  # as torchtitan's set_determinism left it

    def state_dict(self) -> dict[str, Any]:
        """Return the states, uint8 tensors on the CPU: 5 KB, and 16 bytes of a GPU."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type != "cpu":
            states[self._device.type] = torch.get_device_module(self._device).get_rng_state()
        return {self.mesh: {self._rank: states}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the generators go on from what `state_dict` returned."""
        states = dict(state_dict[self.mesh][self._rank])
        torch.set_rng_state(states.pop("cpu"))
        for state in states.values():
            torch.get_device_module(self._device).set_rng_state(state)

    def seed(self, step: int) -> None:
        """Seed the generators from the seed of the run and a step, so that no step's numbers are
        drawn again; alike on all ranks that torchtitan seeds alike."""
        digest = hashlib.sha256(f"{self._seed} {step}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big"))


def keep_generators_from(dataloader: BaseDataLoader) -> None:
    """Let a loader of torch's draw the seed of its workers from a generator of its own.

    Each iterator draws one, by default from the generator of the step; and a run that goes on makes
    an iterator after its generators are loaded.
    """
    if isinstance(dataloader, DataLoader):
        dataloader.generator = torch.Generator().manual_seed(torch.initial_seed())


def describe_excluded(names: Iterable[StateName]) -> str:
    """Format what starts anew where these states are not loaded."""
    return "; ".join(f"{name} ({WITHOUT[name]})" for name in names)


def set_learning_rates(schedulers: LRSchedulersContainer) -> None:
    """Give each optimizer the rate of its schedule, which loading changes in the schedule alone."""
    for scheduler in schedulers:
        for group, rate in zip(
            scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True
        ):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
