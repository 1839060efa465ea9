"""Start the ranks of a run with torchrun: `graph-trainer train`, `run_train.sh`, `bisect-passes`.

The whole configuration is checked once before any rank starts, so that a mistake is one message
and not one traceback a rank.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch

from graph_trainer.cli.command_line import (
    import_config_classes,
    variable,
    with_names_of_environment,
)
from graph_trainer.core.runtime.backends.registry import (
    COMPILER_REMEDY,
    find_backend,
    missing_compiler,
)
from graph_trainer.core.text import COLUMNS, error_text
from graph_trainer.core.units import GIB, gib
from graph_trainer.errors import ConfigError, MemoryLimitError
from graph_trainer.planner.console import PHASE, progress
from graph_trainer.train import SHOWN_BY_LAUNCHER

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from graph_trainer.core.passes.memory_limit import DeviceMemory
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
    config, check, ranks = _checked(argv, ranks, machines, rehearses)
    if not rehearses:
        _check_ranks(ranks, gpus)
    _check_folders(config)
    _check_restarts(config, restarts)
    if not gpus and not rehearses and module == RANK_MODULE:  # others call the ops one by one
        _check_compiler(config)
    shown = variable("LOG_RANK", "0")
    numbers = [each.strip() for each in shown.split(",")]
    if not all(re.fullmatch("[0-9]{1,7}", each) and int(each) < ranks for each in numbers):
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
    words = [*arguments, "-m", module, *argv]
    return Launch(words, environment, tracebacks, config, ranks * machines, ranks, check)


def start(launch: Launch) -> int:
    """Run torchrun in this process, which saves importing torch again; return the exit code: that
    of the rank that failed first, whose error is printed last.

    A signal that reaches this process ends every rank, as with torchrun itself.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    launch.tracebacks.parent.mkdir(parents=True, exist_ok=True)
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
        on_terminal = sys.stdout.isatty() and sys.stderr.isatty()
        with _phases_shown() if on_terminal else nullcontext():
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


@contextlib.contextmanager
def _phases_shown() -> Iterator[None]:
    """While entered: show on the terminal what rank 0 announces, and how long, until a line."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console, lock, shown = Console(file=sys.stderr), threading.Lock(), list[Progress]()

    class Terminal:
        def __init__(self, stream: TextIO) -> None:
            self._stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        def write(self, line: str) -> int:  # as torchrun's threads do
            head, announced, phase = line.partition(f"{PHASE} ")
            if " " in head:  # more than torchrun's "[rank0]:"
                announced = phase = ""
            with lock:
                while shown:
                    shown.pop().stop()
                if text := phase.strip():
                    words = TextColumn("{task.description}", markup=False)
                    columns = (SpinnerColumn(), words, TimeElapsedColumn())
                    shown.append(Progress(*columns, console=console, transient=True))
                    shown[0].add_task(text, total=None)
                    shown[0].start()
                return len(line) if announced else self._stream.write(line)

    os.environ[PHASE] = "1"
    out, err = Terminal(sys.stdout), Terminal(sys.stderr)
    with contextlib.redirect_stdout(cast(Any, out)), contextlib.redirect_stderr(cast(Any, err)):
        try:
            yield
        finally:
            out.write(f"{PHASE} ")


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


def _checked(
    argv: Sequence[str], ranks: int, machines: int, rehearses: bool
) -> tuple[GraphTrainerConfig, PlanCheck | None, int]:
    """Load the config and check it for the ranks of each machine; return it, the plan and them.

    0 ranks leave the number to the plan, or to the degrees of parallelism.
    """
    import_config_classes()
    from graph_trainer.planner.plan_check import load_config_and_plan
    from graph_trainer.titan.config.check import check_config, wanted_ranks
    from graph_trainer.titan.config.check_text import (
        check_every_rank_has_a_document,
        check_text_fills_a_batch,
    )

    config, check = load_config_and_plan(
        argv, world_size=ranks * machines or None, rehearses=rehearses
    )
    if not ranks and check is not None:
        ranks = check.plan.world_size // machines
    elif not ranks:
        ranks = wanted_ranks(config)
        try:
            check_config(config, ranks)
        except ConfigError:  # again, with the places that set the keys
            load_config_and_plan(argv, world_size=ranks)
            raise
    check_every_rank_has_a_document(config, ranks * machines)
    if machines == 1:  # each would tokenise the text
        check_text_fills_a_batch(config, ranks)
    return config, check, ranks


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


def _check_folders(config: GraphTrainerConfig) -> None:
    """Refuse folders that nothing can be written to, where the run would write."""
    from torchtitan.tools.filesystem import is_remote

    from graph_trainer.titan.files import why_no_folder

    metrics, checkpoint, profiler = config.metrics, config.checkpoint, config.profiler
    folders = [("dump_folder", ""), ("dump_folder", "structured_logs")]
    if metrics.enable_tensorboard:
        folders.append(("metrics.save_tb_folder", metrics.save_tb_folder))
    if checkpoint.enable and not checkpoint.load_only:
        folders.append(("checkpoint.folder", checkpoint.folder))
    if config.comm.trace_buf_size:
        folders.append(("comm.save_traces_folder", config.comm.save_traces_folder))
    if profiler.enable_profiling:
        folders.append(("profiler.save_traces_folder", profiler.save_traces_folder))
    if profiler.enable_memory_snapshot:
        name = "profiler.save_memory_snapshot_folder"
        folders.append((name, profiler.save_memory_snapshot_folder))
    for key, name in folders:
        if is_remote(os.path.join(config.dump_folder, name)):
            continue
        if problem := why_no_folder(Path(config.dump_folder, name)):
            value = config.dump_folder if key == "dump_folder" else name
            raise ConfigError(
                f'{key} = "{value}": {problem}. Set it to a folder that you may write.'
            )


def memory_of_rank(launch: Launch) -> tuple[DeviceMemory, DeviceMemory]:
    """Return what a rank here may need of its device and of the host: a GPU's memory, and its part
    of what is free here, which is both where there is no GPU."""
    from graph_trainer.core.passes.memory_limit import DeviceMemory
    from graph_trainer.titan.device_memory import share_of_host

    host = share_of_host(launch.local_ranks)
    if not torch.cuda.is_available():
        return host, host
    total = torch.cuda.get_device_properties(0).total_memory
    return DeviceMemory(total, "all of the GPU"), host


def check_step_fits(launch: Launch) -> None:
    """Refuse a step that needs more memory than there is, as the ranks would once they had started.

    The step is planned, for which the user's model is built and captured. Left to the ranks are a
    step that cannot be captured, and one that is not captured in training.

    Raises:
        MemoryLimitError: with what the memory is for, and what would help.
    """
    from graph_trainer.core.simulation.detect import detect_hardware
    from graph_trainer.planner.captures import Captures
    from graph_trainer.planner.plan import make_plan

    ours = launch.config.compile
    refuses = ours.mode != "eager" and ours.memory_limit_gib != 0
    if not refuses:
        return
    config = copy.copy(launch.config)
    config.compile = replace(ours, verify_passes=False)  # the ranks verify
    (room, on_host), hardware = memory_of_rank(launch), detect_hardware().hardware
    shown = progress("will it fit") if sys.stderr.isatty() else nullcontext(lambda line: None)
    try:
        with shown as say, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show them
            make_plan(
                config,
                launch.world_size,
                hardware,
                every_pass=False,
                captures=Captures(),
                device_memory=lambda joint: room,
                host_memory=lambda joint: on_host,
                on_progress=say,
            )
    except MemoryLimitError:
        raise
    except (Exception, SystemExit):  # of the user's own code too: the ranks, which run it, say it
        logging.getLogger(__name__).debug("the step is not planned", exc_info=True)
    finally:
        if torch.distributed.is_initialized():  # the fake ranks' groups
            torch.distributed.destroy_process_group()


def _check_compiler(config: GraphTrainerConfig) -> None:
    """Refuse a backend that compiles for the CPU where there is no compiler."""
    backend = config.compile.backend
    if config.compile.mode == "eager" or not find_backend(backend).needs_cpp_compiler:
        return
    if missing := missing_compiler():
        raise ConfigError(
            f'compile.backend = "{backend}": it builds kernels for the CPU, and there is no '
            f'{missing}. {COMPILER_REMEDY}, or set compile.backend = "eager".'
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
