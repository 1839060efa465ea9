"""The memory limit of a step: what breaks it, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from graph_trainer.core.analysis.memory import Category, Memory
from graph_trainer.core.graph.host_copies import is_copy_to_host
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.context import PassContext, RunSettings
from graph_trainer.core.simulation.detect import detect_for
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.simulate import need_of, predicted_memory
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import MemoryLimitError

LIMIT = "PassConfig.memory_limit_gib"
"""The setting, for messages."""

SMALLER_BATCH = "a smaller batch or shorter sequences"
MORE_SHARDS = "more ranks that shard the parameters"
EVEN_EXPERTS = "OtherMemory.expert_imbalance = 1"
"""What would help and is no setting of passes: parts of messages."""


class DeviceMemory(NamedTuple):
    """The memory that a step of this rank may use."""

    bytes: int
    """The free bytes, and those of the predicted memory that are allocated already."""
    source: str
    """How they were computed, for messages."""


DeviceMemoryOf = Callable[[JointGraph], DeviceMemory | None]


def unknown(joint: JointGraph) -> None:
    """Return None: the memory of the device is not known."""


def host_memory_of(hardware: Hardware) -> DeviceMemoryOf:
    """Return a function that gives each rank its share of the host memory of a profile."""
    shared = f"{hardware.host_memory_gib:,g} GiB of a machine of '{hardware.name}'"
    source = f"{shared} / {hardware.devices_per_node:g} devices"
    memory = DeviceMemory(int(hardware.host_memory_gib * GIB / hardware.devices_per_node), source)
    return lambda joint: memory


class Budget:
    """Compares what a step needs of a device with the limit, with the same result on every rank.

    A rank with a smaller shard than others may be within the limit where they are not, and all
    must run the same passes; so the rank that needs most decides. The limit counts everything that
    a device must have (`need_of`): parameters, buffers, batch, `other_memory`, what the graph
    allocates with its imbalance of experts, the allocator's gaps and the reserve of the hardware's
    profile.

    Without a limit a step that needs more than its device has is refused, but no pass is rolled
    back, so that all devices get the same graph. A limit of 0 refuses nothing.
    """

    def __init__(
        self,
        context: PassContext,
        device_memory: DeviceMemoryOf = unknown,
        host_memory: DeviceMemoryOf = unknown,
        *,
        follows_plan: bool = False,
    ) -> None:
        self._context = context
        self._limit = context.settings.memory_limit_gib
        self._device_memory = device_memory
        self._host_memory = host_memory
        self._follows_plan = follows_plan
        self._latest: tuple[JointGraph, int] | None = None

    @property
    def may_refuse(self) -> bool:
        """Whether there is a limit of device memory, the device's own included."""
        return bool(self._limit) or (self._limit is None and self._device_memory is not unknown)

    def memory(self, joint: JointGraph, hardware: Hardware) -> Memory:
        """Predict the memory of a step on this rank. Linear in nodes."""
        return predicted_memory(joint, hardware, self._context.settings.other_memory(joint))

    def needed(self, joint: JointGraph) -> int:
        """Return the most bytes that any rank needs of its device, remembered for the latest graph
        until `changed` is called. n log n in storages."""
        if self._latest is None or self._latest[0] is not joint:
            self._latest = joint, self._context.needed_on_all_ranks(joint)
        return self._latest[1]

    def changed(self) -> None:
        """Forget what is needed, as the graph has changed."""
        self._latest = None

    def is_over(self, joint: JointGraph) -> bool:
        """Return whether the graph as it is now needs more than the limit."""
        return bool(self._limit) and self.needed(joint) > (self._limit or 0) * GIB

    def why_rolled_back(self, before: int, after: int) -> str:
        """Return the note of the report on a pass that was rolled back, given bytes needed."""
        return (
            f"rolled back: it raises what the step needs by {gib(after - before)} GiB to "
            f"{gib(after)} GiB, optimizer included, and no later pass lowers that enough; "
            f"{LIMIT} is {self._limit:g}"
        )

    def check(self, joint: JointGraph, raised: Mapping[str, int], refuses: bool) -> None:
        """Refuse a graph that needs more than the host has, and more than the limit or the device.

        Args:
            refuses: whether limit and device bind.
            raised: by optional pass that was kept, the bytes by which it raised what is needed.

        Raises:
            MemoryLimitError: on all ranks, with what the memory is for and what would help.
        """
        hardware, settings = self._context.hardware_for(joint), self._context.settings
        other = settings.other_memory(joint)

        def refusal(message: str, hardware: Hardware, remedy: str) -> MemoryLimitError:
            """Add what this rank needs, and what would help."""
            memory = self.memory(joint, hardware)
            even = predicted_memory(joint, hardware, other._replace(expert_imbalance=1.0))
            uneven_bytes = memory.peak_bytes - even.peak_bytes
            helps = what_would_help(memory.peak_by_category(), settings, raised, uneven_bytes)
            needed = what_is_needed(memory, hardware)
            return MemoryLimitError(f"{message} {needed}.\n{remedy} {helps}")

        if refuses and self.is_over(joint):
            planned, needed = "", self.needed(joint)
            if self._follows_plan:
                planned = (
                    "What is kept is planned for the first batch, and every later one follows: let "
                    "the largest come first, and the plan leaves room for it. "
                )
            elif settings.activation_policy == "budget":
                planned = "That is the least, with everything recomputed. "
            message = (
                f"{LIMIT} = {self._limit:g}: the step needs {gib(needed)} GiB on the rank that "
                f"needs most{other.imbalance_text}. {planned}This rank needs"
            )
            raise refusal(message, hardware, f"Raise {LIMIT} to {enough_gib(needed)}, or set")
        if self._host_memory is not unknown and self._limit != 0:
            copies = any(map(is_copy_to_host, joint.graph.nodes))
            need = self.memory(joint, hardware).host_bytes if copies else 0
            room = self._host_memory(joint) if need else None
            if (lack := self._lack(need, room)) > 0:
                raise MemoryLimitError(
                    f"the pass offload_activations needs {gib(lack)} GiB more of host memory than "
                    "there is on the rank that lacks most. This rank keeps "
                    f"{gib(need)} GiB of activations there and has {_text(room)}. Offload less: "
                    "OffloadActivationsOptions.block_inputs = False, a larger "
                    "OffloadActivationsOptions.min_bytes, fewer gt.offload(); or recompute: "
                    f'PassConfig.activation_policy = "full". {LIMIT} = 0 takes the risk'
                )
        if not refuses or not self.may_refuse or self._limit is not None:
            return
        room, here = self._device_memory(joint), detect_for(joint).hardware
        if hardware.device != here.device:  # what is free is free here, wherever it will run
            hardware = here
        need = need_of(self.memory(joint, hardware), hardware).total
        if (lack := self._lack(need, room)) > 0:
            message = (
                f"{LIMIT} is unset, and the step needs {gib(lack)} GiB more than there is on the "
                f"rank that lacks most{other.imbalance_text}. This rank has {_text(room)}; it needs"
            )
            raise refusal(message, hardware, f"Take the risk with {LIMIT} = 0, or set")

    def _lack(self, need: int, room: DeviceMemory | None) -> int:
        """Return the most bytes that any rank lacks; a rank of unknown memory takes part too."""
        mine = -(2**62) if room is None else need - room.bytes
        return self._context.agreement.all_reduce_max(mine)


def enough_gib(needed: int) -> str:
    """Format the smallest limit in GiB, to two digits, that allows so many bytes."""
    return f"{math.ceil(100 * needed / GIB) / 100:.2f}"


def _text(room: DeviceMemory | None) -> str:
    return "unknown" if room is None else f"{gib(room.bytes)} GiB: {room.source}"


def what_is_needed(memory: Memory, hardware: Hardware) -> str:
    """Describe in GiB what a step needs of its device and for what, the most first."""
    need = need_of(memory, hardware)
    parts = {c.value.replace("_", " "): size for c, size in memory.peak_by_category().items()}
    parts["gaps of the allocator"] = need.allocated - need.alive
    parts["reserved for driver and communication"] = need.total - need.allocated
    listed = ", ".join(
        f"{name} {gib(size)}"
        for name, size in sorted(parts.items(), key=lambda entry: -entry[1])
        if size > need.total / 1000
    )
    return f"{gib(need.total)} GiB at its predicted peak: {listed}"


def what_would_help(
    at_peak: Mapping[Category, int],
    settings: RunSettings,
    raised: Mapping[str, int] = {},
    uneven_bytes: int = 0,
) -> str:
    """List the changes that free memory at the peak, the one that frees most first.

    Args:
        at_peak: bytes of each category at the peak.
        settings: of the run.
        raised: by optional pass that was kept, the bytes by which it raised the peak.
        uneven_bytes: the bytes by which an imbalance of experts raises the peak.
    """
    freed = {f'PassConfig.disable_passes = ["{name}"]': size for name, size in raised.items()}

    def frees(text: str, *categories: Category) -> None:
        freed[text] = sum(at_peak[category] for category in categories)

    if settings.reshard_after_forward not in ("always", "auto"):
        always = 'PassConfig.reshard_after_forward = "always": gather parameters again in backward'
        frees(always, Category.UNSHARDED)
    if settings.activation_policy not in ("full", "budget"):
        full = 'PassConfig.activation_policy = "full": compute activations again'
        frees(full, Category.ACTIVATIONS)
    frees(SMALLER_BATCH, Category.ACTIVATIONS, Category.TEMPORARIES)
    frees(MORE_SHARDS, Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.GRADIENTS)
    freed[f"{EVEN_EXPERTS}: memory for even shares of the tokens"] = uneven_bytes
    lines = ["what would help, with what it frees here at most:"]
    for text, size in sorted(freed.items(), key=lambda entry: -entry[1]):
        if size > sum(at_peak.values()) / 1000:  # freeing less would not help
            lines.append(f"  {text} ({gib(size)} GiB)")
    return "\n".join(lines)
