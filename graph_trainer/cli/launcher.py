"""Start the ranks of a run with torchrun: `graph-trainer train`, `run_train.sh`, `bisect-passes`.

The launcher reads the config, which says how many ranks there are, and leaves to the ranks what
takes more than reading: it shows the first error of a rank once, after all other output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from graph_trainer.cli.command_line import (
    import_config_classes,
    variable,
    with_names_of_environment,
)
from graph_trainer.core.text import COLUMNS, error_text
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import ConfigError
from graph_trainer.train import SHOWN_BY_LAUNCHER

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from graph_trainer.planner.plan_check import PlanCheck
    from graph_trainer.titan.config.run_config import GraphTrainerConfig

USAGE = """\
usage: graph-trainer train [--module MODULE] [--config CONFIG] [--plan FILE] [--section.key VALUE]
       ./run_train.sh with the same flags: installs what is missing first

In the environment (a flag wins over it):
  NGPU           ranks on this machine: the number of GPUs; where there is none, as many as the
                 parallelism degrees multiply to, or 2 where they leave it open
  MODULE         the model's module: graph_trainer.llama3
  CONFIG         a name under configs/ or a path to a TOML file: debugmodel
  LOG_RANK       the ranks whose output is shown, separated by commas: 0
  NNODES         machines: 1
  NODE_RANK      which of them this one is, from 0; rank 0 hosts the rendezvous
  RDZV_ENDPOINT  where the machines meet, host:port; needed to start ranks on several
  MAX_RESTARTS   how often all ranks are restarted from the last checkpoint after one has failed;
                 needs checkpoint.enable: 0
  TORCHINDUCTOR_CACHE_DIR  where what is compiled is kept: torchinductor_ and your name, below /tmp
  PYTHON         the Python with which run_train.sh makes .venv

"""

RANK_MODULE = "graph_trainer.train"
PLANNED_RANK_MODULE = "graph_trainer.planner.train_planned"

_RANK_BYTES = 0.4 * GIB
"""What torch and torchtitan take in a rank's process; measured with torch 2.13 on Linux."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun is to start."""

    arguments: list[str]
    """torchrun's command line, without its name."""
    environment: dict[str, str]
    """Variables of the ranks beside those of this process."""
    tracebacks: Path = Path("tracebacks.txt")
    """The file for the tracebacks of ranks that fail."""
    config: Any = field(default=None, compare=False)
    world_size: int = field(default=0, compare=False)
    local_ranks: int = field(default=0, compare=False)
    check: PlanCheck | None = field(default=None, compare=False)
    """What --plan compares the run with."""


def prepare(argv: Sequence[str], *, module: str = RANK_MODULE, starts_ranks: bool = True) -> Launch:
    """Decide from flags and environment what to start, and check the configuration for it.

    Args:
        starts_ranks: False for a dry run. With --plan it rehearses the run on the plan's hardware,
            so that this machine may have too few devices for it.

    Raises:
        ConfigError: the config, or a variable of USAGE, cannot be used.
    """
    machines = _number("NNODES", 1, least=1, meaning="the number of machines")
    machine = _number("NODE_RANK", 0, least=0, meaning="which of the machines this one is")
    restarts = _number("MAX_RESTARTS", 0, least=0, meaning="how often the ranks may be restarted")
    ranks = _number("NGPU", 0, least=1, meaning="the number of ranks on this machine")
    endpoint = variable("RDZV_ENDPOINT", "localhost:0")  # port 0: each run finds a free one
    if machine >= machines:
        raise ConfigError(
            f"environment: NODE_RANK = {machine}, but NNODES = {machines}, and machines count from "
            "0. Set it below NNODES."
        )
    if machines > 1 and starts_ranks and not variable("RDZV_ENDPOINT"):
        raise ConfigError(
            f"environment: NNODES = {machines}, but RDZV_ENDPOINT is not set. Set it to "
            "host:port of one of the machines, the same on all of them."
        )
    argv = with_names_of_environment(argv)
    rehearses = not starts_ranks and any(word.partition("=")[0] == "--plan" for word in argv)
    gpus = torch.cuda.device_count()
    if not ranks and not rehearses:
        ranks = gpus or (2 if machines > 1 else 0)
    import_config_classes()
    from graph_trainer.planner.plan_check import load_config_and_plan
    from graph_trainer.titan.config.check import wanted_ranks

    config, check = load_config_and_plan(
        argv, world_size=ranks * machines or None, rehearses=rehearses
    )
    if not ranks and check is not None:
        ranks = check.plan.world_size // machines
    elif not ranks:
        ranks = wanted_ranks(config)
        load_config_and_plan(argv, world_size=ranks)  # again, as its checks depend on the number
    if not rehearses:
        _check_ranks(ranks, gpus)
    _check_restarts(config, restarts)
    shown = variable("LOG_RANK", "0")
    numbers = [number.strip() for number in shown.split(",")]
    if not all(re.fullmatch("[0-9]{1,7}", num) and int(num) < ranks for num in numbers):
        raise ConfigError(
            f"environment: LOG_RANK = {shown!r}: the ranks of this machine whose output is shown, "
            f"separated by commas. Write numbers from 0 to {ranks - 1}, or unset it."
        )

    environment = {}
    if gpus and not variable("PYTORCH_ALLOC_CONF"):
        # Less fragmentation; torchtitan's own default.
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if ranks > 1 and not variable("OMP_NUM_THREADS"):
        # Each rank would otherwise start a thread for every core of the machine.
        environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // ranks))
    if restarts:
        # The agent's own store keeps the addresses of the ranks that are gone, and new ranks
        # connect to those (torch 2.13; pytorch issue 167288). Without it every start makes a store.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    arguments = [f"--nproc_per_node={ranks}", f"--nnodes={machines}", f"--node_rank={machine}"]
    arguments += ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}"]
    if machines > 1 and variable("NODE_RANK"):
        # torchrun's guess by host name fails behind aliases.
        arguments.append(f"--rdzv_conf=is_host={int(machine == 0)}")
    arguments.append(f"--max_restarts={restarts}")
    arguments += [f"--local-ranks-filter={shown}", "--role=rank", "--tee=3"]
    name = f"tracebacks_{machine}.txt" if machine else "tracebacks.txt"
    tracebacks = Path(config.dump_folder) / name
    words = [*arguments, "-m", module if check is None else PLANNED_RANK_MODULE, *argv]
    return Launch(words, environment, tracebacks, config, ranks * machines, ranks, check)


def start(launch: Launch) -> int:
    """Run torchrun in this process, which saves importing torch again; return the exit code: that
    of the rank that failed first, whose error is printed last.

    A signal that reaches this process ends every rank, as with torchrun itself.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    os.environ.update(launch.environment)
    if "--max_restarts=0" in launch.arguments:  # else an error comes before the next attempt
        os.environ[SHOWN_BY_LAUNCHER] = "1"
    if sys.stdout.isatty():
        os.environ[COLUMNS] = str(shutil.get_terminal_size().columns)
    else:
        os.environ["NO_COLOR"] = "1"
    for name in ("multiprocessing.api", "multiprocessing.errors.error_handler", "agent.server.api"):
        # which process ended, with what: see `_explain`
        logger = logging.getLogger(f"torch.distributed.elastic.{name}")
        logger.setLevel(logging.CRITICAL)
    output = _Output()
    logging.getLogger("torch.distributed.elastic.multiprocessing.tail_log").addFilter(output)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        torchrun(launch.arguments)
    except SignalException as error:  # a traceback of torchrun explains nothing
        name = signal.Signals(error.sigval).name
        print(f"ended by {name}, and all ranks with it", file=sys.stderr, flush=True)
        return 128 + error.sigval
    except ChildFailedError as error:
        return _explain(error.failures, launch.tracebacks)
    if output.is_closed:
        from graph_trainer.titan.console import CONSOLE_LOG

        log = Path(launch.config.dump_folder) / CONSOLE_LOG
        with contextlib.suppress(BrokenPipeError):  # of stderr, as with `2>&1 | head`
            print(f"the output was closed, and the run went on: {log} has all", file=sys.stderr)
    return 0


class _Output(logging.Filter):
    """Leaves out that torchrun's thread could not write the lines of ranks, as with `| head`."""

    is_closed = False

    def filter(self, record: logging.LogRecord) -> bool:
        closed = record.exc_info and isinstance(record.exc_info[1], BrokenPipeError)
        self.is_closed = self.is_closed or bool(closed)
        return not closed


def _explain(failures: dict[int, ProcessFailure], file: Path) -> int:
    """Print the error of the rank that failed first; return its exit code.

    Args:
        failures: by rank; one of a rank that recorded its error has it as a dict.
        file: where to write the tracebacks of all ranks.
    """

    def failed_at(rank: int) -> tuple[bool, float]:
        ended = failures[rank].exitcode == -signal.SIGTERM  # by torchrun, as another has failed
        # torch's time stamps are whole seconds, in which all ranks may fail
        with contextlib.suppress(OSError):
            return ended, os.stat(failures[rank].error_file).st_mtime
        return ended, failures[rank].timestamp

    tracebacks = ""
    for rank in sorted(failures, key=failed_at, reverse=True):
        code, message = failures[rank].exitcode, cast(Any, failures[rank].message)
        if isinstance(message, dict):
            tracebacks = f"rank {rank}\n{message['extraInfo']['py_callstack']}\n{tracebacks}"
            error = message["message"]
            error = error.partition(": ")[2] if code == 2 else f"rank {rank}: {error}"
        else:
            error = f"rank {rank}: {message if code < 0 else f'it ended with exit code {code}'}"
            if code == -signal.SIGKILL:
                error += ", most likely since memory ran out: --dry-run says what is needed"
    if tracebacks:
        with contextlib.suppress(OSError):  # the error itself matters more
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(tracebacks, encoding="utf-8")
            error += f"\nThe tracebacks of the ranks that failed are in {file}"
    print(error_text(error), file=sys.stderr, flush=True)
    return max(code, 1)


def usable_cores() -> int:
    """Count the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _number(name: str, default: int, *, least: int, meaning: str) -> int:
    text = variable(name)
    if not text:
        return default
    if not re.fullmatch("0|[1-9][0-9]{0,6}", text, re.ASCII) or int(text) < least:
        raise ConfigError(
            f"environment: {name} = {text!r}: {meaning} is a whole number, {least} or more. Write "
            "such a number, or unset it."
        )
    return int(text)


def _check_ranks(ranks: int, gpus: int) -> None:
    """Refuse more ranks than this machine has GPUs, or memory for where it has none."""
    from graph_trainer.titan.device_memory import available_on_cpu

    if gpus:
        most, why = gpus, f"each needs a GPU, of which there are {gpus}"
    else:
        free, _ = available_on_cpu()
        most = max(2, int(free / _RANK_BYTES))
        why = f"each takes 0.4 GiB before its model, and {gib(free)} GiB are free"
    if ranks > most:
        raise ConfigError(
            f"{ranks:,} ranks are too many for this machine: {why}. Set NGPU, or the degrees of "
            f"parallelism, to {most} or less; `graph-trainer plan --world-size {ranks}` "
            "simulates them."
        )


def _check_restarts(config: GraphTrainerConfig, restarts: int) -> None:
    """Refuse restarts where a restarted rank would not continue from the newest checkpoint."""
    checkpoint = config.checkpoint
    for key, value, wanted in (
        ("enable", checkpoint.enable, True),
        ("load_only", checkpoint.load_only, False),
        ("load_step", checkpoint.load_step, -1),
    ):
        if restarts and value != wanted:
            raise ConfigError(
                f"environment: MAX_RESTARTS = {restarts}, but checkpoint.{key} = {value}: a "
                "restart goes on from the newest checkpoint of the run. Set checkpoint."
                f"{key} = {wanted}, or unset MAX_RESTARTS."
            )
