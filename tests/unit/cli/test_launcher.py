"""What a launch starts, decided from flags and environment before any rank runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from graph_trainer.cli import launcher
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError
from graph_trainer.titan import device_memory
from graph_trainer.titan.checkpoint_reader import METADATA
from graph_trainer.train import SHOWN_BY_LAUNCHER, run

SHARD = "--parallelism.data_parallel_shard_degree"
TP = "--parallelism.tensor_parallel_degree"
SEVERAL = {"NNODES": "2", "NGPU": "2", "RDZV_ENDPOINT": "first:29500"}
OTHERS = ["RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "CXX"]

Prepare = Callable[..., launcher.Launch]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Prepare a launch with these flags and variables, on a machine of 8 cores."""
    for name in [*re.findall(r"^  ([A-Z_]+) ", launcher.USAGE, re.M), *OTHERS]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "usable_cores", lambda: 8)

    def prepare(*flags: str, gpus: int = 0, **environment: str) -> launcher.Launch:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return launcher.prepare(flags)

    return prepare


def test_two_ranks_on_a_machine_that_says_nothing(prepare: Prepare) -> None:
    flags = ["--training.steps", "3"]
    assert prepare(*flags) == launcher.Launch(
        [
            *("--nproc_per_node=2", "--nnodes=1", "--node_rank=0"),
            *("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--max_restarts=0"),
            *("--local-ranks-filter=0", "--role=rank", "--tee=3"),
            *("-m", "graph_trainer.train", *flags),
        ],
        {"OMP_NUM_THREADS": "4"},
        Path("outputs/tracebacks.txt"),
    )


@pytest.mark.parametrize(
    ("gpus", "environment", "flags", "ranks"),
    [
        (3, {}, [], 3),
        (3, {"NGPU": "2"}, [], 2),
        (0, {"NNODES": "2", "RDZV_ENDPOINT": "a:1"}, [SHARD, "4"], 2),
        (0, {}, [SHARD, "4", TP, "2"], 8),
    ],
)
def test_ngpu_then_gpus_then_the_degrees_choose_the_ranks(
    prepare: Prepare, gpus: int, environment: dict[str, str], flags: list[str], ranks: int
) -> None:
    launch = prepare(*flags, gpus=gpus, **environment)
    assert launch.arguments[0] == f"--nproc_per_node={ranks}"


def test_the_config_is_checked_for_the_ranks_of_all_machines(prepare: Prepare) -> None:
    with pytest.raises(ConfigError, match="that is 3 ranks, but 4 are started"):
        prepare(SHARD, "3", **SEVERAL)


def test_a_flag_that_does_not_fit_the_ranks_of_the_config_is_said_to_be_one(
    prepare: Prepare,
) -> None:
    with pytest.raises(ConfigError, match="^command line: training.global_batch_size = 7: not a"):
        prepare("--training.global_batch_size", "7")


def test_the_environment_names_module_and_config_where_no_flag_does(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODULE", "llama3")
    arguments = prepare("--training.steps", "3", gpus=2, CONFIG="8b").arguments
    assert arguments[-7:] == [
        *("graph_trainer.train", "--module", "llama3", "--config", "8b"),
        *("--training.steps", "3"),
    ]
    for flags in (["--module", "m", "--config", "c"], ["--module=m", "--config=c", "x y"]):
        assert launcher.with_names_of_environment(flags) == flags


@pytest.mark.parametrize(("ranks", "set_by_user"), [("16", ""), ("2", "7")])
def test_ranks_share_the_cores(prepare: Prepare, ranks: str, set_by_user: str) -> None:
    environment = prepare(NGPU=ranks, OMP_NUM_THREADS=set_by_user).environment
    assert environment.get("OMP_NUM_THREADS") == (None if set_by_user else "1")


def test_gpu_memory_grows_in_segments_unless_the_user_says_otherwise(prepare: Prepare) -> None:
    name = "PYTORCH_ALLOC_CONF"
    assert prepare(gpus=2).environment[name] == "expandable_segments:True"
    assert name not in prepare(gpus=0).environment
    assert name not in prepare(gpus=2, PYTORCH_ALLOC_CONF="backend:native").environment


def test_several_machines(prepare: Prepare) -> None:
    assert not any("is_host" in word for word in prepare(**SEVERAL).arguments)
    arguments = prepare(**SEVERAL, NODE_RANK="1", LOG_RANK="0,1").arguments
    for word in (
        *("--nnodes=2", "--node_rank=1", "--rdzv_conf=is_host=0"),
        *("--rdzv_endpoint=first:29500", "--local-ranks-filter=0,1"),
    ):
        assert word in arguments


def test_restarts_go_on_from_a_checkpoint(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-4").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-4" / METADATA).touch()
    of_step_4 = ["--checkpoint.load_step", "4", "--dump_folder", str(tmp_path)]
    own_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    checkpoint = "--checkpoint.enable"
    assert own_store not in prepare(checkpoint).environment
    launch = prepare(checkpoint, MAX_RESTARTS="3")
    assert "--max_restarts=3" in launch.arguments and launch.environment[own_store] == "1"
    for flags, key in (
        ([], "checkpoint.enable"),
        ([checkpoint, "--checkpoint.load_only"], "checkpoint.load_only"),
        ([checkpoint, *of_step_4], "checkpoint.load_step"),
    ):
        with pytest.raises(ConfigError, match=f"MAX_RESTARTS = 3, but {key} = "):
            prepare(*flags)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NGPU": "two"}, "NGPU = 'two': the number of ranks on this machine is a whole number, 1"),
        ({"NNODES": "2"}, "RDZV_ENDPOINT is not set. Set it to host:port"),
        (SEVERAL | {"NODE_RANK": "2"}, "NODE_RANK = 2, but NNODES = 2"),
    ],
)
def test_a_bad_variable_is_named(
    prepare: Prepare, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^environment: .*{re.escape(message)}"):
        prepare(**environment)


def test_ranks_to_show_that_are_not_there(prepare: Prepare) -> None:
    assert "--local-ranks-filter=1, 0" in prepare(NGPU="2", LOG_RANK="1, 0").arguments
    with pytest.raises(ConfigError, match="LOG_RANK = '0,2'.*Write numbers from 0 to 1,"):
        prepare(NGPU="2", LOG_RANK="0,2")


def test_ranks_train_on_when_nobody_reads_their_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As of `graph-trainer train | head`."""

    def torchrun(arguments: list[str]) -> None:
        tail = TailLog("rank", {0: str(lines)}, closed).start()
        tail.stop()

    lines = tmp_path / "lines"
    lines.write_text("step: 1\n" * 5000)
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(torch.distributed.run, "main", torchrun)
    config = SimpleNamespace(dump_folder="out")
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as closed:
        assert launcher.start(launcher.Launch([], {}, config=config)) == 0
    said = capsys.readouterr().err
    assert said == "the output was closed, and the run went on: out/console.log has all\n"


@pytest.mark.parametrize(("error", "code"), [(None, 0), (SignalException("signal: 15", 15), 143)])
def test_torchrun_runs_in_this_process_with_the_environment_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception | None,
    code: int,
) -> None:
    started = []

    def torchrun(arguments: list[str]) -> None:
        started.append((arguments, launcher.os.environ["OMP_NUM_THREADS"]))
        if error:
            raise error

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.distributed.run, "main", torchrun)
    assert launcher.start(launcher.Launch(["-m", "x"], {"OMP_NUM_THREADS": "5"})) == code
    assert started == [(["-m", "x"], "5")]
    assert capsys.readouterr().err == ("ended by SIGTERM, and all ranks with it\n" if error else "")


class Failing:
    """Ranks that fail in this process, one after the other, as torchrun reports them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.failures = folder, dict[int, ProcessFailure]()
        self.setenv = monkeypatch.setenv
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(torch.distributed.run, "main", self.torchrun)

    def fail(self, rank: int, error: Exception, at: float) -> None:
        file = self.folder / f"rank{rank}.json"
        self.setenv("TORCHELASTIC_ERROR_FILE", str(file))

        def work(argv: object) -> None:
            raise error

        code = run(work=work)
        os.utime(file, (at, at))
        self.failures[rank] = ProcessFailure(rank, 4321, code, str(file))

    def torchrun(self, arguments: list[str]) -> None:
        raise ChildFailedError("rank", self.failures)

    def start(self) -> int:
        launch = launcher.Launch(["--max_restarts=0"], {}, self.folder / "out" / "tracebacks.txt")
        return launcher.start(launch)


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failing:
    monkeypatch.setenv(SHOWN_BY_LAUNCHER, "")  # `start` sets it
    return Failing(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ConfigError("a: b\n  c"), 2, "error: a: b\n  c"),
        (ValueError("x: y"), 1, "error: rank 1: ValueError: x: y"),
    ],
)
def test_the_error_of_the_first_rank_is_all_that_is_shown(
    failing: Failing,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    shown: str,
) -> None:
    failing.fail(0, ConfigError("another rank has ended"), at=100.5)
    failing.fail(1, error, at=100.25)
    assert failing.start() == code
    file = failing.folder / "out" / "tracebacks.txt"
    tracebacks = f"\nThe tracebacks of the ranks that failed are in\n  {file}\n"
    assert capsys.readouterr() == ("", shown + tracebacks)
    assert re.findall(r"^rank (\d)\nTraceback ", file.read_text(), re.M) == ["1", "0"]


@pytest.mark.parametrize("killed", [True, False])
def test_a_rank_that_torchrun_ended_hides_no_error(
    failing: Failing, capsys: pytest.CaptureFixture[str], killed: bool
) -> None:
    """Its time stamp is the second in which another one failed."""
    if killed:
        failing.failures[1] = ProcessFailure(1, 4321, -9, "none")
    else:
        failing.fail(1, ValueError("x"), at=100.75)
    failing.failures[0] = ProcessFailure(0, 4320, -15, "none")
    failing.failures[0].timestamp = 100 if not killed else failing.failures[1].timestamp
    assert failing.start() == 1
    said = "Signal 9 (SIGKILL)" if killed else "ValueError: x"
    assert capsys.readouterr().err.startswith(f"error: rank 1: {said}")


def test_a_rank_shows_its_error_where_no_launcher_does(
    failing: Failing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(SHOWN_BY_LAUNCHER)
    failing.fail(0, ConfigError("a: b"), at=1)
    assert capsys.readouterr().err == "error: a: b\n"
    failing.fail(0, ValueError("x"), at=1)
    assert capsys.readouterr().err.startswith("Traceback (most recent")


@pytest.mark.parametrize(("code", "said"), [(-9, "since memory ran out"), (7, "exit code 7")])
def test_a_rank_that_ended_without_a_word(
    failing: Failing, capsys: pytest.CaptureFixture[str], code: int, said: str
) -> None:
    failing.failures[3] = ProcessFailure(3, 4321, code, "none")
    assert failing.start() == max(code, 1)
    shown = capsys.readouterr().err
    assert shown.startswith("error: rank 3: ") and said in shown
    assert not (failing.folder / "out").exists()


@pytest.mark.parametrize(
    ("gpus", "free", "most", "why"),
    [
        (4, 0, 4, "each needs a GPU, of which there are 4"),
        (0, 2 * GIB, 5, "each takes 0.4 GiB before its model, and 2.00 GiB are free"),
    ],
)
def test_more_ranks_than_a_machine_can_hold_are_refused(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, gpus: int, free: int, most: int, why: str
) -> None:
    monkeypatch.setattr(device_memory, "available_on_cpu", lambda: (free, "on this machine"))
    assert f"--nproc_per_node={most}" in prepare(gpus=gpus, NGPU=str(most)).arguments
    with pytest.raises(ConfigError, match=f"^{most + 1} ranks .*{why}.* to {most} or less"):
        prepare(gpus=gpus, NGPU=str(most + 1))


def test_a_config_is_checked_without_inductor_and_garbage() -> None:
    """Each takes a fifth of the time; the environment of the ranks stays as it was."""
    words = ["train", "--config", "debugmodel", "--training.local_batch_size", "0"]
    check = (
        "import gc, os, sys; from graph_trainer.cli.main import main; before = dict(os.environ)\n"
        "collected = []; gc.callbacks.append(lambda phase, _: collected.append(phase))\n"
        f"assert main({words}) == 2 and os.environ == before\n"
        "assert 'torchtitan.trainer' in sys.modules\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
        "assert len(collected) < 20, collected\n"  # some before `main` sets the threshold
    )
    said = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert said.returncode == 0 and "training.local_batch_size = 0" in said.stderr, said.stderr
