"""What a pass asks that decides by simulation, and how all ranks come to the same answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.memory_limit import Agree, HeldBytes, alone, nothing_held
from graph_trainer.core.simulation.hardware import Hardware, known_hardware
from graph_trainer.core.simulation.simulate import Simulation, simulate
from graph_trainer.core.units import GIB
from graph_trainer.errors import PassError

KEY = "compile.hardware"

_PER_SECOND = 10**9


def fingerprint(decision: object) -> int:
    """A number for what a rank has decided, to compare with other ranks' (`is_shared`)."""
    return int.from_bytes(hashlib.sha256(repr(decision).encode()).digest()[:7], "big")


def nothing_behind(joint: JointGraph) -> None:
    """For a graph that no further pass runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """The machine that a graph will run on. The pipeline hands it to options that have one."""

    hardware: Hardware | None = None
    held: HeldBytes = nothing_held
    limit_gib: float | None = None
    """What a step may need, as `PassConfig.memory_limit_gib` has it."""
    agree: Agree = alone
    """Makes of this rank's number the largest of all ranks'; called equally often on each."""
    behind: Callable[[JointGraph], None] = nothing_behind
    """Runs the passes that come later, on a graph that is to be simulated as it will run."""

    def machine(self, asked_by: str) -> Hardware:
        """The hardware profile.

        Arguments:
            asked_by: the key and value that need one, for the message.

        Raises:
            PassError: nobody named one.
        """
        if self.hardware is None:
            raise PassError(
                f"{asked_by} decides by simulation and no hardware is named: set {KEY} to one of "
                f"{', '.join(known_hardware())}, or to the path of a profile of your own"
            )
        return self.hardware

    def simulate(self, joint: JointGraph, asked_by: str) -> Simulation:
        """This rank's step as the graph is now. Raises as `machine` does. Linear in nodes."""
        held = self.held(joint)
        return simulate(
            joint,
            self.machine(asked_by),
            optimizer_bytes=held.optimizer_bytes,
            accumulated_bytes=held.accumulated_bytes,
            fused=held.fused,
        )

    def is_shared(self, number: int) -> bool:
        """Whether all ranks have come to the same number."""
        return self.agree(number) == -self.agree(-number)

    def outcome(self, joint: JointGraph, asked_by: str) -> tuple[float, int, bool]:
        """What a graph comes to with the passes behind: seconds of a step on the slowest rank,
        bytes on the rank that needs most, and whether that is within the memory limit.

        The graph itself does not change.
        """
        trial = copy_graph(joint)
        self.behind(trial)
        found = self.simulate(trial, asked_by)
        seconds = self.agree(round(found.timeline.step_seconds * _PER_SECOND)) / _PER_SECOND
        peak = self.agree(found.memory.peak_bytes)
        return seconds, peak, self.limit_gib is None or peak <= self.limit_gib * GIB
