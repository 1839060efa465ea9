"""graph-trainer plan: the command line."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from graph_trainer.cli.command_line import (
    CommandParser,
    add_hardware_flag,
    load_for_plan,
    positive,
)
from graph_trainer.cli.launcher import Launch, prepare
from graph_trainer.cli.plan_pipeline import (
    check_flags_of_pipeline,
    plan_pipeline,
    prove_order_of_pipeline,
)
from graph_trainer.core.passes.memory_limit import DeviceMemory, DeviceMemoryOf
from graph_trainer.core.simulation.detect import detect_hardware
from graph_trainer.core.simulation.hardware import Hardware, load_hardware
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, RUNTIMES
from graph_trainer.core.text import WIDTH, wrapped
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError
from graph_trainer.planner.captures import Captures
from graph_trainer.planner.changes import (
    SCHEMA,
    advise,
    compare,
    fewest_ranks,
    fitting_together,
    memory_curve,
    settings,
)
from graph_trainer.planner.expert_loads import check_imbalances, expert_loads
from graph_trainer.planner.figures import model_name
from graph_trainer.planner.html.page import write_comparison, write_page
from graph_trainer.planner.limits import limits_of
from graph_trainer.planner.perfetto_trace import write_trace
from graph_trainer.planner.pipeline_plan import make_pipeline_plan
from graph_trainer.planner.pipeline_report import pipeline_report
from graph_trainer.planner.plan import LoadConfig, Plan, make_plan, versions
from graph_trainer.planner.plan_check import PlanCheck
from graph_trainer.planner.plan_report import plan_report, readable_report
from graph_trainer.planner.plan_tables import comparison_table, fit_and_speed, report_text
from graph_trainer.planner.processes import usable_processes
from graph_trainer.planner.saved_plan import plan_every_class
from graph_trainer.planner.terminal import print_table, progress
from graph_trainer.planner.training_cost import add_cost_flags, check_cost_flags, cost_of
from graph_trainer.planner.verify_order import verify_order
from graph_trainer.titan.activation_policies import POLICIES
from graph_trainer.titan.config.check import ranks_of_degrees, world_size_from_environment
from graph_trainer.titan.config.core_settings import IMBALANCE_KEY, with_config_keys
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.write_toml import config_to_toml
from graph_trainer.titan.device_memory import share_of_host
from graph_trainer.titan.files import check_outputs, published
from graph_trainer.titan.memory_table_file import memory_table_to_toml
from graph_trainer.titan.routing import Routing, mixtures_of, read_routing

_DESCRIPTION = """\
Say what a run will communicate, need in memory and take in time, without a GPU: the train step of
the config is captured on fake ranks, the same passes run on it, and it is simulated on the hardware
that --hardware names. All flags that are not listed here are the config's, as `graph-trainer
train` takes them (`graph-trainer train --config 8b --help` lists them).
"""

_EXAMPLES = """\
examples:
  graph-trainer plan --config 8b --world-size 128 --parallelism.tensor_parallel_degree 8 \\
      --hardware h100-sxm
  graph-trainer plan --config 8b --world-size 64 --hardware a100-80g \\
      --compare training.local_batch_size=1,2,4 \\
      --compare parallelism.fsdp_reshard_after_forward=always,never
  graph-trainer plan --config 8b --world-size 8 --memory-curve --html plan.html
  graph-trainer plan --module graph_trainer.deepseek_v3 --config 16b --world-size 64 \\
      --parallelism.expert_parallel_degree 8 --expert-imbalance 1.0,1.5,2.0
  graph-trainer plan --config 8b --world-size 128 --tokens 15T --price 2.5
  graph-trainer plan --config 8b --world-size 128 --verify-order
  graph-trainer plan --config 70b --world-size 256 --hardware my_cluster.toml --json plan.json
"""


def main(argv: Sequence[str]) -> int:
    """Run `graph-trainer plan`; return its exit code.

    Raises:
        GraphTrainerError: bad input, found before the capture where that is possible.
    """
    flags, words = _parser().parse_known_args(list(argv))
    _check_together(flags)
    check_cost_flags(flags)
    hardware = load_hardware(flags.hardware)
    world_size = flags.world_size or world_size_from_environment()

    def load(more: Sequence[str], ranks: int | None = None) -> GraphTrainerConfig:
        return load_for_plan([*words, *more], ranks or world_size, "graph-trainer plan", flags)

    wanted = settings(flags.compare)
    config = load(())
    check_flags_of_pipeline(flags, config)
    _check_table(flags, config)
    routing = _checked_routing(flags, config)
    if flags.expert_imbalance and config.compile.expert_imbalance is None and _fills_limit(config):
        # as if it had been set, in changed configs of the advice too
        words += [f"--{IMBALANCE_KEY}", f"{max(flags.expert_imbalance)}"]
        config = load(())
    files = {f"--{name}": getattr(flags, name) for name in _WRITERS if getattr(flags, name)}
    check_outputs(files)
    if world_size is None:  # `load` has left out the checks that need it
        world_size = ranks_of_degrees(config)
    if not 0 <= flags.rank < world_size:
        raise ConfigError(
            f"--rank {flags.rank}: there are {world_size} ranks: write 0 to {world_size - 1}"
        )

    if config.parallelism.pipeline_parallel_degree > 1:
        if flags.verify_order:
            return prove_order_of_pipeline(config, world_size, hardware, flags.all_ranks)
        return plan_pipeline(config, load, world_size, hardware, files, flags)

    captures = Captures()
    plan_of = partial(
        make_plan,
        world_size=world_size,
        hardware=hardware,
        rank=flags.rank,
        runtime=RUNTIMES[flags.like],
        captures=captures,
    )

    if flags.verify_order:
        with progress("order") as say:
            proof = verify_order(
                config,
                world_size,
                all_ranks=flags.all_ranks,
                device=hardware.device,
                processes=usable_processes(),
                captures=captures,
                on_progress=say,
            )
        print("\n".join(wrapped(line, WIDTH) for line in str(proof).splitlines()))
        return 0
    if flags.compare:
        plan_one = partial(plan_of, every_pass=False)
        return _compare(flags, wanted, config, load, plan_one, hardware, world_size)
    with progress("plan") as say:
        plan = plan_of(config, on_progress=say)
    imbalances = flags.expert_imbalance
    if plan.expert_imbalance != 1 and not imbalances:
        imbalances = (plan.expert_imbalance,)
    if imbalances or routing:
        with progress("experts") as say:
            plan = replace(plan, expert_loads=expert_loads(plan, imbalances, routing, say))
    if plan.fits:
        plan = replace(plan, limits=limits_of(plan))
    else:
        with progress("what would help") as say:
            advice = advise(plan, load, say, usable_processes())
            advice += fewest_ranks(plan, load, say)
            plan = replace(plan, advice=(*fitting_together(plan, advice, load, say), *advice))
    if flags.memory_curve:
        with progress("memory curve") as say:
            plan = replace(plan, memory_curve=tuple(memory_curve(plan, say, usable_processes())))
    report = readable_report(plan)
    _print(report_text(report), files.values())
    if plan.fits:
        _print_cost(flags, world_size, report, files.values())
    for flag, path in files.items():
        write, _ = _WRITERS[flag.removeprefix("--")]
        with published(path) as file:
            write(plan, file)
        print(f"wrote {path}", file=sys.stderr)
    return 0


def dry_run(argv: Sequence[str]) -> int:
    """Print the config that `train` would run, after comments on its ranks and what they need.

    With --plan the run is simulated on the plan's hardware and compared with the plan.

    Raises:
        GraphTrainerError: as `launcher.prepare`; or a step that cannot be captured, or that the
            ranks would refuse: with --plan as `PlanCheck.check_run`. Of a pipeline the plan says
            whether each rank fits, and nothing is refused for want of memory.
    """
    launch = prepare(argv, starts_ranks=False)
    if launch.check is not None:
        return _rehearse(launch, launch.check)
    compile_config, notes = launch.config.compile, []
    named, captures = compile_config.hardware, Captures()
    room, on_host = _memory_of_rank(launch.local_ranks)
    detected = detect_hardware()
    if named:
        hardware = load_hardware(named)
    else:
        hardware = replace(detected.hardware, memory_gib=room.bytes / GIB)
        notes = [] if detected.exact else [f"Simulated on {with_config_keys(detected.why)}."]
    ranks = f"{launch.world_size} ranks: {' '.join(launch.arguments[:2])}"
    if launch.config.parallelism.pipeline_parallel_degree > 1:
        with progress("plan") as say:
            pipeline = make_pipeline_plan(
                launch.config, launch.world_size, hardware, on_progress=say
            )
        _print_dry_run(pipeline_report(pipeline), pipeline.config, ranks, notes)
        return 0
    plan = _plan_dry(launch, hardware, captures, host_memory=lambda joint: on_host)
    _print_dry_run(plan_report(plan), plan.config, ranks, notes)
    ranks_refuse = compile_config.mode != "eager" and compile_config.memory_limit_gib != 0
    if ranks_refuse and (named or not plan.fits):  # the hardware that is named need not be this
        _plan_dry(
            *(launch, detected.hardware, captures),
            device_memory=lambda joint: room,
            host_memory=lambda joint: on_host,
        )
    return 0


def _memory_of_rank(local_ranks: int) -> tuple[DeviceMemory, DeviceMemory]:
    """Return what a rank here may need of its device and of the host: a GPU's memory, and its part
    of what is free here, which is both where there is no GPU."""
    host = share_of_host(local_ranks)
    if not torch.cuda.is_available():
        return host, host
    total = torch.cuda.get_device_properties(0).total_memory
    return DeviceMemory(total, "all of the GPU"), host


def _rehearse(launch: Launch, check: PlanCheck) -> int:
    """Print the same for the plan's hardware, and refuse what its ranks would refuse there."""
    plan = _plan_dry(launch, check.plan.hardware, Captures())
    with progress("compare with the plan") as say:
        run = plan_every_class(plan, processes=usable_processes(), on_progress=say)
    ranks = f"{plan.world_size} ranks, as in {check.path}"
    _print_dry_run(plan_report(plan), plan.config, ranks, [check.remark()])
    check.check_run(run, launch.config.compile.memory_limit_gib)
    return 0


def _plan_dry(
    launch: Launch,
    hardware: Hardware,
    captures: Captures,
    *,
    device_memory: DeviceMemoryOf | None = None,
    host_memory: DeviceMemoryOf | None = None,
) -> Plan:
    """Plan a step; with `device_memory` as its ranks would, which refuse what does not fit."""
    with progress("plan") as say:
        return make_plan(
            *(launch.config, launch.world_size, hardware),
            every_pass=False,
            captures=captures,
            device_memory=device_memory,
            host_memory=host_memory,
            on_progress=say,
        )


def _print_dry_run(
    report: dict[str, Any], config: GraphTrainerConfig, ranks: str, notes: Iterable[str]
) -> None:
    """Print the config as TOML, after comments: ranks, model, notes, memory and speed."""
    lines = [ranks, report["headline"]]
    for text in (*filter(None, notes), *report["notes"], *fit_and_speed(report).splitlines()):
        lines += wrapped(text, WIDTH - len("# ")).splitlines()
    print("".join(f"# {line}\n" for line in lines) + config_to_toml(config), end="")


def _check_together(flags: argparse.Namespace) -> None:
    """Refuse flags that cannot be combined."""

    def first_flag(*names: str) -> str:
        """Return the first of these flags that the command line has, or ""."""
        return next((f"--{name.replace('_', '-')}" for name in names if getattr(flags, name)), "")

    only_ours = first_flag("save", "verify_order", "memory_curve", "table")
    if only_ours and flags.like != GRAPH_TRAINER.name:
        raise ConfigError(
            f"{only_ours} is for runs of graph_trainer, and --like {flags.like} plans another "
            "program: leave one of the two out"
        )
    several = [name for name in _WRITERS if name not in ("json", "html")]
    if flags.verify_order:
        if flag := first_flag("compare", "rank", *_OF_ONE_PLAN, *_WRITERS):
            raise ConfigError(f"--verify-order plans nothing: leave it or {flag} out")
    elif flags.compare and (flag := first_flag(*_OF_ONE_PLAN, *several)):
        raise ConfigError(
            f"{flag} is of one plan and --compare makes several: leave one of the two out"
        )
    elif flags.all_ranks:
        raise ConfigError("--all-ranks is for --verify-order: add that, or leave it out")


def _check_table(flags: argparse.Namespace, config: GraphTrainerConfig) -> None:
    """Refuse --table where no pass decides what backward keeps."""
    policy = POLICIES.get(type(config.activation_checkpoint))
    if flags.table and policy not in ("budget", "file"):
        raise ConfigError(
            '--table: there is none to write, as activation_checkpoint.type is neither "budget" '
            'nor "file": set one of them, or leave --table out'
        )


def _checked_routing(flags: argparse.Namespace, config: GraphTrainerConfig) -> Routing | None:
    """Refuse flags about experts that the config has no use for; read the file of --routing."""
    if flags.expert_imbalance:
        check_imbalances("--expert-imbalance", flags.expert_imbalance, config)
    if not flags.routing:
        return None
    check_imbalances("--routing", (), config)
    assert config.model_spec is not None
    return read_routing(flags.routing, "--routing", mixtures_of(config.model_spec.model))


def _fills_limit(config: GraphTrainerConfig) -> bool:
    """Return whether a plan of memory fills the limit of a run."""
    policy = POLICIES.get(type(config.activation_checkpoint))
    return policy == "budget" or config.parallelism.fsdp_reshard_after_forward == "auto"


def _write_json(plan: Plan, file: IO[str]) -> None:
    file.write(json.dumps(plan_report(plan), indent=2) + "\n")


def _write_saved(plan: Plan, file: IO[str]) -> None:
    with progress("save") as say:
        saved = plan_every_class(plan, processes=usable_processes(), on_progress=say)
    file.write(saved.to_json())


def _write_table(plan: Plan, file: IO[str]) -> None:
    assert plan.memory_table is not None, "checked before the work"
    file.write(memory_table_to_toml(plan.memory_table))


_OF_ONE_PLAN = ("memory_curve", "expert_imbalance", "routing")
"""Flags that add to one plan."""

_WRITERS: dict[str, tuple[Callable[[Plan, IO[str]], None], str]] = {
    "json": (_write_json, "write the plan as JSON"),
    "trace": (
        write_trace,
        "write streams and memory as a trace for ui.perfetto.dev or chrome://tracing",
    ),
    "html": (
        write_page,
        "write a page with tables and plots, which opens offline; with --compare also the front",
    ),
    "save": (
        _write_saved,
        "write a plan with which a run is compared (`graph-trainer train --plan FILE`); it "
        "plans one rank of each class",
    ),
    "table": (
        _write_table,
        "write what backward keeps, by block and op, as activation_checkpoint.path takes it; with "
        '--activation_checkpoint.type "budget"',
    ),
}
"""By flag, the function that writes the plan to the file that the flag names, and its help."""


def _compare(
    flags: argparse.Namespace,
    wanted: dict[str, tuple[str, ...]],
    config: GraphTrainerConfig,
    load: LoadConfig,
    plan_of: Callable[[GraphTrainerConfig], Plan],
    hardware: Hardware,
    world_size: int,
) -> int:
    with progress("compare") as say:
        rows = compare(wanted, load, plan_of, say, usable_processes())
    document = {
        "schema": SCHEMA,
        "versions": versions(),
        "config": config_to_toml(config),
        "hardware": asdict(hardware),
        "runtime": flags.like,
        "world_size": world_size,
        "rank": flags.rank,
        "rows": [asdict(row) for row in rows],
    }
    reasons = dict.fromkeys(row.error for row in rows if row.error)
    limit = config.compile.memory_limit_gib
    allowed = min(hardware.memory_bytes, int(limit * GIB) if limit else hardware.memory_bytes)
    table = comparison_table(document["rows"], allowed)
    _print(Group(table, *(f"- {r}" for r in reasons)), filter(None, (flags.json, flags.html)))
    if flags.json:
        with published(flags.json) as file:
            file.write(json.dumps(document, indent=2) + "\n")
        print(f"wrote {flags.json}", file=sys.stderr)
    if flags.html:
        with published(flags.html) as file:
            write_comparison(document, model_name(config), allowed, file)
        print(f"wrote {flags.html}", file=sys.stderr)
    return 0


def _print_cost(
    flags: argparse.Namespace, world_size: int, report: dict[str, Any], files: Iterable[Path]
) -> None:
    cost = cost_of(flags, world_size, report)
    if cost is not None:
        _print(Text(f"{cost}."), files)


def _print(tables: RenderableType, files: Iterable[Path]) -> None:
    """Print to stdout, or to stderr where one of the files is stdout."""
    stdout_is_a_file = any(path.resolve() == Path("/dev/stdout").resolve() for path in files)
    print_table(tables, stderr=stdout_is_a_file)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="graph-trainer plan",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="number of ranks; default: WORLD_SIZE, or what the degrees of parallelism multiply to "
        "where parallelism.data_parallel_shard_degree is not -1",
    )
    add_hardware_flag(parser)
    parser.add_argument(
        "--like",
        choices=RUNTIMES,
        default=GRAPH_TRAINER.name,
        help="the program that runs the config: graph_trainer, or torchtitan with FSDP2 and, where "
        "compile.backend is inductor, its blocks compiled one by one (default %(default)s)",
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="KEY=A,B,C",
        help="plan all combinations of these values of config keys instead; may be repeated; "
        "separate values that are lists by ;",
    )
    parser.add_argument(
        "--verify-order",
        action="store_true",
        help="prove instead that all ranks run the same collectives in the same order: capture one "
        "rank of each class that differs and compare what they communicate",
    )
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="with --verify-order: capture every rank, not one of each class",
    )
    parser.add_argument(
        "--memory-curve",
        action="store_true",
        help="also plan the run under every fixed activation policy and under plans of "
        "memory from the least to the most: step time over memory, as a table, on the page and in "
        "the JSON",
    )
    parser.add_argument(
        "--expert-imbalance",
        type=_imbalances,
        default=(),
        metavar="A,B,C",
        help="with expert parallelism: memory and time also where a rank receives so many times "
        "its even share of the tokens in every layer, or all of them, and the greatest imbalance "
        "that fits; where a budget fills the memory limit, it leaves room for the largest of these "
        f"unless {IMBALANCE_KEY} is set",
    )
    parser.add_argument(
        "--routing",
        type=Path,
        metavar="FILE",
        help="the same for the routing that happened: tokens by step, layer and expert, a file "
        "that training writes with --metrics.save_routing; for other ranks or batches it is scaled",
    )
    add_cost_flags(parser)
    parser.add_argument(
        "--rank", type=int, default=0, metavar="N", help="the rank to plan (default 0)"
    )
    for name, (_, help_text) in _WRITERS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=help_text)
    return parser


def _imbalances(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number < math.inf for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of imbalances: write numbers of 1 or more, such as 1.0,1.5,2.0"
        )
    return numbers
