"""graph-trainer check: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from graph_trainer.cli.command_line import (
    CommandParser,
    add_hardware_flag,
    load_for_plan,
    positive,
)
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.errors import ConfigError
from graph_trainer.planner.plan import LoadConfig
from graph_trainer.planner.processes import usable_processes
from graph_trainer.planner.recipe_check import (
    AGAINST,
    LOCK,
    Check,
    Recipe,
    check_lockfile_names,
    check_recipes,
    check_report,
    check_text,
)
from graph_trainer.planner.terminal import print_table, progress
from graph_trainer.titan.config.check import world_size_from_environment
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import read_flags
from graph_trainer.titan.files import check_outputs, published

_PROG = "graph-trainer check"

_DESCRIPTION = """\
Check configs without a GPU: that each of them loads, divides on the ranks and fits the hardware,
and that no ranks of it wait for each other forever. With --lock the graph of each is written to a
file to commit; with --against it is compared with that file, after an upgrade of torch, torchtitan
or the model. Ends with exit code 1 if any config is refused, does not fit, has no proof of its
order, or is not as locked. All flags that are not listed here are the config's, for all of them.
"""

_EXAMPLES = """\
examples:
  graph-trainer check recipes/*.toml --hardware h100-sxm --world-size 8
  graph-trainer check 8b 70b --world-size 256 --parallelism.tensor_parallel_degree 8
  graph-trainer check --module graph_trainer.qwen3 8b 32b --world-size 64 --json check.json
  graph-trainer check recipes/*.toml --world-size 8 --lock locks
  graph-trainer check recipes/*.toml --world-size 8 --against locks --no-order
"""


def main(argv: Sequence[str]) -> int:
    """Run `graph-trainer check`; return its exit code, 1 where a config fails.

    Raises:
        GraphTrainerError: bad input of the command itself, found before any config is loaded.
    """
    flags, rest = _parser().parse_known_args(list(argv))
    configs, words = _configs_and_flags(rest)
    if not configs:
        raise ConfigError(
            "command line: no configs: name TOML files or shipped configs, as in `graph-trainer "
            "check recipes/*.toml` or `graph-trainer check 8b 70b`"
        )
    if read_flags(words).config is not None:
        raise ConfigError(
            "command line: --config: configs are named without a flag: `graph-trainer check 8b "
            "my.toml`"
        )
    if flags.lock and flags.against:
        raise ConfigError(
            f"{LOCK} and {AGAINST}: one writes lockfiles and one compares with them: leave one out"
        )
    if flags.all_ranks and not flags.order:
        raise ConfigError("--all-ranks is for the proof that --no-order leaves out: leave one out")
    hardware = load_hardware(flags.hardware)
    world_size = flags.world_size or world_size_from_environment()
    recipes = [Recipe(config, _loader(config, words, flags)) for config in configs]
    _check_files(flags, recipes)
    check = Check(
        hardware,
        world_size,
        proves_order=flags.order,
        all_ranks=flags.all_ranks,
        lock=flags.lock,
        against=flags.against,
    )
    with progress("check") as say:
        rows = check_recipes(recipes, check, say, usable_processes())
    report = check_report(rows, hardware)
    stdout_is_a_file = flags.json and flags.json.resolve() == Path("/dev/stdout").resolve()
    print_table(check_text(rows, hardware), stderr=bool(stdout_is_a_file))
    if flags.json:
        with published(flags.json) as file:
            file.write(json.dumps(report, indent=2) + "\n")
        print(f"wrote {flags.json}", file=sys.stderr)
    return 0 if report["passed"] else 1


def _configs_and_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the names of configs from the config's flags; a word behind a flag is its value."""
    configs: list[str] = []
    flags: list[str] = []
    takes_value = False
    for word in words:
        is_flag = word.startswith("--")
        if is_flag or takes_value:
            flags.append(word)
        else:
            configs.append(word)
        takes_value = is_flag and "=" not in word
    return configs, flags


def _loader(config: str, words: Sequence[str], flags: argparse.Namespace) -> LoadConfig:
    """Return the function that loads a config with the flags for all, and with more."""

    def load(more: Sequence[str], ranks: int | None = None) -> GraphTrainerConfig:
        return load_for_plan(["--config", config, *words, *more], ranks, _PROG, flags)

    return load


def _check_files(flags: argparse.Namespace, recipes: Sequence[Recipe]) -> None:
    """Check that all results can be written, and that each recipe has a lockfile of its own. Make
    the folder of new ones.

    Raises:
        ConfigError: one of these is not so, or there is no folder to compare with.
    """
    if flags.against:
        check_lockfile_names(recipes, flags.against, AGAINST)
        if not flags.against.is_dir():
            raise ConfigError(
                f"{AGAINST} {flags.against}: there is no such folder: write the lockfiles first, "
                f"with {LOCK} {flags.against}, or name the folder that has them"
            )
    outputs = {"--json": flags.json} if flags.json else {}
    if flags.lock:
        check_lockfile_names(recipes, flags.lock, LOCK)
        try:
            flags.lock.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{LOCK} {flags.lock}: not a folder, nor one that can be made "
                f"({error.strerror}): name another"
            ) from error
        outputs |= {f"{LOCK} of {r.config}": r.lockfile(flags.lock) for r in recipes}
    check_outputs(outputs)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_PROG,
        usage="graph-trainer check CONFIG... [flags] [flags of the config]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="number of ranks; by default WORLD_SIZE, or the product of a config's degrees where "
        "parallelism.data_parallel_shard_degree is not -1",
    )
    add_hardware_flag(parser)
    parser.add_argument(
        "--no-order",
        dest="order",
        action="store_false",
        help="leave out the proof that all ranks run the same collectives in the same order, which "
        "captures one rank of each class that differs",
    )
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="capture every rank for that proof, not one of each class: for code that reads the "
        "rank's number, and experts over part of the ranks that shard",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        LOCK,
        type=Path,
        metavar="DIR",
        help="write the graph of each config to DIR/NAME.json, as `graph-trainer plan --save` does",
    )
    parser.add_argument(
        AGAINST,
        type=Path,
        metavar="DIR",
        help="compare each config with DIR/NAME.json and name the first op, collective or bytes "
        "that changed",
    )
    return parser
