"""Two machines, each in network namespaces of its own, train together through run_train.sh."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import ROOT, _kill

SECONDS = 240
UNSHARE = ["unshare", "--net", "--mount", "--uts"]
AS_A_USER = ["--user", "--map-root-user"]


def namespaces() -> list[str]:
    """The command that makes them here: as root, or in a user namespace."""
    tried = []
    for command in (UNSHARE, [*UNSHARE, *AS_A_USER]):
        made = subprocess.run([*command, "true"], capture_output=True, text=True)
        if made.returncode == 0:
            return command
        tried.append(made.stderr.strip())
    raise AssertionError(
        f"this kernel lets nobody make a namespace here ({'; '.join(tried)}). Run the tests as "
        "root with CAP_SYS_ADMIN, or allow user namespaces: sysctl user.max_user_namespaces=1000 "
        "kernel.apparmor_restrict_unprivileged_userns=0"
    )


@pytest.mark.timeout(300)
def test_two_machines_train_together(tmp_path: Path) -> None:
    flags = ["--training.steps", "2", "--training.seq_len", "64", "--metrics.log_freq", "1"]
    kept = {k: v for k, v in os.environ.items() if k not in ("NGPU", "OMP_NUM_THREADS")}
    environment = kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "NGPU": "2",
    }
    nodes = subprocess.Popen(
        [
            *namespaces(),
            str(ROOT / "tests/integration/two_nodes.sh"),
            ROOT / "run_train.sh",
            *flags,
        ],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = nodes.communicate(timeout=SECONDS)
    finally:
        _kill(nodes)
    logs = [re.sub(r"\x1b\[[\d;]*m", "", _read(tmp_path / f"node{n}/log")) for n in (0, 1)]
    assert nodes.returncode == 0, "\n".join([said, *(log[-3000:] for log in logs)])

    # One mesh over the four ranks of both, and one loss, which each machine's first rank shows.
    for log in logs:
        assert "dp_shard=4, cp=1, tp=1" in log and "Training completed" in log
    first, second = (re.findall(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", log) for log in logs)
    assert [step for step, _ in first] == ["1", "2"] and first == second
    assert (tmp_path / "node0/outputs/config.toml").exists()
    assert not (tmp_path / "node1/outputs/config.toml").exists()
    # Weights and gradients went over the cable: 6 million parameters, twice each step and more.
    for node in (0, 1):
        (link,) = json.loads(_read(tmp_path / f"node{node}/sent"))
        assert link["stats64"]["tx"]["bytes"] > 2 * 6_000_000 * 4, link


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
