"""How much memory a step of this rank may need, as far as its device goes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import torch
from torch import nn
from torchtitan.tools.logging import logger

from graph_trainer.core.analysis.memory import given_bytes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.passes.memory_limit import DeviceMemory
from graph_trainer.core.units import gib
from graph_trainer.titan.config.core_settings import LIMIT_KEY
from graph_trainer.titan.training_state_memory import local_bytes, optimizer_state_bytes

_CGROUPS = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")


class MemoryOfRun:
    """Measures how many bytes the steps of a run may need on this rank.

    Measured at the first graph, and the same for all later ones: the rank's share of the memory
    that is free before the first step, and what it has allocated of the memory that is predicted.
    Later, other ranks are within a step, and allocators keep what they have had.

    Args:
        parameters: of the model, for their gradients.
        optimizers: whose state may have been restored.
    """

    def __init__(
        self,
        device: torch.device,
        parameters: Iterable[nn.Parameter],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        self._device = device
        self._parameters = list(parameters)
        self._optimizers = optimizers
        self._measured: list[DeviceMemory | None] = []
        self._measured_on_host: list[DeviceMemory | None] = []

    def __call__(self, joint: JointGraph) -> DeviceMemory | None:
        """Return the bytes; None, with a warning in the log, where they are unknown."""
        if not self._measured:
            self._measured.append(self._find(joint))
        return self._measured[0]

    def on_host(self, joint: JointGraph) -> DeviceMemory | None:
        """Return the bytes of host memory that the rank may take for copies of activations.

        Measured at the first call, before there are copies. None where they are unknown.
        """
        if not self._measured_on_host:
            try:
                self._measured_on_host.append(share_of_host())
            except (OSError, psutil.Error):
                self._measured_on_host.append(None)
        return self._measured_on_host[0]

    def _find(self, joint: JointGraph) -> DeviceMemory | None:
        try:
            free, source = self._free()
        except (OSError, RuntimeError, AttributeError, psutil.Error) as error:
            logger.warning(
                f"{LIMIT_KEY} is unset, and it is unknown how much memory '{self._device}' has "
                f"free ({error}): a step that does not fit is not refused. Set {LIMIT_KEY} to the "
                "GiB that a step may need there"
            )
            return None
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        here = given_bytes(joint, InputKind.PARAMETER, InputKind.BUFFER, InputKind.BATCH)
        here += local_bytes(gradients) + optimizer_state_bytes(self._optimizers)
        return DeviceMemory(free + here, f"{source}, plus {gib(here)} GiB of it that are allocated")

    def _free(self) -> tuple[int, str]:
        """Return the bytes that this rank may still allocate, and how that is reckoned."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            # what the allocator keeps is free for this process
            free += torch.cuda.memory_reserved(self._device)
            free -= torch.cuda.memory_allocated(self._device)
            return free, f"{gib(free)} GiB free on the GPU"
        if self._device.type != "cpu":
            raise RuntimeError(f"not measured on devices of type '{self._device.type}'")
        return share_of_host()


def share_of_host(ranks: int = 0) -> DeviceMemory:
    """Return a rank's part of what programs may still take; 0 ranks are as many as run here."""
    free, where = available_on_cpu()
    ranks = ranks or max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return DeviceMemory(free // ranks, f"{gib(free)} GiB available {where} / {ranks} ranks")


def available_on_cpu() -> tuple[int, str]:
    """Return the bytes that programs may still take, and which limit that is.

    The limit is the memory of the machine, or that of the control group of this process (a
    container) where less is left.
    """
    limits = [(psutil.virtual_memory().available, "on this machine")]
    limits += [(free, "in this container") for free in _left_in_cgroups()]
    return min(limits)


def _left_in_cgroups() -> Iterator[int]:
    """Yield the bytes that each limit above this process leaves.

    The page cache and reclaimable kernel memory count as free: the kernel drops them first.
    """
    try:
        entries = [line.split(":", 2) for line in _OF_PROCESS.read_text().splitlines()]
    except OSError:  # not Linux
        return
    for _, controllers, path in entries:
        if controllers and "memory" not in controllers.split(","):
            continue
        version_1 = bool(controllers)
        root = _CGROUPS / "memory" if version_1 else _CGROUPS
        names = ("limit_in_bytes", "usage_in_bytes") if version_1 else ("max", "current")
        prefix = "total_" if version_1 else ""
        # a container sees its own group as the root, and the path is then that of the host
        inner = root / path.strip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit, usage = ((folder / f"memory.{name}").read_text().strip() for name in names)
                stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
            except OSError:  # the root of version 2 has no limit
                continue
            if limit != "max":
                read = sum(int(stat.get(f"{prefix}{name}", 0)) for name in _RECLAIMABLE)
                yield max(0, int(limit) - int(usage) + read)
