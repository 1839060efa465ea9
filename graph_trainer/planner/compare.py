"""Several plans side by side: every combination of the values of some settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from graph_trainer.core.units import unit_of
from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.planner.console import plain_table
from graph_trainer.planner.plan import OnProgress, Plan, versions

if TYPE_CHECKING:
    from rich.table import Table

    from graph_trainer.titan.config.run_config import GraphTrainerConfig

SCHEMA = "graph_trainer.plan.comparison/1"

Setting = tuple[str, tuple[str, ...]]
"""A key and the values to try."""
Values = tuple[tuple[str, str], ...]
"""One value for every key."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One combination and what became of it."""

    values: Values
    fits: bool
    reserved_bytes: int
    peak_bytes: int
    step_seconds: float
    exposed_seconds: float
    tokens_per_second_per_gpu: float
    mfu: float
    reason: str = ""
    """Why it cannot be run; empty where it can."""


def settings(texts: Sequence[str]) -> list[Setting]:
    """The settings that `--compare` names; values that are lists have ; between them.

    Raises:
        ConfigError: no `key=value,value`, or a key twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        between = ";" if ";" in values else ","
        each = tuple(v.strip() for v in values.split(between) if v.strip())
        key = key.strip().removeprefix("--").replace("-", "_")
        if not key or not equals or not each:
            raise ConfigError(
                f"--compare {text}: write key=value,value, such as "
                "parallelism.fsdp_reshard_after_forward=always,never; between values that are "
                "lists stands ;"
            )
        if key in found:
            raise ConfigError(f"--compare {key} is given twice: write all its values in one")
        found[key] = tuple(dict.fromkeys(each))
    return list(found.items())


def combinations(wanted: Sequence[Setting]) -> list[Values]:
    """All combinations, in the order in which the values are given."""
    keys = [key for key, _ in wanted]
    product = itertools.product(*(values for _, values in wanted))
    return [tuple(zip(keys, values, strict=True)) for values in product]


def flags_of(values: Values) -> tuple[str, ...]:
    """The flags that set one combination."""
    return tuple(word for key, value in values for word in _flag(key, value))


def _flag(key: str, value: str) -> tuple[str, ...]:
    if value.lower() == "true":
        return (f"--{key}",)
    if value.lower() == "false":
        section, _, name = key.rpartition(".")
        return (f"--{section}.no_{name}",)
    return (f"--{key}", value)


def compare(
    wanted: Sequence[Setting],
    load: Callable[[Sequence[str]], GraphTrainerConfig],
    plan: Callable[[GraphTrainerConfig], Plan],
    on_progress: OnProgress,
) -> list[Compared]:
    """Plan every combination, those that fit first and the fastest of them first.

    Every config is loaded before the first is planned.

    Arguments:
        load: the checked config of the command line with more flags behind it.

    Raises:
        ConfigError: a key or a value that no combination can have.
    """
    configs: list[tuple[Values, GraphTrainerConfig | ConfigError]] = []
    for values in combinations(wanted):
        try:
            configs.append((values, load(flags_of(values))))
        except ConfigError as error:
            configs.append((values, error))
    for key, options in wanted:
        for option in options:
            errors = [c for values, c in configs if (key, option) in values]
            if errors and all(isinstance(e, ConfigError) for e in errors):
                raise next(e for e in errors if isinstance(e, ConfigError))
    rows = []
    for number, (values, config) in enumerate(configs, 1):
        words = ", ".join(f"{key} = {value}" for key, value in values)
        on_progress(f"{number} of {len(configs)}: {words}")
        rows.append(_row(values, config, plan))
    return sorted(rows, key=lambda r: (bool(r.reason), not r.fits, -r.tokens_per_second_per_gpu))


def _row(values: Values, config: Any, plan: Callable[[Any], Plan]) -> Compared:
    error = config if isinstance(config, ConfigError) else None
    if error is None:
        try:
            made = plan(config)
        except GraphTrainerError as failed:
            return _impossible(values, failed)
        return Compared(
            values,
            made.fits,
            made.reserved_bytes,
            made.peak_bytes,
            made.step_seconds,
            made.microbatches * made.rows[-1].exposed,
            made.tokens_per_second_per_gpu,
            made.mfu,
        )
    return _impossible(values, error)


def _impossible(values: Values, error: Exception) -> Compared:
    return Compared(values, False, 0, 0, 0.0, 0.0, 0.0, 0.0, str(error))


def comparison_table(rows: Sequence[Compared], usable_bytes: int) -> Table:
    """A row a combination; what fits is marked."""
    unit, size = unit_of(max(row.reserved_bytes for row in rows))
    table = plain_table(f"All combinations; fits: needs at most {usable_bytes / size:,.1f} {unit}")
    table.add_column("fits", no_wrap=True)
    for key, _ in rows[0].values:
        table.add_column(key.replace(".", ".\n"), overflow="fold")
    for heading in (f"needs {unit}", "step ms", "exposed ms", "tok/s/GPU", "MFU"):
        table.add_column(heading, justify="right")
    for row in rows:
        values = [Text(value) for _, value in row.values]
        if row.reason:
            table.add_row("-", *values, *[""] * 5)
            continue
        table.add_row(
            "yes" if row.fits else "NO",
            *values,
            f"{row.reserved_bytes / size:,.2f}",
            f"{row.step_seconds * 1e3:,.1f}",
            f"{row.exposed_seconds * 1e3:,.1f}",
            f"{row.tokens_per_second_per_gpu:,.0f}",
            f"{row.mfu:.1%}",
            style="" if row.fits else "dim",
        )
    return table


def comparison_document(rows: Sequence[Compared], about: Mapping[str, Any]) -> dict[str, Any]:
    """The table as plain values: bytes and seconds.

    Arguments:
        about: what all rows have in common.
    """
    return {
        "schema": SCHEMA,
        "versions": versions(),
        **about,
        "rows": [
            {
                "config": dict(row.values),
                "fits": row.fits,
                "reserved_bytes": row.reserved_bytes,
                "peak_bytes": row.peak_bytes,
                "step_seconds": row.step_seconds,
                "exposed_seconds": row.exposed_seconds,
                "tokens_per_second_per_gpu": row.tokens_per_second_per_gpu,
                "mfu": row.mfu,
                "error": row.reason or None,
            }
            for row in rows
        ],
    }
