"""The observer of a run that is held to a plan: it compares predicted with measured."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from graph_trainer.core.graph.collective_kinds import FUNCTIONAL_NAMESPACES, Effect, kind_named
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.runtime.live_storages import LiveStorages
from graph_trainer.core.torch_private import TorchDispatchMode
from graph_trainer.errors import ConfigError
from graph_trainer.planner.fingerprint import fingerprint_of
from graph_trainer.planner.measures import measure
from graph_trainer.planner.plan_check import PlanCheck
from graph_trainer.planner.saved_plan import Predicted
from graph_trainer.planner.terminal import plain_table, print_table
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.observer import ReportedRun
from graph_trainer.titan.training_state_memory import local_bytes, optimizer_state_bytes

from torchtitan.tools import utils  # isort: skip
from torchtitan.tools.logging import logger  # isort: skip

SCHEMA = "graph_trainer.predicted_and_measured/1"
FILE = "predicted_and_measured.json"
WATCHED_STEP = 2
"""The step in which collectives and the bytes that the graph makes are counted."""
WARM_UP = 2
"""Steps that are not timed: the first compiles, and the second is slowed down by counting."""
_STEPS_KEPT = 1000


class PlannedRun(ReportedRun):
    """Refuses a step that is not the planned one, and compares predicted with measured."""

    def __init__(self, check: PlanCheck, config: GraphTrainerConfig) -> None:
        self._check = check
        self._config = config
        self._on_cuda = utils.device_type == "cuda"
        self._steps = 0
        # start and end of the latest steps after warm-up, or of the latest one
        self._spans: deque[tuple[Any, Any]] = deque(maxlen=_STEPS_KEPT)
        self._growth: int | None = None
        self._measured: dict[str, float] = {}  # by field of `Predicted`
        self._issued: dict[str, int] | None = None  # collectives of one microbatch by kind

    def first_graph(self, joint: JointGraph) -> None:
        """Refuse a graph that is not the planned one; log on rank 0 what else is not as planned.

        Raises:
            VerificationError: with the first difference.
        """
        rank = dist.get_rank()
        captured = fingerprint_of(joint, rank, self._check.plan.rank_classes)
        self._check.check(captured, rank)
        if rank == 0 and self._check.differences:
            logger.warning(self._check.remark())

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """While entered: one step, timed on the device without waiting for it."""
        self._steps += 1
        start = self._now()
        yield
        if self._steps <= WARM_UP + 1:
            self._spans.clear()
        self._spans.append((start, self._now()))

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """While entered: count collectives and bytes, once, in step WATCHED_STEP."""
        if self._steps != WATCHED_STEP or self._issued is not None:
            yield
            return
        live = LiveStorages()
        # Inductor's code does not allocate op by op.
        sees_memory = find_backend(self._config.compile.backend).dispatches_ops
        with live if sees_memory else contextlib.nullcontext(), IssuedCollectives() as issued:
            yield
        self._issued = issued.count
        if sees_memory:
            self._measured["made_bytes"] = live.peak_bytes

    def gradients_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Measure gradients and the allocator's maxima.

        torchtitan resets the allocator's maxima when it logs, so they are read after every
        microbatch.
        """
        now = self._measured
        if "gradient_bytes" not in now:
            now["gradient_bytes"] = local_bytes(p.grad for p in parameters if p.grad is not None)
        if self._on_cuda:
            free, total = torch.cuda.mem_get_info()
            for name, num in (
                ("peak_bytes", torch.cuda.max_memory_allocated()),
                ("reserved_bytes", torch.cuda.max_memory_reserved()),
                ("needed_bytes", total - free),
            ):
                now[name] = max(num, now.get(name, 0))

    def memory_grew(self, num_bytes: int) -> None:
        """Keep what `finished` adds parameters and optimizer state to."""
        self._growth = num_bytes

    def finished(
        self, parameters: Iterable[nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Print predicted beside measured and write it to the dump folder, on rank 0.

        Raises:
            ConfigError: the file cannot be written.
        """
        if dist.get_rank() != 0:
            return
        now = self._measured
        now["parameter_bytes"] = local_bytes(parameters)
        now["optimizer_bytes"] = optimizer_state_bytes(optimizers)
        if self._growth is not None:
            now["peak_bytes"] = self._growth + now["parameter_bytes"] + now["optimizer_bytes"]
        if self._on_cuda:
            torch.cuda.synchronize()
        seconds = [
            start.elapsed_time(end) / 1e3 if self._on_cuda else end - start
            for start, end in self._spans
        ]
        if seconds:
            now["step_seconds"] = statistics.median(seconds)
        plan = self._check.plan
        rows = comparison(plan.of_rank(0).predicted, now, self._issued, self._steps)
        here = torch.cuda.get_device_name() if self._on_cuda else "cpu"
        there = plan.hardware.name
        title = f"Predicted for {there}, measured on {here}: rank 0 of {plan.world_size:,}"
        imbalance = self._config.compile.expert_imbalance
        if imbalance not in (None, 1):
            title += f"; memory is predicted for an imbalance of experts of {imbalance:g}"
        print_table(comparison_table(title, rows))
        path = Path(self._config.dump_folder) / FILE
        document = {
            "schema": SCHEMA,
            "plan": str(self._check.path),
            "hardware": there,
            "rank": 0,
            "world_size": plan.world_size,
            "rows": [asdict(row) for row in rows],
        }
        try:
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path}: predicted and measured cannot be written: {error.strerror}. Set "
                "--dump_folder to a folder that can be written."
            ) from error


class IssuedCollectives(TorchDispatchMode):
    """While entered: counts the collectives that are started, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in FUNCTIONAL_NAMESPACES and kind_named(name).effect is Effect.STARTS:
            # Inductor's names of the same op
            self.count[name.removesuffix("_out").removesuffix("_")] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity, predicted and measured in the same unit."""

    what: str
    unit: str
    """ "bytes", "seconds" or "count"."""
    predicted: float
    measured: float | None
    """None: not measured."""
    how: str
    """How it was measured, or why it was not."""
    ratio: float | None
    """Measured over predicted."""


def comparison(
    predicted: Predicted,
    measured: Mapping[str, float],
    issued: Mapping[str, int] | None,
    steps: int,
) -> list[Quantity]:
    """Compare what a plan predicts for a rank with what the rank measured.

    Args:
        predicted: for this rank.
        measured: by field of `Predicted`; what is missing was not measured.
        issued: the number of collectives of one microbatch by kind; None before WATCHED_STEP.
        steps: how many were run.
    """
    rows: list[Quantity] = []

    def add(what: str, unit: str, before: float, now: float | None, how: str, why_not: str) -> None:
        ratio = now / before if now and before else None
        how = f"not measured{why_not}" if now is None else how
        rows.append(Quantity(what, unit, before, now, how, ratio))

    on_cuda = "reserved_bytes" in measured
    maximum = "CUDA allocator's maximum"
    resident = f"resident: growth in step {WATCHED_STEP} + parameters + optimizer state"
    no_watch = f": that is done in step {WATCHED_STEP}"
    # A collective under way keeps its input alive in the backend, which cannot be seen from here;
    # the prediction counts that input until the wait.
    measured_as = f"alive in tensors in step {WATCHED_STEP}, one microbatch"
    not_made = no_watch if issued is None else ": compiled code allocates unseen"
    of_gpu = (
        ("reserved memory", "reserved_bytes", maximum, ""),
        ("needed of the device", "needed_bytes", "taken of the GPU, by all programs", ""),
    )
    for what, name, how, why_not in (
        ("peak memory", "peak_bytes", maximum if on_cuda else resident, f"{no_watch}, on Linux"),
        *(of_gpu if on_cuda else ()),  # a CPU's allocator reports neither of the two
        ("parameters", "parameter_bytes", "summed", ""),
        ("optimizer state", "optimizer_bytes", "summed", ""),
        ("gradients", "gradient_bytes", "summed after backward", ": no step was run"),
        ("made by the graph", "made_bytes", measured_as, not_made),
    ):
        add(what, "bytes", getattr(predicted, name), measured.get(name), how, why_not)
    how = f"step {steps} alone, itself of warm-up"
    if steps > WARM_UP:
        how = f"median of {min(steps - WARM_UP, _STEPS_KEPT)} steps after {WARM_UP} of warm-up"
    why_not = ": no step was run"
    add("step", "seconds", predicted.step_seconds, measured.get("step_seconds"), how, why_not)
    how = f"issued in step {WATCHED_STEP}, one microbatch"
    for kind in predicted.collectives | dict(issued or {}):
        number = None if issued is None else issued.get(kind, 0)
        add(kind, "count", predicted.collectives.get(kind, 0), number, how, no_watch)
    return rows


def comparison_table(title: str, rows: Iterable[Quantity]) -> Table:
    """Make the table of predicted beside measured, in at most 100 columns."""
    table = plain_table(title, title_style="")
    table.add_column("what", overflow="fold")
    for heading in ("predicted", "measured", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("how", overflow="fold")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        both = (row.predicted, row.measured)
        unit = measure(row.unit, [value for value in both if value is not None])
        values = ("-" if value is None else unit.text(value) for value in both)
        table.add_row(row.what, *values, ratio, row.how)
    return table
