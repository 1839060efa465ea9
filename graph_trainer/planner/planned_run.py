"""A run that has a plan: checked before its first step, measured, and compared at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.report import Report
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.planner.comparison import comparison, save, table
from graph_trainer.planner.console import print_table, report_table
from graph_trainer.planner.fingerprint import fingerprint_of
from graph_trainer.planner.run_metrics import (
    WATCHED_STEP,
    Measured,
    StepTimes,
    Watch,
    local_bytes,
    optimizer_state_bytes,
)
from graph_trainer.titan.observer import RunObserver

from torchtitan.tools.logging import logger  # isort: skip

if TYPE_CHECKING:
    from graph_trainer.planner.plan_check import HeldTo
    from graph_trainer.titan.trainer import GraphTrainer


class ReportedRun(RunObserver):
    """Prints what the passes did to each captured graph, on rank 0.

    Args:
        rank: the global rank that is watched.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def graph_reported(self, report: Report) -> None:
        """Print the table of the passes."""
        if self._rank == 0:
            print_table(report_table(report))


class PlannedRun(ReportedRun):
    """Refuses a step that is not the planned one, and compares predicted with measured.

    Args:
        held_to: the plan.
        config: of this run.
        device: what the rank trains on.
        rank: its global rank.
    """

    def __init__(
        self, held_to: HeldTo, config: GraphTrainer.Config, device: torch.device, rank: int
    ) -> None:
        super().__init__(rank)
        self.times = StepTimes(device)
        self._held_to = held_to
        self._folder = config.dump_folder
        self._device = device
        self._watch = Watch(sees_memory=find_backend(config.compile.backend).dispatches_ops)
        self._gradient_bytes: int | None = None
        self._peak: int | None = None
        self._reserved: int | None = None

    def first_graph(self, joint: JointGraph) -> None:
        """Refuse another graph than the planned one.

        Raises:
            VerificationError: with the first difference.
        """
        captured = fingerprint_of(joint, self._rank, self._held_to.plan.classes)
        self._held_to.check(captured, self._rank)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that times the step."""
        return self.times.timing()

    def microbatch(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that counts collectives and bytes, once, in the second step."""
        due = self.times.steps == WATCHED_STEP - 1 and self._watch.issued is None
        return self._watch.watching() if due else contextlib.nullcontext()

    def gradients_ready(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Measure gradients and the allocator's peak.

        torchtitan resets the allocator's peak when it logs, so the peak is read after every
        microbatch.
        """
        if self._gradient_bytes is None:
            self._gradient_bytes = local_bytes(p.grad for p in parameters if p.grad is not None)
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            self._peak = max(peak, self._peak or 0)
            reserved = torch.cuda.max_memory_reserved(self._device)
            self._reserved = max(reserved, self._reserved or 0)

    def finished(
        self,
        parameters: Iterable[torch.nn.Parameter],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        """Print predicted beside measured and write it to the dump folder, on rank 0.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self._rank != 0:
            return
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
        print_table(table(found))
        save(found, self._held_to.path, self._folder)


def observer_of(trainer: GraphTrainer, plan: HeldTo | None) -> RunObserver:
    """Make the observer of a run, and log on rank 0 how its config differs from the plan's.

    Args:
        trainer: of the run, before its first step.
        plan: the plan of `--plan`, or None.
    """
    rank = dist.get_rank()
    if plan is None:
        return ReportedRun(rank)
    if rank == 0:
        for line in plan.remarks():
            logger.warning(line)
    return PlannedRun(plan, trainer.config, trainer.device, rank)
