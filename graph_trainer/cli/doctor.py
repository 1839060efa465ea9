"""Say what this machine has, what will not work on it, and what to do about that.

Facts about system, Python, driver and CUDA are those of torch.utils.collect_env; what is examined
here is what they do not say: packages, devices, compiler, memory and disk, network.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement
from rich.text import Text
from torch.utils import collect_env

from graph_trainer.cli.launcher import usable_cores
from graph_trainer.core.runtime.backends.registry import BACKENDS
from graph_trainer.core.simulation.detect import detect_hardware
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError
from graph_trainer.planner.console import plain_table, print_table


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined."""

    what: str
    state: str
    lacks: str = ""
    """What does not work because of it; empty where all is well."""
    remedy: str = ""
    stops_training: bool = False


def main(argv: Sequence[str]) -> int:
    """Print what this machine lacks, then what it has; 1 where something keeps it from training.

    Raises:
        ConfigError: there are words, and the command takes none.
    """
    if argv:
        raise ConfigError(f"command line: doctor takes no arguments, found {' '.join(argv)}.")
    findings = examine()
    lacking = plain_table("What will not work here, and what to do")
    has = plain_table("This machine")
    for table, headings in ((lacking, ("does not work", "remedy")), (has, ("state",))):
        table.add_column("what", no_wrap=True)
        for heading in headings:
            table.add_column(heading, overflow="fold")
    for each in findings:
        has.add_row(each.what, Text(each.state))
        if each.lacks:
            lacking.add_row(each.what, Text(each.lacks), Text(each.remedy))
    print_table(lacking if lacking.row_count else "Everything works here.")
    print_table(has)
    return int(any(each.stops_training for each in findings))


def examine() -> list[Finding]:
    """Examine the machine without changing it; takes a few seconds."""
    facts = collect_env.get_env_info()
    cuda = {"driver": facts.nvidia_driver_version, "CUDA": facts.cuda_compiled_version}
    versions = [f"{name} {version}" for name, version in cuda.items() if version]
    python = f"Python {facts.python_version.split()[0]}, {usable_cores()} cores"
    system = Finding("system", ", ".join([facts.os, python, *versions]))
    return [*_packages(), system, *_devices(), *_compiler(), *_space(), _host_name()]


def _packages() -> Iterator[Finding]:
    """Compare the version of every required package with the range that we ask for."""
    try:
        requirements = map(Requirement, importlib.metadata.requires("graph_trainer") or [])
    except importlib.metadata.PackageNotFoundError:
        lacks = "the command graph-trainer; versions of packages are not checked"
        remedy = "pip install -c constraints.txt -e . in the checkout"
        yield Finding("graph_trainer", "not installed", lacks, remedy)
        return
    fine = []
    for need in requirements:
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        if version != "missing" and need.specifier.contains(version, prereleases=True):
            fine.append(f"{need.name} {version}")
            continue
        lacks = f"training: {need.name} {need.specifier} is needed".replace("  ", " ")
        remedy = f"pip install '{need.name}{need.specifier}'"
        yield Finding(need.name, version, lacks, remedy, stops_training=True)
    yield Finding("packages", ", ".join(fine))


def _devices() -> Iterator[Finding]:
    profile = detect_hardware()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield Finding(f"GPU {index}", f"{device.name}, {device.total_memory / GIB:.0f} GiB")
    elif shutil.which("nvidia-smi"):
        remedy = f"see nvidia-smi; install a CUDA build of torch (this: {torch.version.cuda})"
        yield Finding("GPU", "none", "GPUs that torch cannot open, if nvidia-smi has any", remedy)
    else:
        lacks = "NCCL, float8, FlexAttention's backward; ranks train on CPU with gloo, slowly"
        yield Finding("GPU", "none", lacks, "none needed for small models; NGPU starts CPU ranks")
    lacks = "" if profile.exact else "passes and plans that know this device"
    yield Finding("hardware profile", profile.hardware.name, lacks, profile.why if lacks else "")


def _compiler() -> Iterator[Finding]:
    """Look for what Inductor builds its kernels with: a C++ compiler and the headers of Python."""
    name = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    compiler = shutil.which(name)
    needing = [name for name, backend in BACKENDS.items() if backend.needs_cpp_compiler]
    usable = [name for name in BACKENDS if name not in needing]
    if compiler and header.is_file():
        yield Finding("graph backends", f"{', '.join(BACKENDS)} (compiler: {compiler})")
    else:
        remedy = "apt install g++ python3-dev, or set CXX to a compiler"
        missing = f"no {name if not compiler else header}"
        lacks = f"compile.backend = {' or '.join(needing)}: {missing}"
        yield Finding("graph backends", ", ".join(usable), lacks, remedy)


def _space() -> Iterator[Finding]:
    """Compare memory and disk with what the smallest useful run takes."""
    memory = psutil.virtual_memory()
    shared = Path("/dev/shm")
    places = [("memory", memory.available, 4, "two CPU ranks", "end programs, or lower NGPU")]
    if shared.is_dir():
        lacks, free = "NCCL within a machine, workers of loaders", shutil.disk_usage(shared).free
        places.append((str(shared), free, 1, lacks, "docker run --shm-size=8g"))
    lacks, free = "checkpoints: 0.1 GiB of the debug model, 90 of 8B", shutil.disk_usage(".").free
    places.append(("output folder", free, 5, lacks, "--dump_folder /large/disk/run"))
    for what, free, least, lacks, remedy in places:
        state = f"{free / GIB:.1f} GiB free"
        yield Finding(what, state) if free >= least * GIB else Finding(what, state, lacks, remedy)


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "without an address"
    if address[0].isdigit() and not address.startswith("127."):
        return Finding("host name", f"{name}, {address}")
    lacks = "several machines (NNODES): the others cannot reach this one by its name"
    remedy = "give it an address in /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    return Finding("host name", f"{name}, {address}", lacks, remedy)
