"""./run_train.sh as a user calls it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.launch import ROOT, user_environment


@pytest.mark.timeout(300)
def test_the_default_run_learns(tmp_path: Path) -> None:
    """From another folder, in the environment that runs the tests."""
    start = time.monotonic()
    done = subprocess.run(
        [str(ROOT / "run_train.sh")],
        cwd=tmp_path,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr[-3000:]
    output = done.stdout
    # no terminal, so no colours; and no warning that means nothing on a CPU
    assert "\x1b" not in output and "mfu" not in output
    assert not [line for line in output.splitlines() if "arning" in line or "lspci" in line]
    log = (tmp_path / "outputs" / "console.log").read_text()
    assert "step: 40" in log and list((tmp_path / "outputs" / "tb").rglob("events.out.*"))
    steps = re.findall(r"step:\s*(\d+)\s+loss:\s*([\d.]+)", output)
    (first, before), (_, after) = steps[0], steps[-1]
    assert first == "1" and float(before) - float(after) >= 1.5
    assert "What each pass did to the joint graph" in output
    # what a step is refused for is said before anything is loaded or trains, and captured once
    parts = ["Capturing the train step", "Running the passes", "Compiling for the backend 'eager'"]
    assert output.index(parts[0]) < output.index("Training starts at step 1")
    assert all(output.count(part) == 1 for part in parts)
    assert "Captured again" not in output
    assert output.count("replaces torchtitan's loss in chunks") == 1
    assert (tmp_path / "outputs" / "config.toml").exists()
    # two minutes on two idle cores; the tests' machine may be busy with other things
    assert seconds < 240


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compile.memory_limit_gib", "0.1"], "memory_limit_gib = 0.1: the step needs"),
        (["--dump_folder", "file/run"], 'dump_folder = "file/run": nothing can be'),
    ],
)
@pytest.mark.timeout(300)
def test_what_the_ranks_refuse_is_shown_once(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [str(ROOT / "run_train.sh"), *flags],
        cwd=tmp_path,
        env=user_environment(NGPU="2"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2
    error = " ".join(done.stderr.split())
    assert error.startswith("error: ") and error.count(message) == 1, error
    assert not any(text in done.stdout for text in (message, "Traceback", "step: "))
