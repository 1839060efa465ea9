"""Each lack of a machine is found, said with its consequence and its remedy, and no other is."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils import collect_env

from graph_trainer.cli import main as cli
from graph_trainer.cli.doctor import Finding, State, examine, report
from graph_trainer.core.simulation.detect import HARDWARE_KEY
from graph_trainer.core.units import GIB
from graph_trainer.planner.console import print_table

Usage = namedtuple("Usage", "total used free")
FACTS = collect_env.SystemEnv(
    **dict.fromkeys(collect_env.SystemEnv._fields)
    | {
        "os": "An OS (x86_64)",
        "python_platform": "Linux-6.1",
        "python_version": "3.12.1",
        "nvidia_driver_version": "580.65.06",
        "cuda_compiled_version": "13.0",
        "cudnn_version": "9.10",
    }
)
L40S = SimpleNamespace(name="NVIDIA L40S", total_memory=44 * GIB, major=8, minor=9)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with two GPUs that lacks nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("CXX", "RDZV_ENDPOINT", "GRAPH_TRAINER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    versions = {"torch": "2.14.1+cu130", "triton": "3.7.1"}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: versions.get(n) or real(n))
    monkeypatch.setattr(collect_env, "get_env_info", lambda: FACTS)
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(99 * GIB, 0, 99 * GIB))
    memory = SimpleNamespace(available=50 * GIB, total=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "include"))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    return monkeypatch


def fails(error):
    def function(*args, **kwargs):
        raise error

    return function


def facts(**other):
    return lambda m: m.setattr(collect_env, "get_env_info", lambda: FACTS._replace(**other))


def version_of(name, found):
    """Another version of a package; None where it is not installed."""
    real = importlib.metadata.version

    def version(asked):
        if asked == name and found is None:
            raise importlib.metadata.PackageNotFoundError(asked)
        return found if asked == name else real(asked)

    return lambda m: m.setattr(importlib.metadata, "version", version)


def without_gpu(m, *, driver=False, cuda=False):
    m.setattr(torch.cuda, "is_available", lambda: False)
    facts(nvidia_driver_version=None, cuda_compiled_version="13.0" if cuda else None)(m)
    m.setattr(shutil, "which", lambda name: None if name == "nvidia-smi" and not driver else name)


def little(folder, free):
    usage = lambda asked: Usage(GIB, 0, free if str(asked) == str(folder) else 99 * GIB)  # noqa: E731
    return lambda m: m.setattr(shutil, "disk_usage", usage)


def little_in_the_folder(m):
    little(os.getcwd(), GIB)(m)


def unwritable(m):
    m.setattr(os, "access", lambda path, mode: str(path) != os.getcwd())


def little_cache(m):
    m.setenv("GRAPH_TRAINER_CACHE", "/")
    little("/", GIB)(m)


def environment(name, value):
    return lambda m: m.setenv(name, value)


# How the machine is made to lack something; the row it shows in; how bad it is; what the row says.
LACKS = {
    "another system": (
        facts(python_platform="Plan9-4"),
        ("system", State.LIMITED, ["Plan9", "triton", "Linux"]),
    ),
    "a GPU without a profile": (
        lambda m: m.setattr(torch.cuda, "get_device_properties", lambda index: L40S),
        ("hardware profile", State.LIMITED, ["a100-80g in place of NVIDIA L40S", HARDWARE_KEY]),
    ),
    "torchtitan missing": (
        version_of("torchtitan", None),
        ("torchtitan", State.BROKEN, ["missing", "pip install 'torchtitan==0.3.0'"]),
    ),
    "triton missing": (
        version_of("triton", None),
        ("triton", State.BROKEN, ["missing", "pip install 'triton'"]),
    ),
    "torch too old": (
        version_of("torch", "2.11.0"),
        ("torch", State.BROKEN, ["2.11.0", ">=2.13", "pip install 'torch"]),
    ),
    "torch too new": (
        version_of("torch", "2.16.0+cpu"),
        ("torch", State.BROKEN, ["2.16.0", "<2.16", "pip install 'torch"]),
    ),
    "another torchtitan": (
        version_of("torchtitan", "0.4.0"),
        ("torchtitan", State.BROKEN, ["0.4.0", "==0.3.0", "pip install 'torchtitan==0.3.0'"]),
    ),
    "graph_trainer not installed": (
        lambda m: m.setattr(
            importlib.metadata, "requires", fails(importlib.metadata.PackageNotFoundError("x"))
        ),
        ("graph_trainer", State.LIMITED, ["not installed", "pip install"]),
    ),
    "no GPU": (without_gpu, ("GPU", State.LIMITED, ["none", "NCCL", "gloo", "NGPU"])),
    "a torch for CPUs beside GPUs": (
        lambda m: without_gpu(m, driver=True),
        ("GPU", State.LIMITED, ["nvidia-smi", "build for CPUs", "Install a CUDA build"]),
    ),
    "GPUs that torch cannot open": (
        lambda m: without_gpu(m, driver=True, cuda=True),
        ("GPU", State.LIMITED, ["nvidia-smi", "CUDA_VISIBLE_DEVICES", "driver"]),
    ),
    "no NCCL": (
        lambda m: m.setattr(dist, "is_nccl_available", lambda: False),
        ("nccl", State.BROKEN, ["missing", "collectives", "Install a torch"]),
    ),
    "no C++ compiler": (
        lambda m: m.setattr(shutil, "which", lambda name: None if name == "g++" else name),
        ("C++ compiler", State.LIMITED, ["no g++", '"inductor"', "apt install g++", '"eager"']),
    ),
    "CXX names no compiler": (
        lambda m: (
            m.setenv("CXX", "icpx"),
            m.setattr(shutil, "which", lambda name: None if name == "icpx" else name),
        ),
        ("C++ compiler", State.LIMITED, ["no icpx", '"inductor"', "CXX"]),
    ),
    "no Python headers": (
        lambda m: m.setattr(sysconfig, "get_path", lambda name: "/no/include"),
        ("Python headers", State.LIMITED, ["/no/include/Python.h", '"inductor"', "python3-dev"]),
    ),
    "little memory": (
        lambda m: m.setattr(
            psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB, total=2 * GIB)
        ),
        ("memory", State.LIMITED, ["1.0 GiB free of 2.0", "NGPU"]),
    ),
    "small /dev/shm": (
        little("/dev/shm", 64 * 1024**2),
        ("/dev/shm", State.LIMITED, ["0.1 GiB", "NCCL", "--shm-size"]),
    ),
    "full disk": (
        little_in_the_folder,
        ("output folder", State.LIMITED, ["1.0 GiB", "checkpoints", "--dump_folder"]),
    ),
    "folder that cannot be written": (
        unwritable,
        ("output folder", State.BROKEN, ["cannot be written", "--dump_folder"]),
    ),
    "full cache": (
        little_cache,
        ("cache folder", State.LIMITED, ["1.0 GiB", "tokenizers", "GRAPH_TRAINER_CACHE"]),
    ),
    "no port": (
        lambda m: m.setattr(socket, "create_server", fails(OSError("no loopback"))),
        ("port", State.BROKEN, ["no loopback", "torchrun", "/etc/hosts"]),
    ),
    "a name that is the loopback": (
        lambda m: m.setattr(socket, "gethostbyname", lambda name: "127.0.1.1"),
        ("host name", State.LIMITED, ["127.0.1.1", "NNODES", "GLOO_SOCKET_IFNAME"]),
    ),
    "a name without an address": (
        lambda m: m.setattr(socket, "gethostbyname", fails(socket.gaierror("unknown"))),
        ("host name", State.LIMITED, ["no address", "NNODES", "/etc/hosts"]),
    ),
    "a meeting point without a port": (
        environment("RDZV_ENDPOINT", "localhost"),
        ("RDZV_ENDPOINT", State.BROKEN, ["localhost", "host:port", "NODE_RANK=0"]),
    ),
    "a meeting point that nobody knows": (
        lambda m: (
            m.setenv("RDZV_ENDPOINT", "nowhere:29500"),
            m.setattr(socket, "getaddrinfo", fails(socket.gaierror("unknown"))),
        ),
        ("RDZV_ENDPOINT", State.BROKEN, ["nowhere:29500", "unknown", "host:port"]),
    ),
}


def bad(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.state is not State.OK]


def test_a_machine_that_lacks_nothing_is_told_so(machine, capsys):
    findings = examine()
    assert bad(findings) == []
    assert len({each.what for each in findings}) == len(findings) > 20
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "Everything works here." in out
    for part in (
        "2.14.1+cu130",
        "GPU 1",
        "NVIDIA H100 80GB HBM3, 79 GiB",
        "nccl",
        "eager, inductor, regional",
    ):
        assert part in out
    for fact in filter(None, FACTS):
        assert fact in out


@pytest.mark.parametrize("kind", LACKS)
def test_each_lack_is_one_row_with_its_remedy(kind, machine, capsys):
    lack, (what, state, said) = LACKS[kind]
    lack(machine)
    (row,) = bad(examine())
    assert (row.what, row.state) == (what, state)
    assert row.lacks and row.remedy
    for part in said:
        assert part in f"{row.found} {row.lacks} {row.remedy}"
    assert cli.main(["doctor"]) == (1 if state is State.BROKEN else 0)
    out = capsys.readouterr().out
    assert "What will not work here" in out and "Everything works" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_graph_backends_are_those_that_work(machine):
    def backends():
        (row,) = (each for each in examine() if each.what == "graph backends")
        return row.found

    assert backends() == "eager, inductor, regional"
    LACKS["no C++ compiler"][0](machine)
    assert backends() == "eager"


def test_without_gpus_gloo_is_what_trains(machine):
    without_gpu(machine)
    machine.setattr(dist, "is_nccl_available", lambda: False)
    machine.setattr(dist, "is_gloo_available", lambda: False)
    assert [(each.what, each.state) for each in bad(examine())] == [
        ("GPU", State.LIMITED),
        ("gloo", State.BROKEN),
    ]


def test_long_findings_wrap_within_100_columns_and_lose_nothing(capsys):
    print_table(report([Finding("x", "7" * 300, State.BROKEN, "8" * 199, "9" * 399)]))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert [out.count(letter) for letter in "789"] == [300, 199, 399]


def test_it_runs_where_torchtitan_cannot_be_imported(tmp_path):
    probe = (
        "import sys; sys.modules['torchtitan'] = None\n"
        "from graph_trainer.cli.main import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=tmp_path
    )
    assert "graph backends" in done.stdout and done.stderr == ""
