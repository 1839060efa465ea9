"""graph-trainer: train, print a config, list the passes, examine the machine.

Everything heavy is imported by the subcommand that needs it, so that --help and a
mistyped subcommand answer at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from graph_trainer.errors import GraphTrainerError

if TYPE_CHECKING:
    from rich.table import Table

    from graph_trainer.core.passes.base import Pass

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
      what that run will communicate, need in memory and take in time, told without a GPU
  graph-trainer plan --config 8b --world-size 128 --hardware h100-sxm --save plan.json
      the same, and a file that a run can be held to: graph-trainer train --plan plan.json
  graph-trainer passes
      the graph passes, in the order of their stages
  graph-trainer bisect-passes --training.seq_len 32
      which pass makes loss or gradients differ from the model's own, if any does
  graph-trainer doctor
      what this machine has, what will not work on it, and what to do about that
"""

_RULES = """\
All flags after `train` and `config` belong to the config. --module names a package of
configs (default graph_trainer.llama3), --config one of them (default debugmodel) or a path
to a .toml file. Flags override the file, the file overrides the registry entry its `base`
names.
"""

SCHEMA = "--schema"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Arguments:
        argv: the words after the program's name; None takes the process's own.
    Returns:
        The exit code: 0, or 2 after an error of the user's, told in one message; 1 where the
        doctor found what keeps this machine from training.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # The config's flags are tyro's to parse, --help among them, so argparse sees only
    # the first word.
    arguments = parser.parse_args(words[:1])
    try:
        if arguments.command == "train":
            return train(words[1:])
        if arguments.command == "bisect-passes":
            from graph_trainer.cli.bisect import bisect_passes

            return bisect_passes(words[1:])
        if arguments.command == "config":
            return print_config(words[1:])
        if arguments.command == "plan":
            return plan(words[1:])
        if arguments.command == "passes":
            return print_passes(words[1:])
        if arguments.command == "doctor":
            if words[1:]:
                parser.error(f"doctor takes no arguments, found {' '.join(words[1:])}")
            return print_doctor()
    except GraphTrainerError as e:
        return report(e)
    parser.print_help()
    return 0


def report(error: GraphTrainerError) -> int:
    """Print an error that a user can mend, without a traceback; returns exit code 2."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def train(argv: Sequence[str]) -> int:
    """Train: as one rank under a launcher, otherwise by launching the ranks.

    A rank ends its process here, as `python -m graph_trainer.train` does (see `leave`).

    Arguments:
        argv: the config's flags.
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

    With --schema print the JSON schema of the config files instead, with the options of passes
    of a user's own that --compile.passes names.

    Raises:
        ConfigError: bad input.
        PassError: --compile.passes names no pass.
    """
    from graph_trainer.titan.config.flags import only_passes
    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.config.serialize import config_to_toml

    if SCHEMA in argv:
        from graph_trainer.titan.config.schema import toml_schema

        rest = [word for word in argv if word != SCHEMA]
        print(json.dumps(toml_schema(only_passes(rest, f"config {SCHEMA}")), indent=2))
        return 0
    config = load_config(argv, prog="graph-trainer config")
    sys.stdout.write(config_to_toml(config))
    return 0


def plan(argv: Sequence[str]) -> int:
    """Print what a run will need, from a simulation.

    Raises:
        GraphTrainerError: bad input, or a step that cannot be captured.
    """
    from graph_trainer.cli.plan import main as plan_main

    return plan_main(argv)


def print_passes(argv: Sequence[str] = ()) -> int:
    """Print the table of all passes, at most 100 columns wide.

    Args:
        argv: nothing, or --compile.passes, whose passes of a user's own are shown as well.

    Raises:
        ConfigError: any other flag.
        PassError: --compile.passes names no pass.
    """
    from graph_trainer.core.passes.catalogue import registered_passes, resolve_passes
    from graph_trainer.planner.console import print_table
    from graph_trainer.titan.config.flags import only_passes

    named = resolve_passes(only_passes(argv, "passes"))
    print_table(passes_table(registered_passes() | {each.name: each for each in named}))
    return 0


def print_doctor() -> int:
    """Print what this machine has and lacks; 1 where something keeps it from training."""
    from graph_trainer.cli import doctor
    from graph_trainer.planner.console import print_table

    findings = doctor.examine()
    print_table(doctor.report(findings))
    return int(any(each.state is doctor.State.BROKEN for each in findings))


def passes_table(passes: "Mapping[str, Pass]") -> "Table":
    """Make the table of passes in stage order: name, stage, summary, options, default."""
    import dataclasses

    from rich.table import Table
    from rich.text import Text

    table = Table(title="Graph passes, in the order of their stages", title_justify="left")
    table.add_column("pass", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("default", justify="center", no_wrap=True)
    table.add_column("what it does, and its options")
    for each in sorted(passes.values(), key=lambda p: p.stage):
        options = [
            f"  {f.name} = {json.dumps(getattr(each.options_type(), f.name), default=repr)}"
            for f in dataclasses.fields(each.options_type)
        ]
        described = "\n".join([each.summary, *options])
        # Not markup: a summary may well speak of "x[0]".
        table.add_row(
            each.name,
            each.stage.name.lower(),
            "yes" if each.default else "no",
            Text(described, overflow="fold"),
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graph-trainer",
        description="Train a sharded model from one captured graph of its whole train step.",
        epilog=f"{_RULES}\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="command", metavar="{train,config,plan,passes,bisect-passes,doctor}"
    )
    for name, text in (
        ("train", "train; launches the ranks where no launcher did"),
        ("plan", "say what a run will communicate, need and take, without running it"),
        ("config", "print the resolved config as TOML, or with --schema its JSON schema"),
        ("passes", "list the graph passes"),
        ("bisect-passes", "find the pass, and the node, that changes the numbers; --help explains"),
        ("doctor", "say what this machine has, and what will not work on it"),
    ):
        commands.add_parser(name, help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
