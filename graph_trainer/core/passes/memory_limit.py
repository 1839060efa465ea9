"""What a step may need of a device's memory: a limit that optional passes may not break either."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from graph_trainer.core.analysis.memory import Category, Memory
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.report import Report
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.simulate import predicted_memory
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import MemoryLimitError, PassError

KEY = "compile.memory_limit_gib"


class DeviceMemory(NamedTuple):
    """What a step of this rank may need, as far as its device goes."""

    bytes: int
    """What is free, and what of the predicted memory is allocated already."""
    source: str
    """How that is reckoned, for messages."""


DeviceMemoryOf = Callable[[JointGraph], DeviceMemory | None]


def unknown(joint: JointGraph) -> None:
    """Say that a device tells nothing of its memory."""


def host_memory_of(hardware: Hardware) -> DeviceMemoryOf:
    """Return what tells the host memory that a rank may take on a machine of a profile."""
    shared = f"{hardware.host_memory_gib:,g} GiB of a machine of '{hardware.name}'"
    source = f"{shared} / {hardware.devices_per_node:g} devices"
    found = DeviceMemory(int(hardware.host_memory_gib * GIB / hardware.devices_per_node), source)
    return lambda joint: found


class Budget:
    """Compares predicted peaks with the limit, with the same result on every rank.

    A rank with a smaller shard than others may be within the limit where they are not, and all
    must run the same passes; so the peak of the rank that needs most decides. The limit counts
    everything on the device: parameters, buffers, batch, what `other_memory` says, and what the
    graph allocates. One below 0 is a PassError.

    Without a limit, what the device has bounds the step and no pass, so that all devices get the
    same graph; a limit of 0 bounds nothing.
    """

    def __init__(
        self,
        context: PassContext,
        device_memory: DeviceMemoryOf = unknown,
        host_memory: DeviceMemoryOf = unknown,
    ) -> None:
        limit = context.memory_limit_gib
        if limit is not None and not 0 <= limit < math.inf:
            raise PassError(
                f"{KEY} = {limit}: not a limit; write GiB above 0, None for what the device has, "
                "or 0 to refuse nothing"
            )
        self._context = context
        self._limit = limit
        self._device_memory = device_memory
        self._host_memory = host_memory
        self._latest: int | None = None

    @property
    def limits_passes(self) -> bool:
        """Whether there is a limit for which passes are rolled back."""
        return bool(self._limit)

    def memory(self, joint: JointGraph) -> Memory:
        """Predict the memory of a step on this rank. Linear in nodes."""
        return predicted_memory(joint, self._context.other_memory(joint))

    def peak(self, joint: JointGraph) -> int:
        """Return the predicted peak, in bytes, of the rank that needs most. The result is kept
        until `changed` is called."""
        if self._latest is None:
            self._latest = self._context.all_reduce_max(self.memory(joint).peak_bytes)
        return self._latest

    def changed(self) -> None:
        """Forget the peak, as the graph has changed."""
        self._latest = None

    def is_over(self, joint: JointGraph) -> bool:
        """Return whether the graph as it is now needs more than the limit."""
        return bool(self._limit) and self.peak(joint) > (self._limit or 0) * GIB

    def why_rolled_back(self, before: int, after: int) -> str:
        """Return what the report says of a pass that was rolled back, given peaks in bytes."""
        return (
            f"rolled back: it raises what the step needs by {gib(after - before)} GiB to "
            f"{gib(after)} GiB, optimizer included; {KEY} is {self._limit:g}"
        )

    def check(self, joint: JointGraph, report: Report, raised: Mapping[str, int]) -> None:
        """Refuse a graph that needs more than the limit after all passes, or than a device or its
        host has.

        Args:
            report: of all passes.
            raised: by optional pass that was kept, the bytes by which it raised the peak.

        Raises:
            MemoryLimitError: it does, on every rank alike, with what the memory is for and what
                helps.
        """
        if self.is_over(joint):
            needs = f"{gib(self.peak(joint))} GiB at its predicted peak on the rank that needs most"
            raise MemoryLimitError(
                f"{KEY} = {self._limit:g}: the step needs {needs}. This rank: "
                f"{self._advice(joint, report, raised, f'Raise {KEY}, or set')}"
            )
        self._check_host(joint)
        if self._limit is not None or self._device_memory is unknown:
            return
        room, need = self._device_memory(joint), self.memory(joint).peak_bytes
        # a rank that knows nothing has to take part
        lack = self._context.all_reduce_max(-_ENDLESS if room is None else need - room.bytes)
        if lack > 0:
            has = "unknown" if room is None else f"{gib(room.bytes)} GiB: {room.source}"
            needs = self._advice(joint, report, raised, f"Take the risk with {KEY} = 0, or set")
            raise MemoryLimitError(
                f"{KEY} is unset, and the step needs {gib(lack)} GiB more than there is on the "
                f"rank that lacks most. This rank has {has}; it needs {needs}"
            )

    def _check_host(self, joint: JointGraph) -> None:
        """Refuse copies in host memory that it has no room for, on every rank alike."""
        if self._host_memory is unknown or self._limit == 0:
            return
        need = self.memory(joint).host_bytes
        room = self._host_memory(joint) if need else None
        lack = self._context.all_reduce_max(-_ENDLESS if room is None else need - room.bytes)
        if lack > 0:
            has = "unknown" if room is None else f"{gib(room.bytes)} GiB: {room.source}"
            raise MemoryLimitError(
                f"compile.offload_activations needs {gib(lack)} GiB more of host memory than there "
                f"is on the rank that lacks most. This rank keeps {gib(need)} GiB of activations "
                f"there and has {has}. Offload less: compile.offload_activations.block_inputs = "
                "false, a larger compile.offload_activations.min_bytes, fewer gt.offload(); or "
                f'recompute: activation_checkpoint.type = "full". {KEY} = 0 takes the risk'
            )

    def _advice(
        self, joint: JointGraph, report: Report, raised: Mapping[str, int], first: str
    ) -> str:
        """Say what this rank needs and for what, what each pass did to it, and what helps."""
        memory = self.memory(joint)
        at_peak = memory.peak_by_category()
        parts = ", ".join(
            f"{category.value.replace('_', ' ')} {gib(size)}"
            for category, size in sorted(at_peak.items(), key=lambda entry: -entry[1])
            if size > memory.peak_bytes / 1000
        )
        reshards = self._context.reshard_after_forward == "always"
        found = remedies(at_peak, reshards=reshards, raised=raised)
        return (
            f"{gib(memory.peak_bytes)} GiB at its predicted peak, of which {parts}.\n{report}\n"
            f"{first} what would help, with what it frees here at most:\n"
            + "\n".join(f"  {line}" for line in found)
        )


_ENDLESS = 2**62
_STATE = (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.GRADIENTS)
_REMEDIES: tuple[tuple[tuple[Category, ...], str], ...] = (
    (
        (Category.UNSHARDED,),
        'parallelism.fsdp_reshard_after_forward = "always": gather parameters again in backward',
    ),
    (
        (Category.ACTIVATIONS,),
        'activation_checkpoint.type = "selective" or "full": compute activations again',
    ),
    (
        (Category.ACTIVATIONS, Category.TEMPORARIES),
        "a smaller training.local_batch_size or training.seq_len",
    ),
    (_STATE, "a larger parallelism.data_parallel_shard_degree, on more ranks"),
)


def remedies(
    at_peak: Mapping[Category, int], *, reshards: bool = False, raised: Mapping[str, int] = {}
) -> list[str]:
    """Return settings that need less memory, the one that concerns most bytes first.

    Args:
        at_peak: bytes of each category at the peak.
        reshards: whether every parameter is gathered again in backward already.
        raised: by optional pass that was kept, the bytes by which it raised the peak.
    """
    concerned = [
        (sum(at_peak[c] for c in kinds), text)
        for kinds, text in _REMEDIES
        if not (reshards and kinds == (Category.UNSHARDED,))
    ]
    concerned += [(size, f'compile.disable_passes = ["{name}"]') for name, size in raised.items()]
    concerned.sort(key=lambda entry: -entry[0])
    least = sum(at_peak.values()) / 1000  # what concerns less is no help
    return [f"{text} ({gib(size)} GiB)" for size, text in concerned if size > least]
