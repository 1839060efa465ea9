"""Predicted beside measured: the table at the end of a run that was held to a plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.units import unit_of
from graph_trainer.errors import ConfigError
from graph_trainer.planner.console import plain_table
from graph_trainer.planner.run_metrics import WARM_UP, WATCHED_STEP, Measured
from graph_trainer.planner.saved_plan import SavedPlan

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
    """How it was measured, or why not."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows of one rank."""

    rank: int
    world_size: int
    hardware: str
    rows: tuple[Row, ...]


def comparison(plan: SavedPlan, rank: int, now: Measured) -> Comparison:
    """What a plan says of a rank beside what the rank measured."""
    predicted = plan.of_rank(rank).predicted
    no_watch = f"not measured: that is done in step {WATCHED_STEP}"
    no_made = no_watch if now.sees_memory else "not measured: compiled code allocates unseen"
    no_maximum = "not measured: a CPU's allocator keeps no maximum"
    # What a collective under way still reads is held by the backend, out of sight; the
    # prediction counts it until the wait.
    watched = f"held by tensors in step {WATCHED_STEP}, one microbatch"

    def row(name: str, unit: str, before: float, found: float | None, how: str, why: str) -> Row:
        return Row(name, unit, before, found, why if found is None else how)

    rows = [
        row("peak memory", "bytes", predicted.peak_bytes, now.peak_bytes,
            "CUDA allocator's maximum", no_maximum),
        row("reserved memory", "bytes", predicted.reserved_bytes, now.reserved_bytes,
            "CUDA allocator's maximum", no_maximum),
        Row("parameters", "bytes", predicted.parameter_bytes, now.parameter_bytes, "summed"),
        Row("optimizer state", "bytes", predicted.optimizer_bytes, now.optimizer_bytes, "summed"),
        row("gradients", "bytes", predicted.gradient_bytes, now.gradient_bytes,
            "summed after backward", "not measured: no step was run"),
        row("made by the graph", "bytes", predicted.made_bytes, now.made_bytes, watched, no_made),
    ]  # fmt: skip
    made = set(Category) - {Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.GRADIENTS}
    rows += [
        Row(
            f"  at the peak: {category.replace('_', ' ')}", "bytes", num, None, "not measured apart"
        )
        for category, num in predicted.peak_by_category.items()
        if category in {c.value for c in made} and num
    ]
    rows.append(
        row("step", "seconds", predicted.step_seconds, now.step_seconds,
            f"median of {now.steps_timed} steps after {WARM_UP} of warm-up",
            f"not measured: the first {WARM_UP} steps are warm-up")
    )  # fmt: skip
    for kind in predicted.collectives | (now.issued or {}):
        planned = sum(v["count"] for v in predicted.collectives.get(kind, {}).values())
        number = None if now.issued is None else now.issued.get(kind, 0)
        how = f"issued in step {WATCHED_STEP}, one microbatch"
        rows.append(row(kind, "count", planned, number, how, no_watch))
    return Comparison(rank, plan.world_size, plan.hardware, tuple(rows))


def table(found: Comparison) -> Table:
    """The comparison in at most 100 columns."""
    made = plain_table(
        f"Predicted for {found.hardware} and measured, rank {found.rank} of {found.world_size:,}",
        title_style="",
    )
    made.add_column("what", overflow="fold")
    for heading in ("predicted", "measured", "ratio"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("how", overflow="fold")
    for row in found.rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        made.add_row(
            row.what, _text(row.predicted, row.unit), _text(row.measured, row.unit), ratio, row.how
        )
    return made


def save(found: Comparison, plan: Path, folder: str) -> Path:
    """Write the comparison to `folder`.

    Raises:
        ConfigError: it cannot be written.
    """
    path = Path(folder) / FILE
    document = {
        "schema": SCHEMA,
        "plan": str(plan),
        "hardware": found.hardware,
        "rank": found.rank,
        "world_size": found.world_size,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in found.rows],
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
