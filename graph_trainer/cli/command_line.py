"""What the commands share of reading a command line and the environment."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NoReturn

from graph_trainer.errors import ConfigError

if TYPE_CHECKING:
    from graph_trainer.titan.config.run_config import GraphTrainerConfig

SCHEMA = "--schema"
DRY_RUN = "--dry-run"


class CommandParser(argparse.ArgumentParser):
    """A parser of a command's own flags, whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError in place of a page of usage."""
        raise ConfigError(f"{message}. `{self.prog} --help` explains its flags.")


def with_names_of_environment(argv: Sequence[str]) -> list[str]:
    """Return the flags with --module and --config from MODULE and CONFIG where no flag names them.

    A resolved file names its own module, so there is no default here.
    """
    words = list(argv)
    for flag in ("--config", "--module"):
        value = variable(flag.removeprefix("--").upper())
        if value and not any(word == flag or word.startswith(f"{flag}=") for word in argv):
            words[:0] = [flag, value]
    return words


def variable(name: str, default: str = "") -> str:
    """Read a variable of the environment; an empty one counts as unset."""
    return os.environ.get(name) or default


def positive(text: str) -> int:
    """Read a whole number of 1 or more, such as of ranks: a type of argparse."""
    if not re.fullmatch("0*[1-9][0-9]{0,6}", text):  # a mesh has a number for each rank
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1 to 9,999,999")
    return int(text)


def add_hardware_flag(parser: argparse.ArgumentParser) -> None:
    """Add --hardware, which names the profile that runs are simulated on."""
    from graph_trainer.core.simulation.hardware import known_hardware

    parser.add_argument(
        "--hardware",
        default="h100-sxm",
        metavar="NAME",
        help=f"{', '.join(known_hardware())}, or the path of a TOML file of your own "
        "(default %(default)s)",
    )


def load_for_plan(
    words: Sequence[str], world_size: int | None, prog: str, flags: argparse.Namespace
) -> GraphTrainerConfig:
    """Load the checked config of a run that is planned here and trains elsewhere.

    Args:
        words: the flags of the config.
        world_size: None leaves out the checks that need it.
        flags: of the command, --hardware among them, which stands for an unset compile.hardware.

    Raises:
        ConfigError: as `load_config`.
    """
    from graph_trainer.titan.config.load import load_config

    config = load_config(
        words, world_size=world_size, prog=prog, command_flags=vars(flags), reads_text=False
    )
    if config.compile.hardware is None:
        config.compile = replace(config.compile, hardware=flags.hardware)
    return config


def import_config_classes() -> None:
    """Import the classes of configs, torchtitan's with them, in a process that compiles nothing.

    torchtitan compiles FlexAttention as it is imported, for which torch imports Inductor: a quarter
    of the time until a mistake is reported. No captured step calls it (see `_model_spec`).
    """
    from unittest.mock import patch

    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
        resolve_name("graph_trainer.titan.config.run_config")
