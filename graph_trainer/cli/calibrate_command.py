"""graph-trainer calibrate: the command line."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from graph_trainer.cli.command_line import CommandParser, positive
from graph_trainer.core.simulation.detect import detect_hardware
from graph_trainer.core.simulation.hardware import Hardware, known_hardware, load_hardware
from graph_trainer.core.text import WIDTH, wrapped
from graph_trainer.errors import ConfigError
from graph_trainer.planner.bands import FEWEST_SAMPLES
from graph_trainer.planner.calibration import Calibrated, Samples, calibrated
from graph_trainer.planner.calibration_table import calibration_table
from graph_trainer.planner.measure_ranks import Job, measure
from graph_trainer.planner.measured_calls import collective_calls, op_calls
from graph_trainer.planner.plan import Plan, make_plan
from graph_trainer.planner.processes import usable_processes
from graph_trainer.planner.profile_toml import profile_to_toml
from graph_trainer.planner.profiler_trace import samples_of_traces
from graph_trainer.planner.terminal import print_table, progress
from graph_trainer.titan.config.check import wanted_ranks, world_size_from_environment
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.files import check_outputs, published

_DESCRIPTION = """\
Measure this machine, or read profiler traces of a run on another one, and write a hardware profile
with which `graph-trainer plan` predicts runs there. Measured are the ops of a config's train step
at its shapes (matmuls, attention, ops bound by memory, rows moved), launches, the host, and the
collectives by kind, size and group; all other values are those of a profile that is near (--base).
All flags that are not listed here are the config's, as `graph-trainer plan` takes them.
"""

_EXAMPLES = """\
examples:
  graph-trainer calibrate --measure --config debugmodel --world-size 2 --output my.toml
      run the ops and collectives of that step on two ranks of this machine, at the same time as
      ranks do in a run, and write my.toml; with a GPU each rank has one
  graph-trainer calibrate --measure --config 8b --world-size 8 \\
      --parallelism.tensor_parallel_degree 8 --output my_node.toml
  graph-trainer calibrate --trace outputs/profiling/traces/iteration_10/rank0_trace.json \\
      --config 8b --world-size 64 --output my_cluster.toml
      read a trace that torchtitan wrote with --profiler.enable_profiling; shapes are in traces
      whose profiler had record_shapes=True

then:
  graph-trainer plan --hardware my.toml --config 8b --world-size 8
"""

_RANKS_ON_CPU = 8
"""Ranks that a CPU with fewer cores measures at most by default."""


def main(argv: Sequence[str]) -> int:
    """Run `graph-trainer calibrate`; return its exit code.

    Raises:
        GraphTrainerError: bad input, found before anything is measured where that is possible.
    """
    flags, words = _parser().parse_known_args(list(argv))
    if not flags.measure and not flags.trace:
        raise ConfigError(
            "calibrate: say what to calibrate from: --measure to time this machine, or --trace "
            "FILE to read profiler traces. `graph-trainer calibrate --help` shows both."
        )
    if flags.measure and flags.trace:
        raise ConfigError(
            "calibrate: --measure times this machine and --trace reads what another run recorded: "
            "leave one of the two out"
        )
    check_outputs({"--output": flags.output})
    detected = detect_hardware()
    base = load_hardware(flags.base, "--base") if flags.base else detected.hardware
    if flags.measure:
        _check_devices(flags, base)
    plan = _plan(flags, words, base) if flags.measure or words else None
    notes = []
    if not flags.base and not detected.exact:
        notes.append(f"the base is {detected.why.partition(':')[0]}: name another one with --base")
    if flags.measure:
        assert plan is not None
        samples, more = _measured(flags, plan, base)
        device_name = _device_name(flags.ranks)
    else:
        with progress("calibrate") as say:
            samples, more, device_name = samples_of_traces(flags.trace, base, plan, say)
    today = datetime.date.today().isoformat()
    name = flags.output.stem
    result = calibrated(base, samples, device_name=device_name, date=today, name=name)
    _write(flags, argv, base, result)
    print_table(calibration_table(result, base))
    notes += [*more, *_few_samples(result)]
    for note in notes:
        print(wrapped(f"- {note}", WIDTH))
    print(f"wrote {flags.output}; next:")
    words = words or ["--config", "debugmodel", "--world-size", "2"]
    size = ["--world-size", str(flags.world_size)] if flags.world_size else []
    print(f"  graph-trainer plan --hardware {flags.output} {shlex.join([*words, *size])}")
    return 0


def _plan(flags: argparse.Namespace, words: list[str], base: Hardware) -> Plan:
    """Plan the config's step on the base profile, after its passes."""
    world_size = flags.world_size or world_size_from_environment()
    config = load_config(
        words,
        world_size=world_size,
        prog="graph-trainer calibrate",
        command_flags=vars(flags),
        reads_text=False,
    )
    if world_size is None:
        world_size = wanted_ranks(config)
        config = load_config(
            words, world_size=world_size, prog="graph-trainer calibrate", reads_text=False
        )
    flags.world_size = world_size
    config.compile = replace(config.compile, hardware=flags.base or base.name)
    with progress("calibrate") as say:
        return make_plan(config, world_size, base, every_pass=False, on_progress=say)


def _check_devices(flags: argparse.Namespace, base: Hardware) -> None:
    """Refuse to measure on GPUs that this machine lacks."""
    here = torch.cuda.device_count()
    if base.device == "cuda" and not here:
        raise ConfigError(
            f"--base {base.name}: it describes a GPU, and this machine has none: leave --base out, "
            "or calibrate from a trace of a GPU with --trace"
        )
    if base.device == "cuda" and (flags.ranks or 0) > here:
        raise ConfigError(
            f"--ranks {flags.ranks}: this machine has {here} GPUs: write at most {here}"
        )


def _measured(flags: argparse.Namespace, plan: Plan, base: Hardware) -> tuple[Samples, list[str]]:
    """Measure this machine; return samples and notes."""
    on_gpus = base.device == "cuda"
    most = torch.cuda.device_count() if on_gpus else max(_RANKS_ON_CPU, usable_processes())
    ranks = flags.ranks or min(plan.world_size, most)
    flags.ranks = ranks
    issued, beyond = collective_calls(plan.simulation, ranks, flags.most)
    ops = op_calls(plan.simulation, base, flags.most)
    job = Job(ops, issued, base.device, ranks, flags.seconds)
    with progress("calibrate") as say:
        say(f"{len(ops)} ops and {len(issued)} collectives on {ranks} ranks at the same time")
        samples, failed = measure(job, say)
    notes = [f"not measured: {line}" for line in failed]
    if beyond:
        notes.append(
            f"{beyond} collectives have groups with more ranks than the {ranks} that measured: "
            "their times follow from the base profile and the measured groups"
        )
    if base.device == "cpu" and ranks > usable_processes():
        notes.append(
            f"{ranks} ranks shared {usable_processes()} cores: the profile holds for as many ranks "
            "on as many cores"
        )
    untimed = len(ops) + len(issued) - len(failed) - len(samples.ops) - len(samples.collectives)
    if untimed > 0:
        notes.append(
            f"no time for {untimed} ops and collectives: raise --seconds {flags.seconds:g}"
        )
    return samples, notes


def _few_samples(result: Calibrated) -> list[str]:
    """Return a note where a plan with the profile has no range."""
    record = result.hardware.calibration
    assert record is not None
    if record.samples >= FEWEST_SAMPLES:
        return []
    return [
        f"too few samples for a range: plans with this profile have none, because {record.samples} "
        f"ops and collectives were measured, of at least {FEWEST_SAMPLES}"
    ]


def _device_name(ranks: int) -> str:
    """Return the name of the measured device, and what ranks share on a CPU."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    name = platform.processor() or platform.machine()
    try:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        name = model.group(1) if model else name
    except OSError:
        pass
    threads = os.environ.get("OMP_NUM_THREADS", "1" if ranks > 1 else "all")
    return f"{name}, {ranks} ranks on {usable_processes()} cores, OMP_NUM_THREADS={threads}"


def _write(
    flags: argparse.Namespace, argv: Sequence[str], base: Hardware, result: Calibrated
) -> None:
    how = f"graph-trainer calibrate {shlex.join(argv)}"
    with published(flags.output) as file:
        file.write(profile_to_toml(result, base, how))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="graph-trainer calibrate",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--measure", action="store_true", help="time this machine, with a config's shapes"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="read traces of torch.profiler, .json or .json.gz; with a config's flags they must be "
        "of that config",
    )
    parser.add_argument("--world-size", type=positive, metavar="N", help="ranks of the config")
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="ranks that measure; default: --world-size, at most the GPUs of this machine, or on a "
        f"CPU {_RANKS_ON_CPU}, or as many as it has cores where those are more",
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="the profile of all values that are not measured: "
        f"{', '.join(known_hardware())} or a file; default: that of this machine",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the profile to write, TOML"
    )
    parser.add_argument(
        "--most",
        type=positive,
        default=200,
        metavar="N",
        help="distinct ops, and distinct collectives, to time: those with the greatest part of the "
        "step (default %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=120.0,
        metavar="S",
        help="begin no further measurement after so many seconds (default %(default)s)",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
