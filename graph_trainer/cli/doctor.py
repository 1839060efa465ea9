"""Say what this machine has, what will not work on it, and what to do about that.

Examines what torch.utils.collect_env does not: packages, devices, compiler, space, network.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement
from rich.text import Text
from torch.utils import collect_env

from graph_trainer.cli.launcher import usable_cores
from graph_trainer.core.runtime.backends.registry import (
    BACKENDS,
    COMPILER_REMEDY,
    missing_compiler,
)
from graph_trainer.core.simulation.detect import HARDWARE, detect_hardware
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError
from graph_trainer.planner.terminal import plain_table, print_table


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
    """Print what this machine lacks, then what it has; 1 where something keeps it from training."""
    if argv:
        raise ConfigError(f"command line: doctor takes no arguments, found {' '.join(argv)}.")
    findings = examine()
    failures = plain_table("What will not work here, and what to do")
    has = plain_table("This machine")
    for table, heading in ((failures, "does not work"), (has, "state")):
        table.add_column("what", no_wrap=True)
        table.add_column(heading, overflow="fold")
    failures.add_column("remedy", overflow="fold")
    for finding in sorted(findings, key=lambda finding: not finding.stops_training):
        has.add_row(finding.what, Text(finding.state))
        if finding.lacks:
            failures.add_row(finding.what, Text(finding.lacks), Text(finding.remedy))
    print_table(failures if failures.row_count else "Everything works here.")
    print_table(has)
    return int(any(finding.stops_training for finding in findings))


def examine() -> list[Finding]:
    """Examine the machine without changing it; takes a few seconds."""
    facts = collect_env.get_env_info()
    system = f"{facts.os}, Python {facts.python_version.split()[0]}, {usable_cores()} cores"
    if driver := facts.nvidia_driver_version:
        system += f", driver {driver}, CUDA of torch {facts.cuda_compiled_version}"
    findings = [*_packages(), Finding("system", system), *_devices(), _compiler(), _host_name()]
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(".").free
    findings.append(_space("memory", memory, 4, "two CPU ranks", "end programs, or lower NGPU"))
    lacks = "checkpoints: 0.1 GiB of the debug model, 90 of 8B"
    findings.append(_space("output folder", disk, 5, lacks, "--dump_folder /large/disk/run"))
    if Path("/dev/shm").is_dir():
        free, lacks = shutil.disk_usage("/dev/shm").free, "NCCL in a machine, workers of loaders"
        findings.append(_space("/dev/shm", free, 1, lacks, "docker run --shm-size=8g"))
    return findings


def _packages() -> list[Finding]:
    """Compare the version of every required package with the range that we ask for."""
    try:
        requirements = map(Requirement, importlib.metadata.requires("graph_trainer") or [])
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install -c constraints.txt -e . in the checkout"
        return [Finding("graph_trainer", "not installed", "the command graph-trainer", remedy)]
    fine, unfit = [], []
    for need in requirements:
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        need.marker = None  # no word of it in the message
        try:
            version = importlib.metadata.version(need.name)
            fits = need.specifier.contains(version, prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            version, fits = "missing", False
        if fits:
            fine.append(f"{need.name} {version}")
        else:
            remedy = f"pip install '{need}'"
            unfit.append(Finding(need.name, version, f"training: {need} is needed", remedy, True))
    named = [fact for fact in fine if fact.startswith("torch")]
    fitting = f"{', '.join(named)} and {len(fine) - len(named)} others fit"
    return [*unfit, Finding("packages", fitting)]


def _devices() -> Iterator[Finding]:
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
    profile = detect_hardware()
    if profile.exact:
        yield Finding("hardware profile", profile.hardware.name)
    else:
        lacks = "passes and plans that know this device"
        remedy = profile.why.replace(HARDWARE, "compile.hardware")
        yield Finding("hardware profile", profile.hardware.name, lacks, remedy)


def _compiler() -> Finding:
    if not (missing := missing_compiler()):
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        return Finding("graph backends", f"{', '.join(BACKENDS)} (compiler: {compiler})")
    needing = [name for name, backend in BACKENDS.items() if backend.needs_cpp_compiler]
    usable = ", ".join(name for name in BACKENDS if name not in needing)
    lacks = f"compile.backend = {' or '.join(needing)}: no {missing}"
    return Finding("graph backends", usable, lacks, COMPILER_REMEDY)


def _space(what: str, free: int, least: int, lacks: str, remedy: str) -> Finding:
    """Compare memory or disk with the GiB that the smallest useful run takes."""
    state = f"{free / GIB:.1f} GiB free"
    return Finding(what, state) if free >= least * GIB else Finding(what, state, lacks, remedy)


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
