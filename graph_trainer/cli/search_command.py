"""graph-trainer search: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from graph_trainer.cli.command_line import (
    CommandParser,
    add_hardware_flag,
    load_for_plan,
    positive,
)
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError
from graph_trainer.planner.html.page import write_comparison
from graph_trainer.planner.processes import usable_processes
from graph_trainer.planner.search.search import limit_gib, search
from graph_trainer.planner.search.search_report import commands, page_of, search_report, search_text
from graph_trainer.planner.search.space import VARIED, Space, fixed_values
from graph_trainer.planner.terminal import print_table, progress
from graph_trainer.planner.training_cost import add_cost_flags, check_cost_flags, cost_of
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.files import check_outputs, published

_DESCRIPTION = """\
Find the fastest way to train a config on some machines, without a GPU: degrees of all kinds of
parallelism, policies of activations and parameters, and the local batch. Runs are compared by
formulas and by models of few layers, and the most promising ones are simulated as
`graph-trainer plan` does. All flags that are not listed here are the config's.
"""

_EXAMPLES = """\
examples:
  graph-trainer search --config 70b --world-size 256 --hardware h100-sxm
  graph-trainer search --config 8b --world-size 64 --global-batch 512 --html search.html
  graph-trainer search --config 70b --world-size 256 --fix parallelism.tensor_parallel_degree=8
  graph-trainer search --config 8b --world-size 64 --fix activation_checkpoint.type=none,full
"""


def main(argv: Sequence[str]) -> int:
    """Run `graph-trainer search`; return its exit code: 0, or 1 where nothing fits.

    Raises:
        GraphTrainerError: bad input.
    """
    flags, words = _parser().parse_known_args(list(argv))
    check_cost_flags(flags)
    hardware = load_hardware(flags.hardware)
    for key in VARIED:
        if any(word.partition("=")[0] == f"--{key}" for word in words):
            raise ConfigError(f"--{key}: the search varies it: fix it by --fix {key}=VALUE")
    fixed = fixed_values(flags.fix)
    files = {name: getattr(flags, name) for name in ("json", "html") if getattr(flags, name)}
    check_outputs({f"--{name}": path for name, path in files.items()})

    def load(more: Sequence[str], ranks: int | None = None) -> GraphTrainerConfig:
        # the degrees of the config itself need not multiply to the ranks
        world_size = flags.world_size if more else None
        return load_for_plan([*words, *more], world_size, "graph-trainer search", flags)

    config = load(())
    of_config = config.training.global_batch_size
    space = Space(
        config=config,
        world_size=flags.world_size,
        devices_per_node=hardware.devices_per_node,
        global_rows=flags.global_batch or (of_config if of_config > 0 else None),
        fixed=fixed,
    )
    with progress("search") as say:
        result = search(
            *(space, load, hardware),
            seconds=60 * flags.minutes,
            processes=usable_processes(),
            on_progress=say,
        )
    if not result.rows and result.left_out["left"] and not result.note:
        raise ConfigError(
            f"--minutes {flags.minutes:g}: no run was simulated in this time: give more, or fix "
            "more keys by --fix"
        )
    allowed = int(limit_gib(config, hardware) * GIB)
    report = search_report(result, space, hardware, allowed)
    for row in report["rows"]:
        cost = cost_of(flags, space.world_size, row) if row["fits"] else None
        row["training"] = asdict(cost) if cost is not None else None
        row["commands"] = commands(row["config"], report, words, flags.hardware)
    stdout_is_a_file = Path("/dev/stdout").resolve() in {p.resolve() for p in files.values()}
    print_table(search_text(report), stderr=stdout_is_a_file)
    best = report["rows"][0] if report["rows"] and report["rows"][0]["fits"] else None
    if best is not None:
        if (cost := cost_of(flags, space.world_size, best)) is not None:
            print_table(Text(f"{cost}."), stderr=stdout_is_a_file)
        # lines to copy, which nothing folds
        lines = "\n".join(["", *best["commands"]])
        print(lines, file=sys.stderr if stdout_is_a_file else sys.stdout)
    for name, path in files.items():
        with published(path) as file:
            if name == "json":
                file.write(json.dumps(report, indent=2) + "\n")
            else:
                write_comparison(page_of(report), report["model"], report["allowed_bytes"], file)
        print(f"wrote {path}", file=sys.stderr)
    return 0 if any(row.outcome.fits for row in result.rows) else 1


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 1e5:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number of minutes, such as 15")
    return minutes


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="graph-trainer search",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world-size", type=positive, metavar="N", required=True, help="number of ranks"
    )
    add_hardware_flag(parser)
    parser.add_argument(
        "--global-batch",
        type=positive,
        metavar="ROWS",
        help="sequences of a step, kept exactly by local batch, accumulation and replicas; without "
        "it, and without training.global_batch_size, a step has as many as its local batches",
    )
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help=f"choose from these values only; may be repeated. Keys: {', '.join(VARIED)}",
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=15.0,
        metavar="N",
        help="when to stop at the latest (default 15)",
    )
    add_cost_flags(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with speed over memory of all runs"
    )
    return parser
