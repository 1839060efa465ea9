"""The launcher that other integration tests rely on: results, errors and time-outs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.launch import RanksFailed, lives, run_ranks

SCRIPT = """
import os, sys, time
from pathlib import Path
from tests.integration.launch import report
rank = int(os.environ["RANK"])
what, folder = sys.argv[1], Path(sys.argv[2])
(folder / f"pid{rank}").write_text(str(os.getpid()))
if what == "fails" and rank == 1:
    raise ValueError("rank one is unwell")
if what == "hangs":
    print("waiting for nobody", file=sys.stderr, flush=True)
    time.sleep(600)
if rank != 1:
    report({})
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    return path


def test_a_rank_that_fails_is_named(script: Path, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank one is unwell"):
        run_ranks(script, 2, ["fails", str(tmp_path)], timeout=100)


def test_a_rank_without_a_gpu_of_its_own_is_refused(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(RanksFailed, match="wants 2 GPUs, one a rank, and there are 1"):
        run_ranks(script, 2, ["works", str(tmp_path)], timeout=100, device="cuda")


def test_a_hanging_launch_is_killed_whole(script: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    # long enough for both ranks to have started on a busy machine
    with pytest.raises(RanksFailed, match="did not end within 20"):
        run_ranks(script, 2, ["hangs", str(tmp_path)], timeout=20)
    assert time.monotonic() - start < 60
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    assert len(pids) == 2
    for pid in pids:
        for _ in range(50):
            if not lives(pid):
                break
            time.sleep(0.1)
        assert not lives(pid)
