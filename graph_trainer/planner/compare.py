"""Several plans side by side: every combination of the values of some settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from graph_trainer.core.units import unit_of
from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.planner.console import OnProgress, plain_table
from graph_trainer.planner.plan import LoadConfig, Plan
from graph_trainer.titan.config.run_config import GraphTrainerConfig

SCHEMA = "graph_trainer.plan.comparison/2"
"""Of the JSON document: bytes and seconds."""

Settings = Mapping[str, tuple[str, ...]]
"""By key, the values to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One combination and its plan."""

    config: dict[str, str]
    """The value of every setting."""
    fits: bool = False
    needed_bytes: int = 0
    peak_bytes: int = 0
    step_seconds: float = 0.0
    exposed_seconds: float = 0.0
    tokens_per_second_per_gpu: float = 0.0
    mfu: float = 0.0
    error: str | None = None
    """Why it cannot be run; None where it can."""


def settings(texts: Sequence[str]) -> Settings:
    """Parse the settings that `--compare` names; a semicolon separates values that are lists.

    Raises:
        ConfigError: no `key=value,value`, or a key twice.
    """
    values_of: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        between = ";" if ";" in values else ","
        each = tuple(v.strip() for v in values.split(between) if v.strip())
        key = key.strip().removeprefix("--").replace("-", "_")
        if not key or not equals or not each:
            raise ConfigError(
                f"--compare {text}: write key=value,value, such as "
                "parallelism.fsdp_reshard_after_forward=always,never; values that are lists are "
                "separated by ;"
            )
        if key in values_of:
            raise ConfigError(f"--compare {key} is given twice: write all its values in one")
        values_of[key] = tuple(dict.fromkeys(each))
    return values_of


def combinations(wanted: Settings) -> list[dict[str, str]]:
    """List all combinations, in the order in which the values are given."""
    return [dict(zip(wanted, each, strict=True)) for each in itertools.product(*wanted.values())]


def flags_of(values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the flags that set one combination."""
    flags: list[str] = []
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        switch = {"true": f"--{key}", "false": f"--{section}.no_{name}"}.get(value.lower())
        flags += [switch] if switch else [f"--{key}", value]
    return tuple(flags)


def compare(
    wanted: Settings,
    load: LoadConfig,
    plan: Callable[[GraphTrainerConfig], Plan],
    on_progress: OnProgress,
) -> list[Compared]:
    """Plan every combination, those that fit first and the fastest of them first.

    Every config is loaded before the first is planned.

    Raises:
        ConfigError: a key or a value that no combination can have.
    """
    configs: list[tuple[dict[str, str], GraphTrainerConfig | ConfigError]] = []
    for values in combinations(wanted):
        try:
            configs.append((values, load(flags_of(values))))
        except ConfigError as error:
            configs.append((values, error))
    for key, options in wanted.items():
        for option in options:
            loaded = [config for values, config in configs if values[key] == option]
            errors = [each for each in loaded if isinstance(each, ConfigError)]
            if len(errors) == len(loaded):
                raise errors[0]
    rows = []
    for number, (values, config) in enumerate(configs, 1):
        words = ", ".join(f"{key} = {value}" for key, value in values.items())
        on_progress(f"{number} of {len(configs)}: {words}")
        rows.append(_row(values, config, plan))
    return sorted(rows, key=lambda r: (bool(r.error), not r.fits, -r.tokens_per_second_per_gpu))


def _row(
    values: dict[str, str],
    config: GraphTrainerConfig | ConfigError,
    plan: Callable[[GraphTrainerConfig], Plan],
) -> Compared:
    try:
        if isinstance(config, ConfigError):
            raise config
        made = plan(config)
    except GraphTrainerError as error:
        return Compared(config=values, error=str(error))
    return Compared(
        config=values,
        fits=made.fits,
        needed_bytes=made.need.total,
        peak_bytes=made.peak_bytes,
        step_seconds=made.step_seconds,
        exposed_seconds=made.microbatches * made.rows[-1].exposed,
        tokens_per_second_per_gpu=made.tokens_per_second_per_gpu,
        mfu=made.mfu,
    )


def comparison_table(rows: Sequence[Compared], memory_bytes: int) -> Table:
    """Make a table with a row for each combination, which says whether it fits."""
    unit, size = unit_of(max(row.needed_bytes for row in rows))
    table = plain_table(
        f"All combinations; fits: needs at most {memory_bytes / size:,.1f} {unit}, or a lower "
        "compile.memory_limit_gib"
    )
    table.add_column("fits", no_wrap=True)
    for key in rows[0].config:
        table.add_column(key.replace(".", ".\n"), overflow="fold")
    for heading in (f"needs {unit}", "step ms", "exposed ms", "tok/s/GPU", "MFU"):
        table.add_column(heading, justify="right")
    for row in rows:
        values = map(Text, row.config.values())
        if row.error:
            table.add_row("-", *values, *[""] * 5)
            continue
        table.add_row(
            "yes" if row.fits else "NO",
            *values,
            f"{row.needed_bytes / size:,.2f}",
            f"{row.step_seconds * 1e3:,.1f}",
            f"{row.exposed_seconds * 1e3:,.1f}",
            f"{row.tokens_per_second_per_gpu:,.0f}",
            f"{row.mfu:.1%}",
            style="" if row.fits else "dim",
        )
    return table
