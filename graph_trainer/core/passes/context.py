"""What a pass may ask about the run: its settings, its machine, and what other ranks have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.ordering.agreement import Agreement, OneRank
from graph_trainer.core.passes.memory_table import MemoryTable
from graph_trainer.core.simulation.detect import HARDWARE, Detected, detect_for
from graph_trainer.core.simulation.hardware import Hardware, known_hardware
from graph_trainer.core.simulation.simulate import (
    NO_OTHER_MEMORY,
    OtherMemory,
    Simulation,
    need_of,
    predicted_memory,
    simulate,
)
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.core.units import GIB, NANOSECONDS
from graph_trainer.errors import PassError

ReshardAfterForward = Literal["default", "always", "never", "auto"]
ActivationPolicy = Literal["none", "selective", "full", "layers", "budget", "file", "user"]

OtherMemoryOf = Callable[[JointGraph], OtherMemory]


def check_choice(name: str, value: object, literal: Any) -> None:
    """Refuse a value that is none of a Literal's, with a PassError that lists them and guesses."""
    known = get_args(literal)
    if value not in known:
        hint = did_you_mean(str(value), known, " (did you mean '{}'?)")
        raise PassError(f"{name} is {value!r}{hint}; it must be one of {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run, beside the options of each pass."""

    reshard_after_forward: ReshardAfterForward | None = None
    """Which parameters are freed after forward and gathered again in backward. "always": all
    that backward reads. "never": none. "default": all but the last bucket (final norm and output
    head), since backward starts with it. "auto": chosen by `plan_memory` within
    `memory_limit_gib`. The passes that carry out a value are added to a list without them. None
    adds none: it is "default" where the list has `tag_fsdp_unshards` and `rematerialize`, and
    "never" where it has not."""

    activation_policy: ActivationPolicy = "none"
    """Which activations are freed after forward and computed again in backward, in every block:
    "none", "selective", or "full" for all but the block's input; "layers" for "full" on every nth
    block. See `tag_activations`. "budget": what makes the step fastest within `memory_limit_gib`,
    "file": what `memory_table` says; see `plan_memory`. "user": what checkpoints in the model ask
    for, which every policy carries out, and nothing else."""

    recompute_matmuls_of: tuple[str, ...] = ()
    """Parts of module names whose matrix products "selective" recomputes without counting them.
    Read under "selective" alone."""

    recompute_every_nth_block: int = 2
    """Of which blocks "layers" keeps the input only: every nth, counted from 1. With 3 the third is
    the first. Read under "layers" alone."""

    memory_table: MemoryTable | None = None
    """The `MemoryTable` that "file" follows. Read under "file" alone."""

    allow_offload: bool = False
    """Whether "budget" may keep inputs of blocks in host memory, where the device has its own.
    Read under "budget" alone."""

    pipeline_parallel: bool = False
    """Whether the graph is that of one pipeline stage: "default" then keeps every parameter, as
    a gather per microbatch costs more than it saves."""

    bitwise: bool = False
    """Whether no pass may change the order of a sum, on any transport."""

    hardware: Hardware | None = None
    """The machine that the step will run on, for passes that decide by simulation. None for the
    machine that is there."""

    memory_limit_gib: float | None = None
    """The GiB that a device must have at most, parameters, gaps of the allocator and the reserve of
    the hardware's profile included (`need_of`): an optional pass that breaks the limit is rolled
    back where no later pass mends it, and a graph that breaks it without them is refused. None for
    no limit but what the device has, where `PassConfig.device_memory` tells that; 0 for none."""

    other_memory: OtherMemoryOf = lambda joint: NO_OTHER_MEMORY
    """What counts against the limit beside the graph and its inputs, given the graph."""

    def __post_init__(self) -> None:
        if self.reshard_after_forward is not None:
            name = "PassConfig.reshard_after_forward"
            check_choice(name, self.reshard_after_forward, ReshardAfterForward)
        check_choice("PassConfig.activation_policy", self.activation_policy, ActivationPolicy)
        if self.recompute_every_nth_block < 1:
            raise PassError(
                f"PassConfig.recompute_every_nth_block is {self.recompute_every_nth_block}; it "
                "must be 1 or more. To recompute nothing set PassConfig.activation_policy = "
                '"none"'
            )
        limit = self.memory_limit_gib
        if limit is not None and not 0 <= limit < math.inf:
            raise PassError(
                f"PassConfig.memory_limit_gib = {limit}: not a limit; write GiB above 0, None for "
                "what the device has, or 0 to refuse nothing"
            )
        fills_limit = self.activation_policy == "budget" or (
            self.reshard_after_forward == "auto" and self.activation_policy != "file"
        )
        if fills_limit and not limit:
            policy = f'PassConfig.activation_policy = "{self.activation_policy}"'
            if self.activation_policy != "budget":
                policy = 'PassConfig.reshard_after_forward = "auto"'
            raise PassError(
                f"PassConfig.memory_limit_gib: {policy} fills a memory limit, and there is none: "
                "set the GiB that a step may need on a device, such as 72 on one of 80 GiB"
            )
        if self.activation_policy != "file":
            return
        if not isinstance(self.memory_table, MemoryTable):
            raise PassError(
                f"PassConfig.memory_table is {self.memory_table!r}, and PassConfig."
                'activation_policy = "file" follows it: give it a MemoryTable, what a step under a '
                "limit left in joint.decisions or one read from a file"
            )
        decides, asked = self.memory_table.parameters is not None, self.reshard_after_forward
        if decides and asked in ("always", "never"):
            raise PassError(
                "PassConfig.memory_table: the table lists the parameters that stay unsharded, and "
                f'PassConfig.reshard_after_forward = "{asked}" decides that too: set it to '
                '"default", or take keep_unsharded out of the table'
            )
        if not decides and asked == "auto":
            raise PassError(
                'PassConfig.memory_table: PassConfig.reshard_after_forward = "auto" and the table '
                'has no keep_unsharded: set it to "default", "always" or "never", or let '
                'PassConfig.activation_policy = "budget" decide about both'
            )


class SlowestStep(NamedTuple):
    """A simulated step, each number that of the rank on which it is largest."""

    needed: int
    """Bytes that a device must have."""
    nanoseconds: int
    waits: int
    """Nanoseconds that compute waits for communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What a pass may know beside its options. The pipeline makes one for each pass."""

    settings: RunSettings = RunSettings()
    """Those of the run, the same object for every pass."""
    agreement: Agreement = OneRank()
    """The ranks that run the graph together, so that all of them decide alike."""
    hardware: Hardware | None = None
    """What `settings.hardware` names, or else what the ranks have agreed on for passes that declare
    `needs_hardware`; None where no pass does."""
    decided: Any = None
    """What this pass has put into `joint.decisions` for an earlier graph of the step, to be
    followed; None where this is the first."""
    run_later_passes: Callable[..., None] = lambda joint, before=None: None
    """Runs the passes that come after this one on a copy of the graph, before a simulation: all of
    them, or with a second argument those before a `Stage`."""

    def hardware_for(self, joint: JointGraph) -> Hardware:
        """Return the profile to simulate a graph on: `hardware`, else that of the machine."""
        return self.hardware or detect_for(joint).hardware

    def simulate(self, joint: JointGraph) -> Simulation:
        """Simulate this rank's step as the graph is now. Linear in nodes."""
        return simulate(joint, self.hardware_for(joint), self.settings.other_memory(joint))

    def allowed_bytes(self, joint: JointGraph) -> int:
        """Return the bytes that a step may need: the memory limit, else what a device of the
        profile has, whatever this rank's device has free."""
        limit = self.settings.memory_limit_gib
        return int(limit * GIB) if limit else self.hardware_for(joint).memory_bytes

    def needed_on_all_ranks(self, joint: JointGraph) -> int:
        """Return the most bytes that any rank needs of its device, as the graph is now. One
        all-reduce. n log n in storages."""
        hardware = self.hardware_for(joint)
        memory = predicted_memory(joint, hardware, self.settings.other_memory(joint))
        return self.agreement.all_reduce_max(need_of(memory, hardware).total)

    def simulate_on_all_ranks(self, joint: JointGraph) -> SlowestStep:
        """Simulate every rank's step as the graph is now. Three all-reduces. Linear in nodes."""
        simulation, largest = self.simulate(joint), self.agreement.all_reduce_max
        waits = sum(wait.seconds for wait in simulation.timeline.exposed)
        return SlowestStep(
            largest(simulation.need().total),
            largest(round(simulation.timeline.step_seconds * NANOSECONDS)),
            largest(round(waits * NANOSECONDS)),
        )


def detect_on_all_ranks(joint: JointGraph, agreement: Agreement) -> Detected:
    """Choose the profile of the machine, the same on all ranks; a PassError where they run on
    different devices. Two all-reduces."""
    detected, names = detect_for(joint), list(known_hardware())
    place = names.index(detected.hardware.name)
    last = names[agreement.all_reduce_max(place)]
    first = names[-agreement.all_reduce_max(-place)]
    if first != last:
        raise PassError(
            f"{HARDWARE} is unset and the ranks run on different devices, of the profiles "
            f"{first} and {last} among others, so that each would make another step (this rank: "
            f"{detected.why}). Set {HARDWARE} to one of them for all, that of the slower "
            "device for one"
        )
    return detected
