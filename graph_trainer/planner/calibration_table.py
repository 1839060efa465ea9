"""The table at the end of a calibration."""

from __future__ import annotations

from rich.markup import escape

from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.planner.calibration import Calibrated
from graph_trainer.planner.terminal import PlainTable, plain_table


def calibration_table(result: Calibrated, base: Hardware) -> PlainTable:
    """Return the measured values of a profile beside those of its base."""
    record = result.hardware.calibration
    assert record is not None
    table = plain_table(f"Measured on {record.device_name}")
    table.add_column("value", no_wrap=True)
    for heading in ("samples", f"before ({base.name})", "after", "spread before", "spread after"):
        table.add_column(heading, justify="right", no_wrap=heading == "samples")
    for figure in result.figures:
        old = "" if figure.spread_before is None else f"{figure.spread_before:.0%}"
        values = (f"{figure.before:.3g}", f"{figure.after:.3g}")
        row = (f"{figure.samples}", *values, old, f"{figure.spread:.0%}")
        table.add_row(escape(figure.key), *row)
    table.caption = (
        "spread: standard deviation of log(measured / predicted), weighted by the time in a step, "
        "after: predicted from samples of other sizes; "
        f"of the {record.samples} ops and collectives together {record.spread:.0%}"
    )
    return table
