"""Published runs and their predictions compared: tables, aims, and the errors for bands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import tomli_w

from benchmarks.published.predict import predict
from benchmarks.published.runs import Fits, Published
from graph_trainer.planner import bands
from graph_trainer.planner.bands import Band, Kind, PublishedError, published_band

ERRORS_FILE = Path(bands.__file__).with_name("published_errors.toml")

MEMORY_AIM = 0.08
"""The largest error of the memory of a run."""
THROUGHPUT_AIM = 0.15
"""The largest error of throughput of nine runs in ten."""
THROUGHPUT_WORST = 0.25
"""That of any run."""


@dataclass(frozen=True, slots=True)
class Row:
    """A run as published and as predicted. Ratios are predicted by published."""

    run: str
    source: str
    hardware: str
    kind: Kind
    kept_back: bool
    published: float
    """Tokens per second and GPU."""
    predicted: float
    ratio: float
    ratio_then: float | None
    published_gib: float | None
    predicted_gib: float
    memory_ratio: float | None
    memory_ratio_then: float | None
    band: Band | None = None
    """Of the other runs' errors."""
    in_band: bool | None = None


@dataclass(frozen=True, slots=True)
class FitRow:
    """A run that was published as running or as out of memory, and what the plan predicts."""

    run: str
    source: str
    ran: bool
    predicted: bool
    needed_gib: float
    """What the allocator reserves."""


def compare(run: Published) -> Row:
    """Plan a run and compare it with what was published."""
    prediction = predict(run)
    memory = run.memory_gib
    then, memory_then = run.then
    return Row(
        run=run.name,
        source=run.source,
        hardware=run.hardware,
        kind=prediction.kind,
        kept_back=run.kept_back,
        published=run.tokens_per_second,
        predicted=prediction.tokens_per_second,
        ratio=prediction.tokens_per_second / run.tokens_per_second,
        ratio_then=then,
        published_gib=memory,
        predicted_gib=prediction.memory_gib,
        memory_ratio=None if memory is None else prediction.memory_gib / memory,
        memory_ratio_then=memory_then,
    )


def judged(rows: Sequence[Row]) -> list[Row]:
    """Add to each row the band that a plan of it would have, its own error left out.

    The errors are those of these rows, except those that are kept back. Where these are few, as
    with `--runs`, the bands are wide.
    """
    errors = list(map(error_of, (row for row in rows if not row.kept_back)))
    result = []
    for row in rows:
        band = published_band(row.kind, errors, without={row.run})
        inside = None if band is None else band.low <= 1 / row.ratio <= band.high
        result.append(replace(row, band=band, in_band=inside))
    return result


def error_of(row: Row) -> PublishedError:
    """Return the error of a row, for bands."""
    today = datetime.now(UTC).date()
    return PublishedError(row.run, row.kind, 1 / row.ratio, row.hardware, today)


def write_errors(rows: Iterable[Row]) -> Path:
    """Write the errors of rows that are not kept back to the file that comes with the planner."""
    entries = []
    for error in map(error_of, (row for row in rows if not row.kept_back)):
        entries.append(
            {
                "name": error.name,
                "experts": error.kind.experts,
                "compiled": error.kind.compiled,
                "ratio": round(error.ratio, 4),
                "hardware": error.hardware,
                "date": error.date,
            }
        )
    head = (
        "# Throughput of published runs, divided by what a plan predicts.\n"
        "# Written by `python -m benchmarks.published --write-errors`: do not edit.\n\n"
    )
    ERRORS_FILE.write_text(head + tomli_w.dumps({"runs": entries}), encoding="utf-8")
    return ERRORS_FILE


def judge_fit(run: Fits) -> FitRow:
    """Plan a run and compare whether it fits its device."""
    prediction = predict(run)
    return FitRow(run.name, run.source, run.fits, prediction.fits_device, prediction.memory_gib)


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Format the table of runs; those that are kept back have a star."""
    lines = [
        f"{'run':<37}{'tok/s':>7}{'plan':>7}{'ratio':>6}{'then':>6}  {'band':<11}"
        f"{'GiB':>6}{'plan':>6}{'ratio':>6}{'then':>6}"
    ]
    for row in rows:
        band = f"{row.band.low:.2f}-{row.band.high:.2f}" if row.band else ""
        band += "" if row.in_band in (None, True) else "!"
        memory = "" if row.published_gib is None else f"{row.published_gib:.1f}"
        name = row.run + "*" * row.kept_back
        lines.append(
            f"{name:<37}{row.published:>7,.0f}{row.predicted:>7,.0f}"
            f"{row.ratio:>6.2f}{_ratio(row.ratio_then)}  {band:<11}"
            f"{memory:>6}{row.predicted_gib:>6.1f}{_ratio(row.memory_ratio)}"
            f"{_ratio(row.memory_ratio_then)}".rstrip()
        )
    lines.append(
        "ratio: predicted / published; band: published / predicted expected from the other"
    )
    lines.append("runs of that kind, with ! where the run is outside; *: kept back, makes no band")
    return lines


def _ratio(ratio: float | None) -> str:
    return f"{'' if ratio is None else f'{ratio:.2f}':>6}"


def fits_lines(rows: Iterable[FitRow]) -> list[str]:
    """Format the table of runs that ran, or were out of memory."""
    lines = [f"{'run':<37}{'published':>15}{'predicted':>15}{'GiB':>8}"]
    for row in rows:
        words = ["fits" if fits else "out of memory" for fits in (row.ran, row.predicted)]
        wrong = "" if row.ran == row.predicted else "  wrong"
        lines.append(f"{row.run:<37}{words[0]:>15}{words[1]:>15}{row.needed_gib:>8.1f}{wrong}")
    return lines


def aims(rows: Sequence[Row], fits: Sequence[FitRow]) -> list[str]:
    """Say of each aim whether the rows hold it, and name those that do not."""
    off = [(row, abs(row.ratio - 1)) for row in rows]
    far = [row for row, error in off if error > THROUGHPUT_AIM]
    worst = [row for row, error in off if error > THROUGHPUT_WORST]
    memory = [row for row in rows if row.memory_ratio and abs(row.memory_ratio - 1) > MEMORY_AIM]
    dense = [row.ratio for row in rows if not row.kind.experts]
    fast = sum(ratio > 1 for ratio in dense)
    outside = [row for row in rows if row.in_band is False]
    wrong = [row.run for row in fits if row.ran != row.predicted]
    return [
        _aim(f"memory within {MEMORY_AIM:.0%}", not memory, memory),
        _aim(
            f"throughput of nine in ten within {THROUGHPUT_AIM:.0%}: {len(rows) - len(far)} of "
            f"{len(rows)}",
            10 * len(far) <= len(rows),
            far,
        ),
        _aim(f"no throughput beyond {THROUGHPUT_WORST:.0%}", not worst, worst),
        _aim(
            f"dense rows not all on one side: {fast} of {len(dense)} predicted too fast, mean "
            f"ratio {sum(dense) / max(1, len(dense)):.3f}",
            0 < fast < len(dense),
            (),
        ),
        _aim("every row in its band", not outside, outside),
        f"{'holds' if not wrong else 'MISSED'}: fits or not, as published"
        + (f": {'; '.join(wrong)}" if wrong else ""),
    ]


def _aim(text: str, holds: bool, rows: Iterable[Row]) -> str:
    listed = "; ".join(row.run for row in rows)
    return f"{'holds' if holds else 'MISSED'}: {text}" + (f" ({listed})" if listed else "")
