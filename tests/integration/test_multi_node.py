"""Two machines, each in network namespaces of its own, train together through run_train.sh.

Where the kernel makes no namespaces (a container without the right) the two nodes share the
machine's network, and the test warns: everything holds but that the bytes went over a cable.
NAMESPACES=required in the environment makes that a failure.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import warnings
from pathlib import Path

import pytest

from tests.integration.launch import ROOT, kill, user_environment

SECONDS = 240
UNSHARE = ["unshare", "--net", "--mount", "--uts"]
AS_A_USER = ["--user", "--map-root-user"]


def namespaces() -> list[str] | None:
    """The command that makes them here: as root, or in a user namespace. None where the kernel
    lets nobody."""
    for command in (UNSHARE, [*UNSHARE, *AS_A_USER]):
        # a cable needs its kernel module as well
        probe = "ip link add probe0 type veth peer name probe1"
        made = subprocess.run([*command, "sh", "-c", probe], capture_output=True)
        if made.returncode == 0:
            return command
    return None


def without_namespaces(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """The same two nodes on this machine's own network, in the same folders."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        endpoint = f"localhost:{s.getsockname()[1]}"
    started = []
    for node in (0, 1):
        (folder / f"node{node}").mkdir()
        with (folder / f"node{node}/log").open("w") as log:
            own = {"NNODES": "2", "NODE_RANK": str(node), "RDZV_ENDPOINT": endpoint}
            where = folder / f"node{node}"
            started.append(
                subprocess.Popen(command, cwd=where, env=environment | own, stdout=log, stderr=log)
            )
    try:
        statuses = [node.wait(SECONDS) for node in started]
    finally:
        for node in started:
            kill(node)
    assert statuses == [0, 0], "\n".join(log[-3000:] for log in logs_of(folder))


def with_namespaces(
    unshare: list[str], command: list[str], folder: Path, environment: dict[str, str]
) -> None:
    """The nodes in namespaces of their own: their ranks can only meet over the cable."""
    nodes = subprocess.Popen(
        [*unshare, str(ROOT / "tests/integration/two_nodes.sh"), *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = nodes.communicate(timeout=SECONDS)
    finally:
        kill(nodes)
    assert nodes.returncode == 0, "\n".join([said, *(log[-3000:] for log in logs_of(folder))])
    # Weights and gradients went over the cable: 6 million parameters, twice each step and more.
    for node in (0, 1):
        (link,) = json.loads(_read(folder / f"node{node}/sent"))
        assert link["stats64"]["tx"]["bytes"] > 2 * 6_000_000 * 4, link


@pytest.mark.timeout(300)
def test_two_machines_train_together(tmp_path: Path) -> None:
    flags = ["--training.steps", "2", "--training.seq_len", "64", "--metrics.log_freq", "1"]
    environment = user_environment(CUDA_VISIBLE_DEVICES="", NGPU="2")
    command = [str(ROOT / "run_train.sh"), *flags]
    unshare = namespaces()
    if unshare is None:
        assert os.environ.get("NAMESPACES") != "required", "the kernel makes no namespaces here"
        warnings.warn("no namespaces here: the nodes share one network", UserWarning, stacklevel=1)
        without_namespaces(command, tmp_path, environment)
    else:
        with_namespaces(unshare, command, tmp_path, environment)

    # One mesh over the four ranks of both, and one loss, which each machine's first rank shows.
    logs = logs_of(tmp_path)
    for log in logs:
        assert "dp_shard=4, cp=1, tp=1" in log and "Training completed" in log
    first, second = (re.findall(r"step:\s+(\d+)\s+loss:\s+([\d.]+)", log) for log in logs)
    assert [step for step, _ in first] == ["1", "2"] and first == second
    assert (tmp_path / "node0/outputs/config.toml").exists()
    assert not (tmp_path / "node1/outputs/config.toml").exists()


def logs_of(folder: Path) -> list[str]:
    """What each node printed, without colours."""
    return [re.sub(r"\x1b\[[\d;]*m", "", _read(folder / f"node{n}/log")) for n in (0, 1)]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
