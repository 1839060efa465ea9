"""graph-trainer: train, print a config, list the passes, examine the machine.

Each command imports what it needs, so that --help and a mistyped command answer at once.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name

from graph_trainer.errors import ConfigError, GraphTrainerError

_EXAMPLES = """\
examples:
  graph-trainer train
      the small Llama 3 on every GPU of this machine, or on two CPU ranks
  NGPU=8 graph-trainer train --config 8b --training.steps 100
      another config, with one value changed
  graph-trainer train --config my.toml --parallelism.tensor_parallel_degree 2
      a file of your own
  graph-trainer train --config 8b --help
      every key of that config, with its documentation and its value
  graph-trainer config --config 8b --training.steps 100 > my.toml
      the config those flags resolve to, as a file to give back with --config
  graph-trainer config --schema
      the JSON schema of the config files, from which an editor completes them
  graph-trainer plan --config 8b --world-size 128 --hardware h100-sxm
      what that run will communicate, need in memory and take in time, simulated without a GPU
  graph-trainer plan --config 8b --world-size 128 --hardware h100-sxm --save plan.json
      the same, and a file with which a run is compared: graph-trainer train --plan plan.json
  graph-trainer passes --compile.passes default,my_package.passes:my_pass
      the graph passes and one of your own, my_pass in my_package/passes.py
  graph-trainer bisect-passes --training.seq_len 32
      which pass makes loss or gradients differ from the model's own, if any does
  graph-trainer doctor
      what this machine has, what will not work on it, and what to do about that
"""

_RULES = """\
All flags after `train`, `config` and `bisect-passes` belong to the config; `plan` takes some of its
own besides. --module names a package of configs (default graph_trainer.llama3), --config one
of them (default debugmodel) or a path to a .toml file. Flags override the file, the file overrides
the registry entry that its `base` names.
"""

SCHEMA = "--schema"


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
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # tyro parses the config's flags, --help among them, so argparse sees only the first word.
    command = parser.parse_args(words[:1]).command
    if command is None:
        parser.print_help()
        return 0
    try:
        function, _ = _COMMANDS[command]
        _check_cache_folder()
        code: int = resolve_name(f"graph_trainer.cli.{function}")(words[1:])
        return code
    except GraphTrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


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
    """Train: as one rank under torchrun, otherwise by launching the ranks.

    A rank ends its process here, as `python -m graph_trainer.train` does (see `leave`).

    Raises:
        GraphTrainerError: bad input, found before any rank is started.
    """
    if "RANK" in os.environ:
        from graph_trainer.train import leave, run

        leave(run(argv))
    from graph_trainer.cli import launcher

    if {"-h", "--help"} & set(argv):
        print(launcher.USAGE, end="", flush=True)
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
    from graph_trainer.titan.config.serialize import config_to_toml

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
    from graph_trainer.planner.console import print_table

    named = []
    if argv:  # the modules of the config import torchtitan, which takes seconds
        from graph_trainer.titan.config.load import load_config

        named = resolve_passes(load_config(argv, prog="graph-trainer passes").compile.passes)
    passes = registered_passes() | {each.name: each for each in named}
    table = Table(title="Graph passes, in the order of their stages", title_justify="left")
    table.add_column("pass", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("default", justify="center", no_wrap=True)
    table.add_column("what it does, and its options")
    for each in sorted(passes.values(), key=lambda p: p.stage):
        defaults = each.options_type()
        options = [
            f"  {field.name} = {json.dumps(getattr(defaults, field.name), default=repr)}"
            for field in dataclasses.fields(defaults)
        ]
        # Text and not markup, which would take "x[0]" in a summary for a style.
        described = Text("\n".join([each.summary, *options]), overflow="fold")
        default = "yes" if each.default and each.name in registered_passes() else "no"
        table.add_row(each.name, each.stage.name.lower(), default, described)
    print_table(table)
    return 0


_COMMANDS = {
    "train": ("main:train", "train; launches the ranks unless torchrun did"),
    "plan": (
        "plan_command:main",
        "say what a run will communicate, need and take, without running it",
    ),
    "export": ("export:main", "write a checkpoint's model as from_pretrained reads it"),
    "config": (
        "main:print_config",
        "print the resolved config as TOML, or with --schema its JSON schema",
    ),
    "passes": ("main:print_passes", "list the graph passes"),
    "bisect-passes": (
        "bisect:bisect_passes",
        "find the pass, and the node, that changes the numbers; --help explains",
    ),
    "doctor": ("doctor:main", "say what this machine has, and what will not work on it"),
}
"""By name: the function of this folder that runs the command, and the command's help."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graph-trainer",
        description="Train a sharded model from one captured graph of its whole train step.",
        epilog=f"{_RULES}\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    try:
        installed = version("graph_trainer")
    except PackageNotFoundError:
        installed = "of a checkout that is not installed"
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed}")
    commands = parser.add_subparsers(dest="command", metavar=f"{{{','.join(_COMMANDS)}}}")
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser
