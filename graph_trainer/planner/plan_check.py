"""`train --plan FILE`: compare a run with a plan, and refuse it where it is another run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graph_trainer.core.simulation.detect import detect_hardware
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import ConfigError, VerificationError
from graph_trainer.planner.fingerprint import Fingerprint
from graph_trainer.planner.plan import versions
from graph_trainer.planner.saved_plan import REMEDY, SavedPlan, pass_names
from graph_trainer.titan.config.check import world_size_from_environment
from graph_trainer.titan.config.core_settings import LIMIT_KEY as KEY
from graph_trainer.titan.config.core_settings import with_config_keys
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import read_flags, show, take_flags
from graph_trainer.titan.config.toml_file import parse_toml
from graph_trainer.titan.config.write_toml import config_to_toml

FLAG = "--plan"
FLAGS = ("plan", "dry_run")
_SHOWN = 8

# What a graph is made from: a message names these differences first.
_MAKES_GRAPHS = re.compile(
    r"(versions|module|base|training|parallelism|compile|activation_checkpoint|loss)(\.|$)"
)
_OF_BATCHES = ("training.local_batch_size:", "training.seq_len:")
"""Differences that change every graph."""
_INSTEAD = (
    "Train what was planned, or write the plan again with `graph-trainer plan --save`, or leave "
    "out --plan."
)


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """A plan that a run is compared with, and how the run's config and versions differ from it."""

    plan: SavedPlan
    path: Path
    differences: tuple[str, ...]
    """ "key: planned value, now value"; what changes graphs comes first."""

    @classmethod
    def of(
        cls,
        plan: SavedPlan,
        path: Path,
        config: GraphTrainerConfig,
        *,
        rehearses: bool = False,
        flag: str = FLAG,
    ) -> PlanCheck:
        """Compare config and versions of this run with those of the plan in a file.

        Args:
            rehearses: whether the run is simulated on the plan's hardware, not run here.
            flag: the flag that names the file, for messages.

        Raises:
            ConfigError: the plan's config is not TOML.
        """
        planned = parse_toml(plan.config, f"{flag} {path}: config")
        hardware = planned.get("compile", {}).get("hardware")  # the value of --hardware
        if config.compile.hardware is None and hardware is not None:
            if not rehearses:
                detected = detect_hardware()
                # a substitute may have the name of the plan's profile
                hardware = (
                    detected.hardware.name if detected.exact else with_config_keys(detected.why)
                )
            config = replace(config, compile=replace(config.compile, hardware=hardware))
        now = parse_toml(config_to_toml(config), "config") | {"versions": versions()}
        return cls(plan, path, differences(planned | {"versions": plan.versions}, now))

    def check(self, captured: Fingerprint, rank: int) -> None:
        """Refuse a step that is not the one planned for this global rank.

        Raises:
            VerificationError: with the first difference and its likely cause.
        """
        difference = self.plan.of_rank(rank).fingerprint.difference(captured)
        if difference is not None:
            cause = self.remark() or (
                f"Config and versions are the plan's; it was captured for "
                f"'{self.plan.hardware.device}'"
            )
            raise VerificationError(
                f"rank {rank} captured another step than {self.path} has: {difference}. {cause}. "
                f"{_INSTEAD}"
            )

    def check_run(self, run: SavedPlan, limit_gib: float | None) -> None:
        """Refuse a run that is planned on the plan's hardware, as its ranks would refuse it there.

        Args:
            run: the plan of the run's config, of as many ranks as the plan to compare with.
            limit_gib: compile.memory_limit_gib.

        Raises:
            ConfigError: the run needs more memory than the limit, or than the hardware has.
            VerificationError: as `check`, for the first rank of any class.
        """
        for rank in sorted({*self.plan.classes, *run.classes}):
            self.check(run.of_rank(rank).fingerprint, rank)
        _check_memory(run, self.path, limit_gib)

    def remark(self) -> str:
        """Describe how config and versions differ from the plan's; empty where they do not."""
        if not self.differences:
            return ""
        more = len(self.differences) - _SHOWN
        shown = "; ".join(self.differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        return f"Config or versions are not those of {self.path}: {shown}"


def load_config_and_plan(
    words: Sequence[str], *, world_size: int | None = None, rehearses: bool = False
) -> tuple[GraphTrainerConfig, PlanCheck | None]:
    """Load the config of a command line and the plan that its --plan names.

    A plan names nothing that is loaded: the command line gives the config.

    Args:
        world_size: as `load_config` takes it.
        rehearses: as `PlanCheck.of` takes it.

    Returns:
        the checked config; and what to compare the run with, or None without --plan.

    Raises:
        ConfigError: bad input; or, before any process group is created, no --config beside the
            plan, a plan for another number of ranks, other batches, another list of passes, more
            memory than there is, or a run that captures nothing.
    """
    values, rest = take_flags(words, {FLAG: "plan.json, which `graph-trainer plan --save` writes"})
    if FLAG not in values or {"-h", "--help"} & {*rest}:
        return load_config(
            rest, world_size=world_size, command_flags=FLAGS, reads_checkpoint=True
        ), None
    path = Path(values[FLAG])
    plan = SavedPlan.read(path, FLAG, REMEDY)
    if read_flags(rest).config is None:
        raise ConfigError(
            f"{FLAG} {path}: a plan is compared with a run and names nothing to train. Give the "
            "--config that it was made with (debugmodel where there was none), and the flags."
        )
    ranks = world_size_from_environment() if world_size is None else world_size
    if ranks not in (None, plan.world_size):
        raise ConfigError(
            f"{FLAG} {path}: planned for {plan.world_size} ranks, but {ranks} are started. Start "
            f"{plan.world_size} (NGPU), or write the plan again with --world-size {ranks}."
        )
    config = load_config(
        rest, world_size=plan.world_size, command_flags=FLAGS, reads_checkpoint=True
    )
    if config.compile.mode == "eager":
        raise ConfigError(
            f"{FLAG} {path}: compile.mode = {show(config.compile.mode)} captures no graph that "
            'could be compared with a plan. Set compile.mode = "aot_fx_trace", or leave out --plan.'
        )
    names = pass_names(config)
    if names != plan.passes:
        raise ConfigError(
            f"{FLAG} {path}: planned with the passes {', '.join(plan.passes) or 'none'}, but "
            f"compile.passes and compile.disable_passes ask for {', '.join(names) or 'none'}. Set "
            "them as planned, or write the plan again with `graph-trainer plan --save`."
        )
    _check_memory(plan, path, config.compile.memory_limit_gib)
    check = PlanCheck.of(plan, path, config, rehearses=rehearses)
    for difference in check.differences:
        if difference.startswith(_OF_BATCHES):  # what is captured shows the others, if they matter
            raise ConfigError(f"{FLAG} {path}: {difference}. {_INSTEAD}")
    return config, check


def _check_memory(plan: SavedPlan, path: Path, limit: float | None) -> None:
    """Refuse a plan that needs more than the limit; without one, than its hardware has."""
    needed = max(planned.predicted.needed_bytes for planned in plan.classes.values())
    what, room, risk = f"{KEY} is", limit, f"raise {KEY}"
    if limit is None:
        what, room = f"{KEY} is unset and '{plan.hardware.name}' has", plan.hardware.memory_gib
        risk = f"take the risk with {KEY} = 0"
    if room and needed > room * GIB:
        raise ConfigError(
            f"{FLAG} {path}: the step needs {gib(needed)} GiB on the rank that needs most, but "
            f"{what} {room:g} GiB. Plan a step that needs less (`graph-trainer plan` lists what "
            f"would help), or {risk}."
        )


def differences(planned: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """List the keys whose values differ, those that change graphs first."""
    before, after = dict(_flat(planned, "")), dict(_flat(now, ""))
    keys = [key for key in before | after if before.get(key) != after.get(key)]
    keys.sort(key=lambda key: _MAKES_GRAPHS.match(key) is None)
    return tuple(
        f"{key}: planned {show(before[key]) if key in before else 'unset'}, "
        f"now {show(after[key]) if key in after else 'unset'}"
        for key in keys
        if key not in ("dump_folder", "metrics.console")
    )


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
