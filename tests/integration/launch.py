"""Start real ranks with torchrun, once, and collect what each of them reports.

A test calls `run_ranks`; the script it names calls `report` on every rank when its cases are
done. Starting processes and importing torch costs far more than a tiny case, so a script runs
all its cases in one launch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = "GRAPH_TRAINER_TEST_RESULTS"
_LINES_SHOWN = 60


def user_environment(**more: str) -> dict[str, str]:
    """Return the environment of a user who calls from a shell where this Python is active.

    Args:
        more: variables beside those of this process, from which those of a launch are left out.
    """
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "OMP_NUM_THREADS")
    left_out += ("NGPU", "MODULE", "CONFIG", "LOG_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    programs = Path(sys.executable).parent
    return (
        kept
        | {
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "VIRTUAL_ENV": str(programs.parent),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", str(ROOT))]),
        }
        | more
    )


class RanksFailed(AssertionError):
    """Ranks that ended badly, did not end in time or reported nothing."""


def report(results: Any) -> None:
    """Hand this rank's results to the test that launched it. Called by scripts, once."""
    path = Path(os.environ[_FOLDER]) / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(results))


def run_ranks(
    script: Path | str,
    ranks: int,
    args: Sequence[str] = (),
    timeout: float = 120.0,
    device: str = "cpu",
    forks: bool = False,
) -> list[Any]:
    """Run `script` on `ranks` ranks of this machine and wait for all of them.

    Args:
        script: what each rank runs; it must call `report`.
        args: the script's command line.
        timeout: seconds until every process of the launch is killed.
        device: "cpu" hides GPUs from the ranks, so that they compute on CPU and talk over gloo;
            "cuda" gives each rank one, and nccl.
        forks: the script starts its ranks itself, on CPU.

    Returns:
        what each rank reported, by rank.

    Raises:
        RanksFailed: with the end of what the failing ranks wrote to stderr.
    """
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise RanksFailed(
            f"{script} wants {ranks} GPUs, one a rank, and there are {torch.cuda.device_count()}"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = user_environment(OMP_NUM_THREADS="1", **{_FOLDER: name})
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable]
        if not forks or device == "cuda":
            command += ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
            # a free port chosen by torchrun: two suites may run on one machine
            command += ["--standalone", "--log-dir", str(folder / "logs"), "--redirects", "3"]
        (folder / "logs" / "all").mkdir(parents=True)
        with (folder / "logs" / "all" / "stderr.log").open("w") as errors:
            launched = subprocess.Popen(
                [*command, str(script), *args],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors if forks else subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            status = launched.wait(timeout)
        except subprocess.TimeoutExpired:
            kill(launched)
            raise RanksFailed(
                f"{ranks} ranks of {script} did not end within {timeout} s{_stderr(folder)}"
            ) from None
        finally:
            kill(launched)
        if status != 0:
            raise RanksFailed(f"{script} ended with status {status}{_stderr(folder)}")
        missing = [r for r in range(ranks) if not (folder / f"{r}.json").exists()]
        if missing:
            raise RanksFailed(f"ranks {missing} of {script} reported nothing{_stderr(folder)}")
        return [json.loads((folder / f"{r}.json").read_text()) for r in range(ranks)]


def processes_of(launcher: int) -> list[psutil.Process]:
    """The processes of a launch that run. torchrun gives each rank a session of its own, so they
    are found by their parents."""
    try:
        first = psutil.Process(launcher)
        return [p for p in (first, *first.children(recursive=True)) if lives(p.pid)]
    except psutil.NoSuchProcess:
        return []


def lives(pid: int) -> bool:
    """Whether a process runs: one that has ended may wait for its parent to fetch its status."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(launched: subprocess.Popen[Any]) -> None:
    """End the launcher and what it started."""
    if launched.poll() is None:
        for process in processes_of(launched.pid):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    launched.wait()


def _stderr(folder: Path) -> str:
    """The end of every rank's stderr, those with a traceback first."""
    logs = sorted(folder.glob("logs/**/stderr.log"))
    texts = [(log.parent.name, log.read_text(errors="replace").strip()) for log in logs]
    texts.sort(key=lambda entry: "Traceback" not in entry[1])
    shown = [
        f"\n--- stderr of rank {rank} ---\n" + "\n".join(text.splitlines()[-_LINES_SHOWN:])
        for rank, text in texts
        if text
    ]
    return "".join(shown)
