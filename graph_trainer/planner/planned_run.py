"""A run that has a plan: checked before its first step, measured, and compared at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.planner.comparison import Comparison, comparison, save, show
from graph_trainer.planner.fingerprint import fingerprint_of
from graph_trainer.planner.run_metrics import (
    WATCHED_STEP,
    Measured,
    StepTimes,
    Watch,
    local_bytes,
    optimizer_state_bytes,
)

if TYPE_CHECKING:
    from graph_trainer.planner.plan_check import HeldTo


class PlannedRun:
    """One rank's side of a run that is held to a plan.

    Arguments:
        device: what the rank trains on.
        rank: its global rank.
        backend: what the graph is compiled with.
    """

    def __init__(self, held_to: HeldTo, device: torch.device, rank: int, backend: str) -> None:
        self.times = StepTimes(device)
        self._held_to = held_to
        self._device = device
        self._rank = rank
        self._watch = Watch(sees_memory=backend == "eager")
        self._gradient_bytes: int | None = None
        self._peak: int | None = None
        self._reserved: int | None = None

    def check(self, joint: JointGraph) -> None:
        """Refuse another graph than the planned one. Raises VerificationError."""
        captured = fingerprint_of(joint, self._rank, self._held_to.plan.classes)
        self._held_to.check(captured, self._rank)

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """What a microbatch runs in: once, in a step after the first, it is counted."""
        due = self.times.steps == WATCHED_STEP - 1 and self._watch.issued is None
        return self._watch.watching() if due else contextlib.nullcontext()

    def see_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note what a microbatch has left. torchtitan resets the allocator's peak when it
        logs, so the peak is asked for here."""
        if self._gradient_bytes is None:
            self._gradient_bytes = local_bytes(p.grad for p in parameters if p.grad is not None)
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            self._peak = max(peak, self._peak or 0)
            reserved = torch.cuda.max_memory_reserved(self._device)
            self._reserved = max(reserved, self._reserved or 0)

    def finish(
        self,
        parameters: Iterable[torch.nn.Parameter],
        optimizers: Iterable[torch.optim.Optimizer],
        folder: str,
    ) -> Comparison | None:
        """On rank 0 show what was predicted beside what was measured, and write it to `folder`."""
        if self._rank != 0:
            return None
        now = Measured(
            peak_bytes=self._peak,
            reserved_bytes=self._reserved,
            made_bytes=self._watch.made_bytes,
            sees_memory=self._watch.sees_memory,
            parameter_bytes=local_bytes(parameters),
            gradient_bytes=self._gradient_bytes,
            optimizer_bytes=optimizer_state_bytes(optimizers),
            step_seconds=self.times.median(),
            steps_timed=self.times.timed,
            issued=self._watch.issued,
        )
        found = comparison(self._held_to.plan, self._rank, now)
        show(found)
        save(found, self._held_to.path, folder)
        return found


def watched(run: PlannedRun | None) -> contextlib.AbstractContextManager[None]:
    """What a microbatch runs in."""
    return contextlib.nullcontext() if run is None else run.watching()


def timed(run: PlannedRun | None) -> contextlib.AbstractContextManager[None]:
    """What a step runs in."""
    return contextlib.nullcontext() if run is None else run.times.timing()
