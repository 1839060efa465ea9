"""`train --plan FILE`: compare a run with a plan, and refuse it where it is another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graph_trainer.core.simulation.detect import detect_hardware
from graph_trainer.core.toml_file import parse_toml
from graph_trainer.errors import ConfigError, VerificationError
from graph_trainer.planner.fingerprint import Fingerprint, first_difference
from graph_trainer.planner.plan import versions
from graph_trainer.planner.saved_plan import SavedPlan, pass_names, read_plan
from graph_trainer.titan.config.check import world_size_from_environment
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.serialize import config_to_toml
from graph_trainer.titan.config.sources import read_flags, show, take_flags

FLAG = "--plan"
_CAUSES_SHOWN = 8

# The sections that a graph is made from; a message names their differences first.
_MAKE_GRAPHS = (
    "module",
    "base",
    "training",
    "parallelism",
    "compile",
    "activation_checkpoint",
    "loss",
)
_NEVER = ("dump_folder",)


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """A plan that a run is compared with, and how config and versions differ from the plan's."""

    plan: SavedPlan
    path: Path
    config_differs: tuple[str, ...]
    """ "key: planned value, now value"; keys that change graphs come first."""
    versions_differ: tuple[str, ...]
    """ "package: planned version, now version"."""

    @classmethod
    def of(cls, plan: SavedPlan, path: Path, config: GraphTrainerConfig) -> PlanCheck:
        """Compare the config and the versions of this run with those of the plan in a file."""
        planned = plan.config_table()
        if config.compile.hardware is None and "hardware" in planned.get("compile", {}):
            # what the run simulates; in the plan it is what --hardware said
            named = detect_hardware().hardware.name
            config = replace(config, compile=replace(config.compile, hardware=named))
        now = parse_toml(config_to_toml(config), "config")
        config_differs = differences(planned, now)
        return cls(plan, path, config_differs, differences(plan.versions, versions()))

    def check(self, captured: Fingerprint, rank: int) -> None:
        """Refuse a step that is not the one planned for this global rank.

        Raises:
            VerificationError: with the first difference and its likely cause.
        """
        planned = self.plan.fingerprint(self.plan.of_rank(rank))
        difference = first_difference(planned, captured)
        if difference is not None:
            raise VerificationError(
                f"rank {rank} captured another step than {self.path} has: {difference}. "
                f"{self._causes()} Train what was planned, or write the plan again with "
                "`graph-trainer plan --save`, or leave out --plan."
            )

    def _causes(self) -> str:
        causes = []
        if self.config_differs:
            causes.append(f"The config differs from the plan's: {_some(self.config_differs)}.")
        if self.versions_differ:
            causes.append(f"Versions differ: {_some(self.versions_differ)}.")
        return " ".join(causes) or (
            f"Config and versions are the plan's; it was captured for '{self.plan.device}'."
        )

    def remarks(self) -> list[str]:
        """Return a warning for versions and one for a config that differ from the plan's."""
        differing = {
            f"{self.path} was made by other versions": self.versions_differ,
            f"the config is not the one of {self.path}": self.config_differs,
        }
        return [f"{what}: {_some(each)}" for what, each in differing.items() if each]


def load_config_and_plan(
    words: Sequence[str], *, world_size: int | None = None
) -> tuple[GraphTrainerConfig, PlanCheck | None]:
    """Load the config of a command line and the plan that its --plan names.

    A plan names nothing that is loaded: the command line gives the config.

    Args:
        words: the command line.
        world_size: as `load_config` takes it.

    Returns:
        the checked config; and what to compare the run with, or None without --plan.

    Raises:
        ConfigError: bad input; or, before any process group is created, no --config beside the
            plan, a plan for another number of ranks, another list of passes, or a run that captures
            nothing.
    """
    values, rest = take_flags(words, {FLAG: "plan.json, which `graph-trainer plan --save` writes"})
    if FLAG not in values:
        return load_config(rest, world_size=world_size), None
    path = Path(values[FLAG])
    if {"-h", "--help"} & {*rest}:
        return load_config(rest, world_size=world_size), None
    plan = read_plan(path)
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
    config = load_config(rest, world_size=plan.world_size)
    _check_compile(path, plan, config)
    return config, PlanCheck.of(plan, path, config)


def differences(planned: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """List the keys whose values differ, those that change graphs first."""
    before, after = dict(_flat(planned, "")), dict(_flat(now, ""))
    keys = [
        key for key in before | after if before.get(key) != after.get(key) and key not in _NEVER
    ]
    keys.sort(key=lambda key: key.split(".")[0] not in _MAKE_GRAPHS)
    return tuple(f"{k}: planned {_shown(before, k)}, now {_shown(after, k)}" for k in keys)


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(table: Mapping[str, Any], key: str) -> str:
    return show(table[key]) if key in table else "unset"


def _some(differences: Sequence[str]) -> str:
    more = len(differences) - _CAUSES_SHOWN
    shown = "; ".join(differences[:_CAUSES_SHOWN])
    return f"{shown}; and {more} more" if more > 0 else shown


def _check_compile(path: Path, plan: SavedPlan, config: GraphTrainerConfig) -> None:
    if config.compile.mode == "eager":
        raise ConfigError(
            f"{FLAG} {path}: compile.mode = {show(config.compile.mode)} captures no graph that "
            'could be compared with a plan. Set compile.mode = "aot_fx_trace", or leave out --plan.'
        )
    names = pass_names(config)
    if names != list(plan.passes):
        raise ConfigError(
            f"{FLAG} {path}: planned with the passes {', '.join(plan.passes) or 'none'}, but "
            f"compile.passes and compile.disable_passes ask for {', '.join(names) or 'none'}. Set "
            "them as planned, or write the plan again with `graph-trainer plan --save`."
        )
