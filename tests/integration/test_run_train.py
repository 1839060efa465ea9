"""./run_train.sh as a user calls it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.launch import ROOT, user_environment

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"step:\s*(\d+)\s+loss:\s*([\d.]+)")


def run_train(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the script from another folder, in the environment that runs the tests."""
    return subprocess.run(
        [str(ROOT / "run_train.sh"), *flags],
        cwd=folder,
        env=user_environment(**environment),
        capture_output=True,
        text=True,
        timeout=280,
    )


def losses(output: str) -> dict[int, float]:
    """Loss by step, from the console."""
    return {int(s): float(v) for s, v in _STEP.findall(_COLOUR.sub("", output))}


@pytest.mark.timeout(300)
def test_the_default_run_learns(tmp_path: Path) -> None:
    start = time.monotonic()
    done = run_train(tmp_path)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr[-3000:]
    found = losses(done.stdout)
    assert list(found)[0] == 1
    assert found[1] - found[max(found)] >= 1.5
    assert "What each pass did to the joint graph" in done.stdout
    assert (tmp_path / "outputs" / "config.toml").exists()
    # two minutes on two idle cores; the tests' machine may be busy with other things
    assert seconds < 240


@pytest.mark.timeout(300)
def test_the_command_line_of_the_readme_of_torchtitan_users(tmp_path: Path) -> None:
    """Without GPUs the degrees say how many ranks there are: eight."""
    done = run_train(
        tmp_path,
        *("--module", "graph_trainer.llama3", "--config", "graph_trainer_llama3_debugmodel"),
        *("--parallelism.fsdp_reshard_after_forward", "always"),
        *("--parallelism.data_parallel_shard_degree", "4"),
        *("--parallelism.tensor_parallel_degree", "2"),
        *("--training.steps", "2", "--training.local_batch_size", "1"),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "dp_shard=4, cp=1, tp=2" in done.stdout
