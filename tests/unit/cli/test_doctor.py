"""Each lack of a machine is found, said with its remedy, and no other is."""

from __future__ import annotations

import importlib.metadata
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
from torch.utils import collect_env

from graph_trainer.cli import main as cli
from graph_trainer.cli.doctor import examine
from graph_trainer.core.units import GIB

Usage = namedtuple("Usage", "total used free")
L40S = SimpleNamespace(name="NVIDIA L40S", total_memory=44 * GIB, major=8, minor=9)
FACTS = SimpleNamespace(
    os="An OS",
    python_version="3.12.1 (main)",
    nvidia_driver_version="580.65",
    cuda_compiled_version="13.0",
)
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * GIB, major=9, minor=0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with two GPUs that lacks nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(collect_env, "get_env_info", lambda: FACTS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: H100)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(99 * GIB, 0, 99 * GIB))
    with_memory(50 * GIB)(monkeypatch)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    return monkeypatch


def with_memory(free):
    memory = SimpleNamespace(available=free, total=64 * GIB)
    return lambda m: m.setattr(psutil, "virtual_memory", lambda: memory)


def with_version(name, version):
    """Another version of a package; None where it is not installed."""
    real = importlib.metadata.version

    def version_of(asked):
        if asked == name and version is None:
            raise importlib.metadata.PackageNotFoundError(asked)
        return version if asked == name else real(asked)

    return lambda m: m.setattr(importlib.metadata, "version", version_of)


def without_gpu(m, *, driver):
    m.setattr(torch.cuda, "is_available", lambda: False)
    m.setattr(shutil, "which", lambda name: name if driver or name != "nvidia-smi" else None)


def not_installed(m):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    m.setattr(importlib.metadata, "requires", requires)


def nameless(m):
    def unknown(name):
        raise socket.gaierror("unknown")

    m.setattr(socket, "gethostbyname", unknown)


def little_space(m):
    m.setattr(shutil, "disk_usage", lambda folder: Usage(99 * GIB, 0, 4 * GIB))


# How the machine is made to lack something, the row that shows it, and what the row says.
LACKS = {
    "torchtitan missing": (
        with_version("torchtitan", None),
        ("torchtitan", ["missing", "training", "pip install 'torchtitan==0.3.0'"]),
    ),
    "torch too old": (with_version("torch", "2.9.0"), ("torch", ["2.9.0", "training", "pip"])),
    "not installed": (not_installed, ("graph_trainer", ["not installed", "pip install"])),
    "no GPU": (lambda m: without_gpu(m, driver=False), ("GPU", ["none", "NCCL", "gloo", "NGPU"])),
    "GPUs without torch": (lambda m: without_gpu(m, driver=True), ("GPU", ["CUDA build"])),
    "a GPU without a profile": (
        lambda m: m.setattr(torch.cuda, "get_device_properties", lambda index: L40S),
        ("hardware profile", ["a100-80g in place of NVIDIA L40S", "compile.hardware"]),
    ),
    "no compiler": (
        lambda m: m.setattr(shutil, "which", lambda name: None),
        ("graph backends", ["eager", "no g++", "inductor or regional", "apt install"]),
    ),
    "CXX names no compiler": (
        lambda m: (m.setenv("CXX", "icpx"), m.setattr(shutil, "which", lambda name: None)),
        ("graph backends", ["no icpx", "CXX"]),
    ),
    "no headers": (
        lambda m: m.setattr(sysconfig, "get_path", lambda name: "/none"),
        ("graph backends", ["no /none/Python.h", "python3-dev"]),
    ),
    "little memory": (with_memory(GIB), ("memory", ["1.0 GiB free", "NGPU"])),
    "little space": (little_space, ("output folder", ["4.0 GiB free", "checkpoints"])),
    "no address": (nameless, ("host name", ["without an address", "NNODES", "/etc/hosts"])),
}


def test_a_machine_that_lacks_nothing_is_told_so(machine, capsys):
    assert not [each for each in examine() if each.lacks]
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in (
        "Everything works",
        torch.__version__,
        "driver 580.65",
        "GPU 1",
        H100.name,
        "eager, inductor",
    ):
        assert part in out


@pytest.mark.parametrize("kind", LACKS)
def test_each_lack_is_one_row_with_its_remedy(kind, machine, capsys):
    lack, (what, said) = LACKS[kind]
    lack(machine)
    (row,) = (each for each in examine() if each.lacks)
    assert row.what == what and row.remedy
    for part in said:
        assert part in f"{row.state} {row.lacks} {row.remedy}"
    assert cli.main(["doctor"]) == int(what in ("torch", "torchtitan"))
    out = capsys.readouterr().out
    assert out.startswith("What will not work here") and max(map(len, out.splitlines())) <= 100


def test_what_keeps_from_training_stands_first_and_fitting_packages_on_one_line(machine, capsys):
    LACKS["no GPU"][0](machine)
    LACKS["torchtitan missing"][0](machine)
    assert cli.main(["doctor"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    rows = [line[0] for line in lines]
    assert rows.index("torchtitan") < rows.index("GPU")
    (packages,) = (line for line in lines if line[0] == "packages")
    assert (
        packages[-2:] == ["others", "fit"] and ["torch", torch.__version__ + ","] == packages[1:3]
    )


def test_it_runs_where_torchtitan_cannot_be_imported(tmp_path):
    probe = (
        "import sys; sys.modules['torchtitan'] = None\n"
        "from graph_trainer.cli.main import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=tmp_path
    )
    assert "graph backends" in done.stdout and done.stderr == ""
