"""graph-trainer: train, print a config, list the passes, examine the machine.

Everything heavy is imported by the subcommand that needs it, so that --help and a
mistyped subcommand answer at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graph_trainer.errors import ConfigError, GraphTrainerError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

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
TRAIN = "graph_trainer.train"

Exec = Callable[[Sequence[str], dict[str, str]], int]


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
            if words[1:]:
                parser.error(f"passes takes no arguments, found {' '.join(words[1:])}")
            return print_passes()
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
    return launch(argv)


def launch(argv: Sequence[str], *, module: str = TRAIN, execute: Exec | None = None) -> int:
    """Check the config once, then replace this process by torchrun.

    The environment decides the ranks, as torchtitan's run_train.sh has it: NGPU on each
    machine (default: its GPUs; without
    any, what the degrees of parallelism multiply to, or 2), NNODES, NODE_RANK and RDZV_ENDPOINT for
    several machines, LOG_RANK for the local ranks that print (default 0), MAX_RESTARTS for how
    often all ranks are started anew after one has failed (default 0).

    Arguments:
        argv: the config's flags.
        module: what each rank runs.
        execute: runs a command with an environment, in place of os.execve.
    Raises:
        ConfigError: the config, or one of these variables, cannot be used.
    """
    from graph_trainer.planner.plan_check import held_to
    from graph_trainer.titan.config.check_hardware import check_hardware
    from graph_trainer.titan.config.validate import check_config, wanted_ranks
    from graph_trainer.train import restarts

    machines = _positive("NNODES", 1)
    ranks = ranks_per_machine()
    if ranks is None and machines == 1:
        config, plan = held_to(argv)
        ranks = wanted_ranks(config) if plan is None else plan.plan.world_size
        check_config(config, ranks)
    else:
        ranks = ranks or 2
        config, _ = held_to(argv, world_size=ranks * machines)
    check_hardware(config)
    again = restarts(config)
    command = torchrun_command(argv, ranks, machines, module)
    environment = dict(os.environ)
    # torchrun gives each rank one thread where nobody says otherwise; on a CPU the
    # threads are what trains.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    if again:
        # The agent's own store keeps the addresses of the ranks that are gone, and new ranks
        # connect to those (torch 2.13; pytorch issue 167288). Every start makes its own then.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    return (execute or _execve)(command, environment)


def torchrun_command(
    argv: Sequence[str], ranks: int, machines: int = 1, module: str = TRAIN
) -> list[str]:
    """The torchrun command that trains with these flags, or runs another module with them.

    Raises:
        ConfigError: several machines without an address to meet at.
    """
    endpoint = os.environ.get("RDZV_ENDPOINT", "localhost:0")
    if machines > 1 and "RDZV_ENDPOINT" not in os.environ:
        raise ConfigError(
            f"environment: NNODES = {machines}, but RDZV_ENDPOINT is not set. Set it to "
            "host:port of one of the machines, the same on all of them."
        )
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nproc_per_node={ranks}", f"--nnodes={machines}"]
    if "NODE_RANK" in os.environ:
        command.append(f"--node_rank={os.environ['NODE_RANK']}")
        if machines > 1:
            # torchrun's guess by host name fails behind aliases
            command.append(f"--rdzv_conf=is_host={int(os.environ['NODE_RANK'] == '0')}")
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}"]
    command.append(f"--max_restarts={os.environ.get('MAX_RESTARTS', '0')}")
    command += [f"--local-ranks-filter={os.environ.get('LOG_RANK', '0')}", "--role=rank", "--tee=3"]
    return [*command, "-m", module, *argv]


def ranks_per_machine() -> int | None:
    """NGPU, or else the number of GPUs, or None on a machine without any.

    Raises:
        ConfigError: NGPU is not a positive number.
    """
    if "NGPU" in os.environ:
        return _positive("NGPU", 1)
    import torch

    return torch.cuda.device_count() or None


def _positive(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(
            f"environment: {name} = {text!r}: not a positive number. Set it to 1 or more, or "
            "unset it."
        )
    return int(text)


def _execve(command: Sequence[str], environment: dict[str, str]) -> int:
    # The process becomes torchrun, so that a signal sent to it reaches the ranks.
    os.execve(command[0], list(command), environment)


def print_config(argv: Sequence[str]) -> int:
    """Print the resolved config of the flags as TOML, on any machine.

    With --schema alone print the JSON schema of the config files instead.

    Raises:
        ConfigError: bad input.
    """
    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.config.serialize import config_to_toml

    if SCHEMA in argv:
        if list(argv) != [SCHEMA]:
            others = " ".join(word for word in argv if word != SCHEMA)
            raise ConfigError(
                f"command line: {SCHEMA} stands alone, found {others}: the schema is the same for "
                f"every config. Leave one of the two out."
            )
        return print_schema()
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


def print_schema() -> int:
    """Print the JSON schema of the config files."""
    from graph_trainer.titan.config.schema import toml_schema

    print(json.dumps(toml_schema(), indent=2))
    return 0


def print_passes() -> int:
    """Print the table of all passes, at most 100 columns wide."""
    _print_table(passes_table())
    return 0


def print_doctor() -> int:
    """Print what this machine has and lacks; 1 where something keeps it from training."""
    from graph_trainer.cli import doctor

    findings = doctor.examine()
    _print_table(doctor.report(findings))
    return int(any(each.state is doctor.State.BROKEN for each in findings))


def _print_table(table: "RenderableType") -> None:
    from rich.console import Console

    terminal = Console()
    width = min(terminal.width, 100) if terminal.is_terminal else 100
    Console(width=width).print(table)


def passes_table() -> "Table":
    """Every registered pass in stage order: name, stage, summary, options, default."""
    import dataclasses

    from rich.table import Table
    from rich.text import Text

    from graph_trainer.core.passes.catalogue import registered_passes

    table = Table(title="Graph passes, in the order of their stages", title_justify="left")
    table.add_column("pass", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("default", justify="center", no_wrap=True)
    table.add_column("what it does, and its options")
    for each in sorted(registered_passes().values(), key=lambda p: p.stage):
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
