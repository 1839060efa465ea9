"""Nothing is lost and nobody hangs when ranks, disks, files, numbers or launchers fail."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from graph_trainer.titan.checkpoint_files import METADATA, damage, is_complete, sums_of
from tests.integration.faults_worker import EIGHT, FLAGS
from tests.integration.launch import ROOT, kill, lives, processes_of, run_ranks, user_environment

HERE = Path(__file__).parent

Results = list[dict[str, Any]]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """What each of two ranks reports, by rank and case."""
    return run_ranks(HERE / "faults_worker.py", 2, [str(folder)], timeout=600)


def test_the_loop_trains_and_validates_the_same_captured_and_eagerly(results: Results) -> None:
    """Gradient accumulation, clipping, optimizer and schedule work on the step's gradients."""
    for rank in (0, 1):
        whole, eager = results[rank]["whole"], results[rank]["eager"]
        assert (whole["step"], eager["step"], eager["differs"]) == (8, 8, [])
        # torchtitan validates at step 1 and then at every fourth one
        assert len(whole["validated"]) == 3 and whole["validated"] == eager["validated"]


def test_a_run_leaves_its_checkpoints_metrics_and_config(results: Results) -> None:
    whole = results[0]["whole"]
    assert whole["names"] == ["step-2", "step-4", "step-6", "step-8"]
    assert whole["tensorboard"] == 1
    assert 'base = "llama3_debugmodel"' in whole["config"]
    assert "global_batch_size = 4" in whole["config"]


def test_a_damaged_checkpoint_is_passed_over_for_the_newest_good_one(results: Results) -> None:
    for rank in (0, 1):
        whole, case = results[rank]["whole"], results[rank]["damaged"]
        assert (case["error"], case["step"], case["differs"]) == ("", 8, [])
        assert case["rates"] == whole["rates"] and case["validated"] == whole["validated"][2:]
        told = [line for line in case["lines"] if "damaged and not used" in line]
        for line, step, file in zip(told, (8, 6), ("__1_0", "__0_0"), strict=True):
            assert f"step-{step} is damaged" in line and f"{file}.distcp" in line
            assert line.endswith("going back to the one before")
        (unfinished,) = [line for line in case["lines"] if "never completed" in line]
        assert "step-9 was never completed and is not used" in unfinished
        # Two are to be kept, which damaged and unfinished ones are not counted among: when step 6
        # was written anew, 4 and 6 were the two, and nothing is removed at the last step.
        assert case["names"] == ["step-4", "step-6", "step-8", "step-9"]
        assert case["damage"] == [[], [], []]


def test_where_no_checkpoint_is_good_nothing_is_trained(results: Results) -> None:
    for rank in (0, 1):
        hopeless, chosen = results[rank]["hopeless"], results[rank]["chosen"]
        assert hopeless["step"] == chosen["step"] == 0
        for step in (2, 4, 6, 8):
            assert f"step-{step} is damaged and not used: .metadata" in hopeless["error"]
        assert hopeless["error"].startswith("CheckpointError: none of the checkpoints in ")
        assert "step-8 is damaged: __0_0.distcp is missing" in chosen["error"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_stops_training_and_leaves_the_last_checkpoint(
    results: Results, folder: Path, mode: str
) -> None:
    """Rank 1's disk is full: both ranks stop, with its words. An asynchronous save is waited for
    at the next one, and what it has written before the disk was full is whole, too."""
    for rank in (0, 1):
        case = results[rank][f"full {mode}"]
        path = folder / f"full-{mode}" / "checkpoint"
        assert case["error"].startswith(f"CheckpointError: the checkpoint {path}/step-4 could not")
        assert f"rank 1: OSError: [Errno 27] File too large: '{path}/step-4'" in case["error"]
        assert "checkpoints of other steps are as they were" in case["error"]
        assert (case["names"], case["damage"]) == (["step-2"], [])


@pytest.mark.parametrize(
    ("name", "said", "ranks"),
    [
        ("not finite", "NotFiniteError: step 3: the loss is not finite", "(rank 1: "),
        ("bad gradient", "NotFiniteError: step 3: the loss is finite and a gradient", "(ranks 1)"),
    ],
)
def test_numbers_that_are_not_finite_stop_every_rank_before_the_save(
    results: Results, name: str, said: str, ranks: str
) -> None:
    """Step 3 is neither logged nor saved; step 4 is saved, and never is."""
    for rank in (0, 1):
        case = results[rank][name]
        assert case["error"].startswith(said) and ranks in case["error"]
        assert (case["step"], case["names"]) == (4, ["step-2"])


def test_a_gradient_that_is_not_finite_updates_no_parameter(results: Results) -> None:
    """Step 3 is neither logged nor saved, so that the host waits for nothing."""
    for rank in (0, 1):
        assert results[rank]["bad gradient"]["differs"] == []


def test_steps_that_are_not_finite_are_skipped_as_if_they_had_not_been(results: Results) -> None:
    """Parameters and learning rate are those of a run without the two batches; every step before
    and between them updates."""
    for rank in (0, 1):
        case, without = results[rank]["skip"], results[rank]["without"]
        assert (case["error"], case["step"], case["differs"]) == ("", 5, [])
        assert case["rates"] == without["rates"]
        third, fourth = [line for line in case["lines"] if " is skipped" in line]
        assert third.startswith("Step 3 is skipped, 1 so far: ") and "(ranks 1)" in third
        assert fourth.startswith("Step 4 is skipped, 2 so far: all labels ")
        steps, means, largest, norms, skipped = zip(*case["logged"], strict=True)
        assert (steps, skipped) == ((1, 2, 3, 4, 5), (0, 0, 1, 2, 2))
        finite = [
            math.isfinite(mean) and math.isfinite(norm)
            for mean, norm in zip(means, norms, strict=True)
        ]
        assert finite == [True, True, False, False, True]
        # in step 2 rank 0 alone has labels
        assert largest[1] == means[1] and largest[0] > means[0]


def test_a_step_that_cannot_fit_is_refused_on_all_ranks_before_it_is_taken(
    results: Results, folder: Path
) -> None:
    """Only rank 1 lacks memory."""
    for rank, has in enumerate(("32.", "0.0")):
        error = results[rank]["no room"]["error"]
        assert error.startswith(
            "MemoryLimitError: compile.memory_limit_gib is unset, and the step needs"
        )
        said = " ".join(error.split())
        assert f"This rank has {has}" in said and "GiB available in a test / 2 ranks" in said
        assert "parallelism.data_parallel_shard_degree" in error
    assert not (folder / "no room/checkpoint").exists()


def test_a_save_is_finished_when_the_data_run_out(results: Results) -> None:
    for rank in (0, 1):
        case = results[rank]["out of data"]
        assert any(line.startswith("compile.memory_limit_gib = 0:") for line in case["lines"])
        assert (case["error"], case["still_saving"], case["names"]) == ("", False, ["step-2"])


def test_the_last_checkpoint_can_be_an_export_for_hugging_face(results: Results) -> None:
    for rank in (0, 1):
        case = results[rank]["export"]
        assert (case["error"], case["names"]) == ("", ["step-1"])
        assert any(name.endswith(".safetensors") for name in case["files"])


def test_a_rank_that_stalls_is_named_with_the_collective(results: Results) -> None:
    """Rank 1 stops before the graph of step 3: rank 0 waits in the first all-gather."""
    case = results[0]["stall"]
    assert "stall" not in results[1]
    assert case["error"].startswith("TrainingError: step 3: all_gather_into_tensor of ")
    assert "over ranks [0, 1] in module 'tok_embeddings'" in case["error"]
    assert "parameter 'tok_embeddings.weight', forward" in case["error"]
    assert "Waiting: ranks [0] in all_gather_into_tensor" in case["error"]
    assert "Did not arrive: ranks [1]: " in case["error"]
    # said at once as well, for the launcher may not wait for the rest
    assert any(line.startswith("step 3, rank 0: all_gather_into") for line in case["lines"])
    assert case["seconds"] < 60


class Run:
    """A launcher, the processes that it starts and what they print."""

    def __init__(self, command: list[str], folder: Path, log: str, **environment: str) -> None:
        self.folder, self.log = folder, folder / log
        with self.log.open("w") as output:
            self.launcher = subprocess.Popen(
                command,
                cwd=folder,
                env=user_environment(OMP_NUM_THREADS="1", NGPU="2", **environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        kill(self.launcher)

    def processes(self) -> list[int]:
        return [process.pid for process in processes_of(self.launcher.pid)]

    def rank(self, rank: int) -> int:
        """The process of a rank."""
        for process in processes_of(self.launcher.pid):
            with suppress(psutil.Error):  # it has ended since
                if process.environ().get("RANK") == str(rank):
                    return process.pid
        raise AssertionError(f"no rank {rank}: {self.text()[-3000:]}")

    def text(self) -> str:
        """What has been printed; the last character may be half written."""
        return self.log.read_text(errors="replace")

    def wait_for(self, happened: Callable[[], bool], seconds: float = 300) -> None:
        until = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < until, self.text()[-3000:]
            assert self.launcher.poll() is None, self.text()[-3000:]
            time.sleep(0.002)

    def status(self, seconds: float) -> int:
        """The launcher's exit status; it must end in time."""
        return self.launcher.wait(seconds)


def written_since(path: Path, start: float) -> bool:
    """Whether some of a file has been written; an earlier run may have left one like it."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_mtime > start and status.st_size > 0


def steps(checkpoints: Path) -> list[str]:
    return sorted(p.name for p in checkpoints.glob("step-*") if is_complete(p))


LOADING = r"Loading the checkpoint from \S*/step-(\d)\."


def last_step(text: str) -> int:
    """The last step that a log tells of."""
    return max(map(int, re.findall(r"step: +(\d+) ", text)))


def test_killed_terminated_and_interrupted_a_run_ends_as_if_nothing_had_been(
    results: Results, folder: Path, tmp_path: Path
) -> None:
    """One run of eight steps that needs four launches; its checkpoint of the last step is
    bitwise that of the run without a fault, optimizer, data and counters included."""
    flags = [*FLAGS, *EIGHT, "--metrics.log_freq", "1", "--checkpoint.keep_latest_k", "0"]
    train = [str(ROOT / "run_train.sh"), *flags]
    slow = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    slow += [str(HERE / "slow_save_worker.py"), *flags]
    checkpoints = tmp_path / "outputs" / "checkpoint"

    with Run(train, tmp_path, "killed.log", MAX_RESTARTS="1") as run:
        run.wait_for((checkpoints / "step-2" / METADATA).exists)
        first = run.rank(0)
        os.kill(run.rank(1), signal.SIGKILL)
        killed = time.monotonic()
        run.wait_for(lambda: not lives(first))
        assert time.monotonic() - killed < 60
        before_restart = steps(checkpoints)
        # torchrun starts both anew, and they go on from the newest checkpoint. Files tell how far
        # they are: on a crowded machine what they print is seen late
        run.wait_for(lambda: steps(checkpoints) != before_restart)
        processes = run.processes()
        os.kill(run.rank(0), signal.SIGKILL)
        assert run.status(60) != 0
        assert not any(map(lives, processes))
    before, step, _ = re.split(LOADING, run.text())
    loaded = int(step)
    # the signal may have come one checkpoint later than it was sent
    assert loaded == int(before_restart[-1].removeprefix("step-"))
    assert 0 <= last_step(before) - loaded <= 2
    left = steps(checkpoints)
    last = int(left[-1].removeprefix("step-"))
    assert left == [f"step-{n}" for n in range(2, last + 1, 2)]
    # the last step is still to be trained
    assert loaded + 2 <= last < 8 and last_step(run.text()) - last <= 2
    data = checkpoints / f"step-{last + 2}" / "__0_0.distcp"

    for sent in (signal.SIGTERM, signal.SIGINT):
        with Run(slow, tmp_path, f"{sent.name}.log") as run:
            run.wait_for(partial(written_since, data, time.time()))
            processes = run.processes()
            assert len(processes) >= 3
            os.kill(run.launcher.pid, sent)
            assert run.status(60) != 0
            assert not any(map(lives, processes))
        assert f"checkpoint from ./outputs/checkpoint/step-{last}." in run.text()
        assert steps(checkpoints) == left
        assert not any(damage(checkpoints / name) for name in left)

    with Run(train, tmp_path, "last.log") as run:
        assert run.status(300) == 0, run.text()[-3000:]
    assert sorted(p.name for p in checkpoints.iterdir()) == [f"step-{n}" for n in (2, 4, 6, 8)]
    whole = sums_of(folder / "whole" / "checkpoint" / "step-8")
    ended = sums_of(checkpoints / "step-8")
    del whole[METADATA], ended[METADATA]  # it holds the folder's name
    assert ended == whole, json.dumps([ended, whole])
