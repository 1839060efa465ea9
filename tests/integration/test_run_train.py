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
    assert output.index("Capturing the train step") < output.index("Training starts at step 1")
    assert "Captured again" not in output
    assert output.count("replaces torchtitan's loss in chunks") == 1
    assert (tmp_path / "outputs" / "config.toml").exists()
    # two minutes on two idle cores; the tests' machine may be busy with other things
    assert seconds < 240
