"""graph-trainer: train, print a config, list the passes, examine the machine.

Each command imports what it needs, so that --help and a mistyped command answer at once.
"""

import atexit
import dataclasses
import errno
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name

from graph_trainer.cli.command_line import (
    DRY_RUN,
    SCHEMA,
    import_config_classes,
)
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.core.text import error_text
from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.train import collect_rarely

_EXAMPLES = """\
examples:
  NGPU=8 graph-trainer train --config 8b --training.steps 100
      a config with one value changed; without flags the small Llama 3 on every GPU of this
      machine, or on two CPU ranks
  graph-trainer train --config my.toml --dry-run
      check the config, and print it, the ranks and what the run will need
  graph-trainer train --config 8b --help lr
      the keys of that config about lr, with documentation and values; without a word all of them
  graph-trainer config --config 8b --training.steps 100 > my.toml
      the config those flags resolve to, as a file to give back with --config
  graph-trainer plan --config 8b --world-size 128 --hardware h100-sxm
      what that run will communicate, need in memory and take in time, simulated without a GPU
"""

_RULES = """\
All flags after `train`, `config` and `bisect-passes` belong to the config; `plan`, `search` and
`check` take some of their own besides. --module names a package of configs (default
graph_trainer.llama3), --config one of them (default debugmodel) or a path to a .toml file. Flags
override the file, the file overrides the registry entry that its `base` names.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after the program's name; None takes those of the process, which then finds
            modules in the current folder, as `python -m` does and so every rank.
    Returns:
        The exit code: 0; 2 after a mistake of the user, explained in one message; or the command's
        own.
    """
    if argv is None and not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if sys.stdout is None:  # closed, as by `>&-`
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    command, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = _run(command, words)
        sys.stdout.flush()
        return code
    except GraphTrainerError as error:
        print(error_text(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:  # of the output, which has no file name here
        if error.filename or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader, such as head, has what it wants
            return 128 + signal.SIGPIPE
        print("error: the output cannot be written: the disk is full", file=sys.stderr)
        return 2


def _run(command: str, words: list[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        try:
            installed = version("graph_trainer")
        except PackageNotFoundError:
            installed = "of a checkout that is not installed"
        print(f"graph-trainer {installed}")
        return 0
    if command not in _COMMANDS:
        guess = did_you_mean(command, [*_COMMANDS, "--help", "--version"], otherwise=".")
        raise ConfigError(
            f"command line: there is no command {command}{guess} "
            f"`graph-trainer --help` explains {', '.join(_COMMANDS)}."
        )
    function, about = _COMMANDS[command]
    if command == "doctor" and {"-h", "--help"} & {*words}:
        print(f"graph-trainer {command}:\n  {about}")
        return 0
    _check_cache_folder()
    collect_rarely()
    atexit.register(gc.freeze)  # nor are they looked through as the process ends
    if command in ("plan", "search", "check", "calibrate", "config") or DRY_RUN in words:
        import_config_classes()
    return resolve_name(f"graph_trainer.cli.{function}")(words)


def _check_cache_folder() -> None:
    """Refuse a folder for compiled code that torch, which makes it when imported, cannot make."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    try:
        if folder := os.environ.get(name):
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"environment: torch keeps what it compiles in {name} = {folder!r}, which cannot be "
            f"made ({error.strerror}): name a folder that you may write, or unset it"
        ) from None


def train(argv: Sequence[str]) -> int:
    """Train: as one rank under torchrun, otherwise by launching the ranks; or say what would run.

    A rank ends its process here, as `python -m graph_trainer.train` does (see `leave`).

    Raises:
        GraphTrainerError: bad input that shows before any rank is started.
    """
    if "RANK" in os.environ:
        from graph_trainer.train import leave, run

        leave(run(argv))
    from graph_trainer.cli import launcher

    if argv and argv[-1] in ("-h", "--help"):
        print(launcher.USAGE, end="", flush=True)
    if DRY_RUN in argv:
        from graph_trainer.cli.plan_command import dry_run

        return dry_run([word for word in argv if word != DRY_RUN])
    return launcher.start(launcher.prepare(argv))


def print_config(argv: Sequence[str]) -> int:
    """Print the resolved config of the flags as TOML, on any machine.

    With --schema, print the JSON schema of config files instead. It includes the options of the
    user's own passes that the flags, or the file that they name, list.

    Raises:
        ConfigError: bad input.
    """
    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.config.schema import toml_schema
    from graph_trainer.titan.config.write_toml import config_to_toml

    rest = [word for word in argv if word != SCHEMA]
    config = load_config(rest, prog="graph-trainer config")
    if SCHEMA in argv:
        print(json.dumps(toml_schema(config.compile.passes), indent=2))
    else:
        sys.stdout.write(config_to_toml(config))
    return 0


def print_passes(argv: Sequence[str]) -> int:
    """Print the table of all passes, at most 100 columns wide.

    Args:
        argv: nothing, or a config's flags; the user's own passes in its list are shown as well.

    Raises:
        ConfigError: bad input.
    """
    from rich.table import Table
    from rich.text import Text

    from graph_trainer.core.passes.catalogue import registered_passes, resolve_passes
    from graph_trainer.planner.terminal import print_table

    named = []
    if argv:  # the modules of the config import torchtitan, which takes seconds
        from graph_trainer.titan.config.load import load_config

        named = resolve_passes(load_config(argv, prog="graph-trainer passes").compile.passes)
    passes = registered_passes() | {pass_.name: pass_ for pass_ in named}
    table = Table(title="Graph passes, in the order of their stages", title_justify="left")
    table.add_column("pass", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("default", justify="center", no_wrap=True)
    table.add_column("what it does, and its options")
    for pass_ in sorted(passes.values(), key=lambda p: p.stage):
        defaults = pass_.options_type()
        options = [
            f"  {field.name} = " + ("unset" if value is None else json.dumps(value, default=repr))
            for field in dataclasses.fields(defaults)
            for value in [getattr(defaults, field.name)]
        ]
        # Text and not markup, which would take "x[0]" in a summary for a style.
        described = Text("\n".join([pass_.summary, *options]), overflow="fold")
        default = "yes" if pass_.default and pass_.name in registered_passes() else "no"
        table.add_row(pass_.name, pass_.stage.name.lower(), default, described)
    print_table(table)
    return 0


_COMMANDS = {
    "train": ("main:train", "train; launches the ranks unless torchrun did"),
    "plan": (
        "plan_command:main",
        "say what a run will communicate, need and take, without running it",
    ),
    "search": (
        "search_command:main",
        "find the fastest mesh, policies and batch for some machines",
    ),
    "check": (
        "check_command:main",
        "check that configs load, fit and keep their graphs, as in continuous integration",
    ),
    "calibrate": (
        "calibrate_command:main",
        "measure a machine, or read traces of a run, for a hardware profile of plan",
    ),
    "export": ("export_command:main", "write a checkpoint's model as from_pretrained reads it"),
    "config": (
        "main:print_config",
        "print the resolved config as TOML, or with --schema its JSON schema",
    ),
    "passes": ("main:print_passes", "list the graph passes, with those that a config adds"),
    "bisect-passes": ("bisect:bisect_passes", "find the pass, and the node, that changes numbers"),
    "doctor": ("doctor:main", "say what this machine has, and what will not work on it"),
}
"""By name: the function of this folder that runs the command, and the command's help."""

_HELP = """\
usage: graph-trainer [--help] [--version] COMMAND ...

Train a sharded model from one captured graph of its whole train step.

commands, each with a --help of its own:
"""
_HELP += "".join(f"  {name:15}{about}\n" for name, (_, about) in _COMMANDS.items())
_HELP += f"\n{_RULES}\n{_EXAMPLES}"
