"""The observers that a run is given: they print reports and compare the run with its plan."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.passes.report import Report
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.runtime.live_storages import LiveStorages
from graph_trainer.core.units import unit_of
from graph_trainer.errors import ConfigError
from graph_trainer.planner.console import plain_table, print_table, report_table
from graph_trainer.planner.fingerprint import fingerprint_of
from graph_trainer.planner.plan_check import PlanCheck
from graph_trainer.planner.run_metrics import (
    WARM_UP,
    WATCHED_STEP,
    IssuedCollectives,
    Measured,
    StepTimes,
)
from graph_trainer.planner.saved_plan import SavedPlan
from graph_trainer.titan.observer import RunObserver
from graph_trainer.titan.trainer import GraphTrainer
from graph_trainer.titan.training_state_memory import local_bytes, optimizer_state_bytes

from torchtitan.tools.logging import logger  # isort: skip

SCHEMA = "graph_trainer.predicted_and_measured/1"
FILE = "predicted_and_measured.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity, predicted and measured in the same unit."""

    what: str
    unit: str
    """ "bytes", "seconds" or "count"."""
    predicted: float
    measured: float | None
    """None: not measured."""
    how: str
    """How it was measured, or why it was not."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None

    def cells(self) -> list[str]:
        """Return the row as text: what, predicted, measured, ratio and how."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        values = (_text(value, self.unit) for value in (self.predicted, self.measured))
        return [self.what, *values, ratio, self.how]


def comparison(plan: SavedPlan, rank: int, now: Measured) -> list[Row]:
    """Compare what a plan predicts for a rank with what the rank measured."""
    predicted = plan.of_rank(rank).predicted
    no_watch = f"not measured: that is done in step {WATCHED_STEP}"
    no_made = no_watch if now.sees_memory else "not measured: compiled code allocates unseen"
    no_maximum = "not measured: a CPU's allocator keeps no maximum"
    # A collective under way keeps its input alive in the backend, which cannot be seen from here;
    # the prediction counts that input until the wait.
    watched = f"alive in tensors in step {WATCHED_STEP}, one microbatch"

    def row(
        what: str, unit: str, before: float, measured: float | None, how: str, why_not: str = ""
    ) -> Row:
        return Row(what, unit, before, measured, why_not if measured is None else how)

    rows = [
        row("peak memory", "bytes", predicted.peak_bytes, now.peak_bytes,
            "CUDA allocator's maximum", no_maximum),
        row("reserved memory", "bytes", predicted.reserved_bytes, now.reserved_bytes,
            "CUDA allocator's maximum", no_maximum),
        row("needed of the device", "bytes", predicted.needed_bytes, now.needed_bytes,
            "taken of the GPU, by all programs", no_maximum),
        row("parameters", "bytes", predicted.parameter_bytes, now.parameter_bytes, "summed"),
        row("optimizer state", "bytes", predicted.optimizer_bytes, now.optimizer_bytes, "summed"),
        row("gradients", "bytes", predicted.gradient_bytes, now.gradient_bytes,
            "summed after backward", "not measured: no step was run"),
        row("made by the graph", "bytes", predicted.made_bytes, now.made_bytes, watched, no_made),
    ]  # fmt: skip
    apart = (Category.PARAMETERS.value, Category.OPTIMIZER_STATE.value, Category.GRADIENTS.value)
    for category, num in predicted.peak_by_category.items():
        if num and category not in apart:
            what = f"  at the peak: {category.replace('_', ' ')}"
            rows.append(Row(what, "bytes", num, None, "not measured apart"))
    rows.append(
        row("step", "seconds", predicted.step_seconds, now.step_seconds,
            f"median of {now.steps_timed} steps after {WARM_UP} of warm-up",
            f"not measured: the first {WARM_UP} steps are warm-up")
    )  # fmt: skip
    counts = predicted.counts()
    for kind in counts | (now.issued or {}):
        number = None if now.issued is None else now.issued.get(kind, 0)
        how = f"issued in step {WATCHED_STEP}, one microbatch"
        rows.append(row(kind, "count", counts.get(kind, 0), number, how, no_watch))
    return rows


def comparison_table(plan: SavedPlan, rank: int, rows: Iterable[Row]) -> Table:
    """Make the table of predicted beside measured, in at most 100 columns."""
    title = f"Predicted for {plan.hardware} and measured, rank {rank} of {plan.world_size:,}"
    table = plain_table(title, title_style="")
    table.add_column("what", overflow="fold")
    for heading in ("predicted", "measured", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("how", overflow="fold")
    for row in rows:
        table.add_row(*row.cells())
    return table


def save_comparison(check: PlanCheck, rank: int, rows: Iterable[Row], folder: str) -> Path:
    """Write predicted and measured as JSON to a folder; return the file.

    Raises:
        ConfigError: it cannot be written.
    """
    path = Path(folder) / FILE
    document = {
        "schema": SCHEMA,
        "plan": str(check.path),
        "hardware": check.plan.hardware,
        "rank": rank,
        "world_size": check.plan.world_size,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
    }
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: predicted and measured cannot be written: {error.strerror}. Set "
            "--dump_folder to a folder that can be written."
        ) from error
    return path


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        name, size = unit_of(value)
        return f"{value / size:,.2f} {name}"
    return f"{value:,.4f} s" if unit == "seconds" else f"{value:,.0f}"


class ReportedRun(RunObserver):
    """Prints what the passes did to each captured graph, on rank 0."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def graph_reported(self, report: Report) -> None:
        """Print the table of the passes."""
        if self._rank == 0:
            print_table(report_table(report))


class PlannedRun(ReportedRun):
    """Refuses a step that is not the planned one, and compares predicted with measured."""

    def __init__(self, check: PlanCheck, trainer: GraphTrainer) -> None:
        super().__init__(dist.get_rank())
        self._check = check
        self._folder = trainer.config.dump_folder
        self._device = trainer.device
        self._times = StepTimes(trainer.device)
        # Inductor's code does not allocate op by op.
        backend = find_backend(trainer.config.compile.backend)
        self._measured = Measured(sees_memory=backend.dispatches_ops)

    def first_graph(self, joint: JointGraph) -> None:
        """Refuse a graph that is not the planned one.

        Raises:
            VerificationError: with the first difference.
        """
        captured = fingerprint_of(joint, self._rank, self._check.plan.rank_classes)
        self._check.check(captured, self._rank)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that times the step."""
        return self._times.timing()

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """While entered: count collectives and bytes, once, in step WATCHED_STEP."""
        now = self._measured
        if self._times.steps != WATCHED_STEP - 1 or now.issued is not None:
            yield
            return
        live = LiveStorages()
        with live if now.sees_memory else contextlib.nullcontext(), IssuedCollectives() as issued:
            yield
        now.issued = issued.count
        if now.sees_memory:
            now.made_bytes = live.peak_bytes

    def gradients_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Measure gradients and the allocator's maxima.

        torchtitan resets the allocator's maxima when it logs, so they are read after every
        microbatch.
        """
        now = self._measured
        if now.gradient_bytes is None:
            now.gradient_bytes = local_bytes(p.grad for p in parameters if p.grad is not None)
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            now.peak_bytes = max(peak, now.peak_bytes or 0)
            reserved = torch.cuda.max_memory_reserved(self._device)
            now.reserved_bytes = max(reserved, now.reserved_bytes or 0)
            free, has = torch.cuda.mem_get_info(self._device)
            now.needed_bytes = max(has - free, now.needed_bytes or 0)

    def finished(
        self, parameters: Iterable[nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Print predicted beside measured and write it to the dump folder, on rank 0.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self._rank != 0:
            return
        now = self._measured
        now.parameter_bytes = local_bytes(parameters)
        now.optimizer_bytes = optimizer_state_bytes(optimizers)
        now.step_seconds, now.steps_timed = self._times.median(), self._times.timed
        rows = comparison(self._check.plan, self._rank, now)
        print_table(comparison_table(self._check.plan, self._rank, rows))
        save_comparison(self._check, self._rank, rows, self._folder)


def observer_of(trainer: GraphTrainer, check: PlanCheck | None) -> RunObserver:
    """Make the observer of a run before its first step; log on rank 0 what differs from a plan."""
    if check is None:
        return ReportedRun(dist.get_rank())
    if dist.get_rank() == 0:
        for line in check.remarks():
            logger.warning(line)
    return PlannedRun(check, trainer)
