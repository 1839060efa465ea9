"""`graph-trainer check`: recipes that load, fit and keep their order, and graphs that are locked.

A recipe is a config; its lockfile is the saved plan that `graph-trainer plan --save` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType, group
from rich.text import Text

from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.text import place_of
from graph_trainer.core.units import gib
from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.planner.changes import (
    advise,
    fewest_ranks,
    fitting_together,
    flags_of,
    outcome_of,
)
from graph_trainer.planner.measures import duration
from graph_trainer.planner.pipeline_advice import advise_pipeline, outcome_of_pipeline
from graph_trainer.planner.pipeline_plan import make_pipeline_plan
from graph_trainer.planner.plan import LoadConfig, Outcome, Plan, make_plan, versions
from graph_trainer.planner.plan_check import PlanCheck, differences
from graph_trainer.planner.plan_tables import Column, make_table, tokens_range
from graph_trainer.planner.saved_plan import Predicted, SavedPlan, plan_every_class
from graph_trainer.planner.terminal import OnProgress, PlainTable
from graph_trainer.planner.verify_order import verify_order
from graph_trainer.planner.verify_pipeline_order import verify_pipeline_order
from graph_trainer.titan.config.check import ranks_of_degrees
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.files import published

SCHEMA: Final = "graph_trainer.check/1"
"""Changes when a key changes its meaning or goes; new keys do not change it."""

LOCK = "--lock"
AGAINST = "--against"

_BYTES = tuple(key for key in Predicted.model_fields if key.endswith("_bytes"))
"""What a lockfile fixes of each class of ranks beside its graph."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A config to check."""

    config: str
    """A TOML file or the name of a shipped config, as on the command line."""
    load: LoadConfig
    """Loads it with the flags for all recipes; without ranks, what needs them is not checked."""

    def lockfile(self, folder: Path) -> Path:
        """Return the path of its lockfile, which is named like the config."""
        return folder / f"{Path(self.config).name.removesuffix('.toml')}.json"


@dataclass(frozen=True, slots=True)
class Check:
    """What is checked of every recipe."""

    hardware: Hardware
    world_size: int | None
    """None takes the ranks that a recipe's degrees multiply to."""
    proves_order: bool = True
    all_ranks: bool = False
    """Whether a proof captures every rank, and not one of each class."""
    lock: Path | None = None
    """The folder to write lockfiles to."""
    against: Path | None = None
    """The folder of the lockfiles to compare with."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of a recipe."""

    verdict: str
    """One or two words."""
    passed: bool | None
    """None where there is nothing to check."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRow:
    """What the check finds of one recipe."""

    config: str
    error: str | None = None
    """Why it is refused: there is then no more than this."""
    model: str = ""
    world_size: int | None = None
    outcome: Outcome | None = None
    """What the rank that was planned needs and takes."""
    allowed_bytes: int = 0
    """What it may need: the device's memory, or the limit where that is less."""
    change: Outcome | None = None
    """Where it does not fit, the first change of the advice with which it does."""
    order: Finding | None = None
    """Whether all ranks keep one order of collectives; None where no proof was wanted."""
    lock: Finding | None = None
    """What was done with the lockfile; None where no lockfiles were wanted."""

    @property
    def fits(self) -> bool:
        """Whether it runs on the hardware."""
        return self.outcome is not None and self.outcome.fits

    @property
    def passed(self) -> bool:
        """Whether it runs, keeps its order as far as that is checked, and is as locked."""
        findings = [finding for finding in (self.order, self.lock) if finding]
        return self.fits and all(finding.passed is not False for finding in findings)


def check_lockfile_names(recipes: Sequence[Recipe], folder: Path, flag: str) -> None:
    """Refuse recipes that share a lockfile.

    Raises:
        ConfigError: naming two of them.
    """
    recipe_of: dict[Path, Recipe] = {}
    for recipe in recipes:
        path = recipe.lockfile(folder)
        other = recipe_of.setdefault(path, recipe)
        if other is not recipe:
            raise ConfigError(
                f"{flag} {folder}: {other.config} and {recipe.config} have one lockfile, {path}: "
                "rename one of them, or check them in two runs with a folder for each"
            )


def check_recipes(
    recipes: Sequence[Recipe], check: Check, on_progress: OnProgress, processes: int = 1
) -> list[RecipeRow]:
    """Check every recipe. What goes wrong with one is in its row, and the others are checked.

    Args:
        processes: how many capture or plan at once at most.
    """
    rows = []
    for number, recipe in enumerate(recipes, start=1):
        beginning = f"{number} of {len(recipes)}, {recipe.config}: "

        def say(line: str, beginning: str = beginning) -> None:
            on_progress(beginning + line)

        try:
            row = _check_recipe(recipe, check, say, processes)
        except GraphTrainerError as error:
            row = RecipeRow(config=recipe.config, error=str(error))
        except Exception as error:  # a model's own code may raise anything
            reason = f"{type(error).__name__}{place_of(error)}: {error}"
            row = RecipeRow(config=recipe.config, error=reason)
        rows.append(row)
    return rows


def _check_recipe(
    recipe: Recipe, check: Check, on_progress: OnProgress, processes: int
) -> RecipeRow:
    """Check one recipe.

    Raises:
        GraphTrainerError: the config cannot be used, or rank 0 cannot be planned.
    """
    config = recipe.load((), check.world_size)
    world_size = check.world_size or ranks_of_degrees(config)

    def load(more: Sequence[str], ranks: int | None = None) -> GraphTrainerConfig:
        return recipe.load(more, ranks or world_size)

    if config.parallelism.pipeline_parallel_degree > 1:
        return _check_pipeline(recipe, config, load, world_size, check, on_progress, processes)
    on_progress("planning rank 0")
    plan = make_plan(config, world_size, check.hardware, every_pass=False)
    change = order = None
    if not plan.fits:
        change = _change_that_fits(plan, load, on_progress, processes)
    if check.proves_order:
        order = _prove(plan, check.all_ranks, on_progress, processes)
    return RecipeRow(
        config=recipe.config,
        model=plan.model,
        world_size=world_size,
        outcome=outcome_of({}, plan),
        allowed_bytes=plan.allowed_bytes,
        change=change,
        order=order,
        lock=_lockfile(recipe, plan, check, on_progress, processes),
    )


def _check_pipeline(
    recipe: Recipe,
    config: GraphTrainerConfig,
    load: LoadConfig,
    world_size: int,
    check: Check,
    on_progress: OnProgress,
    processes: int,
) -> RecipeRow:
    """Check a recipe whose stages are planned one by one. It has no lockfile."""
    plan = make_pipeline_plan(config, world_size, check.hardware, on_progress=on_progress)
    advice = [] if plan.fits else advise_pipeline(plan, load, on_progress)
    order = lock = None
    if check.proves_order:
        order = _proved(
            lambda: [
                *verify_pipeline_order(
                    *(config, world_size),
                    all_ranks=check.all_ranks,
                    device=check.hardware.device,
                    processes=processes,
                    on_progress=on_progress,
                )
            ]
        )
    if check.lock or check.against:
        reason = "it has a pipeline, and a lockfile is of one graph: it cannot be locked"
        lock = Finding("-", None, reason)
    return RecipeRow(
        config=recipe.config,
        model=plan.model,
        world_size=world_size,
        outcome=outcome_of_pipeline({}, plan),
        allowed_bytes=plan.allowed_bytes,
        change=next((outcome for outcome in advice if outcome.fits), None),
        order=order,
        lock=lock,
    )


def _change_that_fits(
    plan: Plan, load: LoadConfig, on_progress: OnProgress, processes: int
) -> Outcome | None:
    """Return the first change with which a run fits: one setting, more ranks, or several settings.
    None where there is none."""
    advice = advise(plan, load, on_progress, processes)
    if not any(outcome.fits for outcome in advice):
        advice += fewest_ranks(plan, load, on_progress)
        advice += fitting_together(plan, advice, load, on_progress)
    return next((outcome for outcome in advice if outcome.fits), None)


def _prove(plan: Plan, all_ranks: bool, on_progress: OnProgress, processes: int) -> Finding:
    """Prove that no ranks wait for each other forever."""
    return _proved(
        lambda: verify_order(
            plan.config,
            plan.world_size,
            all_ranks=all_ranks,
            device=plan.hardware.device,
            processes=processes,
            captures=plan.captures,
            on_progress=on_progress,
        )
    )


def _proved(prove: Callable[[], object]) -> Finding:
    try:
        prove()
    except GraphTrainerError as error:
        return Finding("NO", False, str(error))
    return Finding("proved", True)


def _lockfile(
    recipe: Recipe, plan: Plan, check: Check, on_progress: OnProgress, processes: int
) -> Finding | None:
    """Write the lockfile of a recipe, or compare the plan with the one that is there."""
    folder = check.lock or check.against
    if folder is None:
        return None
    path = recipe.lockfile(folder)
    try:
        locked = _read_lockfile(path, plan) if check.against else None
        now = plan_every_class(plan, processes=processes, on_progress=on_progress)
        if locked is None:
            with published(path) as file:
                file.write(now.to_json())
            return Finding("written", True)
        remark = _remark(path, plan.config, locked, now)
    except GraphTrainerError as error:
        return Finding("error", False, str(error))
    difference = difference_of(locked, now)
    if difference:
        return Finding("DIFFERS", False, f"differs from {path}: {difference}. {remark}".rstrip())
    return Finding("same", True, remark)


def _read_lockfile(path: Path, plan: Plan) -> SavedPlan:
    """Read a lockfile.

    Raises:
        ConfigError: it cannot be read, or is of other ranks or other hardware than the plan.
    """
    again = f"write it again with {LOCK} {path.parent}"
    locked = SavedPlan.read(path, AGAINST, f"To have one, {again}.")
    if locked.world_size != plan.world_size:
        raise ConfigError(
            f"{AGAINST} {path}: locked for {locked.world_size} ranks, and the recipe is checked "
            f"for {plan.world_size}: check it with --world-size {locked.world_size}, or {again}"
        )
    if locked.hardware.name != plan.hardware.name:
        raise ConfigError(
            f"{AGAINST} {path}: locked for {locked.hardware.name}, and the recipe is checked for "
            f"{plan.hardware.name}: check it with --hardware {locked.hardware.name}, or {again}"
        )
    return locked


def difference_of(locked: SavedPlan, now: SavedPlan) -> str | None:
    """Describe the first input, op, collective or bytes that two plans of as many ranks have
    otherwise; None where they have the same."""
    for rank in sorted({*locked.classes, *now.classes}):
        before, after = locked.of_rank(rank), now.of_rank(rank)
        if difference := before.fingerprint.difference(after.fingerprint):
            return f"rank {rank}: {difference}"
        for key in _BYTES:
            planned, num = getattr(before.predicted, key), getattr(after.predicted, key)
            if planned != num:
                change = f"planned {planned:,}, now {num:,} ({num - planned:+,})"
                return f"rank {rank}: the same graph, but {key}: {change}"
    return None


def _remark(path: Path, config: GraphTrainerConfig, locked: SavedPlan, now: SavedPlan) -> str:
    """Describe what else differs: config, versions, profile and passes, and the step time, which
    every change of a simulator moves. Empty where nothing does."""
    check = PlanCheck.of(locked, path, config, rehearses=True, flag=AGAINST)
    before, after = (
        {"hardware": asdict(saved.hardware), "passes": list(saved.passes)}
        for saved in (locked, now)
    )
    check = replace(check, differences=(*check.differences, *differences(before, after)))
    remarks = [f"{check.remark()}."] if check.remark() else []
    planned, seconds = (duration(s.of_rank(0).predicted.step_seconds) for s in (locked, now))
    if planned != seconds:
        remarks.append(f"A step was planned to take {planned}, now {seconds}.")
    return " ".join(remarks)


def check_report(rows: Sequence[RecipeRow], hardware: Hardware) -> dict[str, Any]:
    """Make the JSON document of a check: bytes and seconds."""
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "hardware": asdict(hardware),
        "passed": all(row.passed for row in rows),
        "rows": [_row(row) for row in rows],
    }


_FIGURES = (
    *("needed_bytes", "peak_bytes", "step_seconds", "step_seconds_range"),
    *("tokens_per_second_per_gpu", "tokens_per_second_per_gpu_range"),
)
"""The fields of an outcome that are shown, under their names."""


def _row(row: RecipeRow) -> dict[str, Any]:
    change = None
    if row.change:
        change = {"flags": flags_of(row.change.config), **_figures(row.change)}
    return {
        "config": row.config,
        "passed": row.passed,
        "error": row.error,
        "model": row.model or None,
        "world_size": row.world_size,
        "fits": row.fits,
        "allowed_bytes": row.allowed_bytes or None,
        **_figures(row.outcome),
        "change": change,
        "order": asdict(row.order) if row.order else None,
        "lock": asdict(row.lock) if row.lock else None,
    }


def _figures(outcome: Outcome | None) -> dict[str, Any]:
    return {key: getattr(outcome, key, None) for key in _FIGURES}


@group()
def check_text(rows: Sequence[RecipeRow], hardware: Hardware) -> Iterator[RenderableType]:
    """Make the table of a check, and below it what the table has no room for."""
    yield check_table(rows, hardware)
    for message, configs in _messages(rows).items():
        yield Text(f"- {', '.join(configs)}: {message}")
    failed = sum(not row.passed for row in rows)
    yield Text(f"{failed} of {len(rows)} failed." if failed else f"All {len(rows)} passed.")


def check_table(rows: Sequence[RecipeRow], hardware: Hardware) -> PlainTable:
    """Make the table of a check, a row for each recipe; speeds are those of the rows that fit."""
    planned = [row.outcome or Outcome(config={}) for row in rows]
    fitting = [outcome if outcome.fits else None for outcome in planned]
    bands = dict.fromkeys(o.band for o in fitting if o and o.band)
    fits = ["refused" if row.error else "yes" if row.fits else "NO" for row in rows]
    ranges = [tokens_range(o.tokens_per_second_per_gpu_range) if o else "" for o in fitting]
    columns: list[Column] = [
        ("recipe", "name", [row.config for row in rows]),
        ("ranks", "count", [row.world_size for row in rows]),
        ("fits", "text", fits),
        ("peak", "bytes", [outcome.peak_bytes or None for outcome in planned]),
        ("needs", "bytes", [outcome.needed_bytes or None for outcome in planned]),
        ("step", "seconds", [o.step_seconds if o else None for o in fitting]),
        ("tok/s/GPU", "count", [o.tokens_per_second_per_gpu if o else None for o in fitting]),
        ("range", "text", ranges),
    ]
    for heading, key in (("order", "order"), ("locked", "lock")):
        findings = [getattr(row, key) for row in rows]
        if any(findings):
            columns.append((heading, "text", [f.verdict if f else "" for f in findings]))
    # where all are refused there is no size, and on a CPU no range
    columns = [c for c in columns if any(value not in (None, "") for value in c[2])]
    memory = f"{gib(hardware.memory_bytes)} GiB"
    table = make_table(f"Recipes on {hardware.name}, {memory} a device", *columns)
    drawn = {column[0]: of_table for column, of_table in zip(columns, table.columns, strict=True)}
    if "range" in drawn:
        drawn["range"].no_wrap = True
    table.optional = tuple((drawn[key],) for key in ("peak", "range", "step") if key in drawn)
    sources = dict.fromkeys(band.source for band in bands)
    table.caption = "\n".join(f"Range: {source}." for source in sources)
    return table


def _messages(rows: Sequence[RecipeRow]) -> dict[str, list[str]]:
    """List why recipes fail and what would help, and remarks on lockfiles; by message the recipes
    that it is about, as a flag is wrong for all of them."""
    configs_of: dict[str, list[str]] = {}
    for row in rows:
        messages = [f"refused: {row.error}"] if row.error else []
        if row.outcome and not row.fits:
            messages.append(_what_helps(row.outcome, row.allowed_bytes, row.change))
        messages += [f.message for f in (row.order, row.lock) if f and f.message]
        for message in messages:
            configs_of.setdefault(message, []).append(row.config)
    return configs_of


def _what_helps(outcome: Outcome, allowed: int, change: Outcome | None) -> str:
    needs = f"needs {gib(outcome.needed_bytes)} GiB of {gib(allowed)} GiB"
    if change is None:
        return f"{needs}, and no setting makes it fit: use hardware with more memory"
    return (
        f"{needs}; with {' '.join(flags_of(change.config))} it fits in "
        f"{gib(change.needed_bytes)} GiB, {change.tokens_per_second_per_gpu:,.0f} tok/s/GPU"
    )
