"""What this machine has, and what will not work on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from graph_trainer.core.runtime.backends.registry import BACKENDS
from graph_trainer.core.units import GIB

LEAST_MEMORY = 4 * GIB
"""Two ranks of the debug model take half of it."""
LEAST_SHARED_MEMORY = GIB
"""NCCL and the workers of data loaders share tensors there; Docker gives 64 MiB."""
LEAST_DISK = 5 * GIB
"""A checkpoint of the debug model takes 0.1 GiB, of an 8B model 90 GiB."""


class State(Enum):
    """How good a finding is."""

    OK = "ok"
    LIMITED = "limited"
    """Training works; what `lacks` names does not."""
    BROKEN = "broken"
    """Nothing trains before it is mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row: what was looked at, and what was found."""

    what: str
    found: str
    state: State = State.OK
    lacks: str = ""
    """What does not work for it; empty where all is well."""
    remedy: str = ""
    """What to do about it."""


def examine() -> list[Finding]:
    """Look at everything there is, without changing anything; takes a second."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _system,
        _packages,
        _devices,
        _collectives,
        _compiler,
        _memory,
        _folders,
        _network,
    )
    return [finding for check in checks for finding in check()]


def report(findings: list[Finding]) -> Group:
    """The findings as a table, and what they keep from working as another."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title="This machine", title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("state", no_wrap=True)
    for each in findings:
        table.add_row(each.what, Text(each.found), each.state.value)
    bad = [each for each in findings if each.state is not State.OK]
    if not bad:
        return Group(table, Text("Everything works here."))
    lacking = Table(
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        title="What will not work here, and what to do",
        title_justify="left",
    )
    lacking.add_column("what", no_wrap=True)
    lacking.add_column("does not work", overflow="fold", ratio=2)
    lacking.add_column("remedy", overflow="fold", ratio=3)
    for each in bad:
        lacking.add_row(each.what, Text(each.lacks), Text(each.remedy))
    return Group(table, lacking)


def _system() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() == "Linux":
        yield Finding(what="system", found=system)
    else:
        yield Finding(
            what="system",
            found=system,
            state=State.LIMITED,
            lacks="torchtitan, which imports triton: there is none for this system",
            remedy="Train on Linux; elsewhere the core works (import graph_trainer).",
        )
    yield Finding(what="python", found=f"{platform.python_version()}, {sys.executable}")


def _packages() -> Iterator[Finding]:
    """Every package that ours asks for, its version held to the range that we say."""
    try:
        asked = importlib.metadata.requires("graph_trainer") or []
        yield Finding(what="graph_trainer", found=importlib.metadata.version("graph_trainer"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            what="graph_trainer",
            found=f"not installed, read from {Path(__file__).parents[1]}",
            state=State.LIMITED,
            lacks="the command graph-trainer, and the versions below are not checked",
            remedy="Install it: pip install -c constraints.txt -e . in the checkout.",
        )
        asked = []
    for text in asked:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        yield _package(need)


def _package(need: Requirement) -> Finding:
    wanted = f"{need.name}{need.specifier}"
    try:
        found = importlib.metadata.version(need.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            what=need.name,
            found="missing",
            state=State.BROKEN,
            lacks="training: graph_trainer and torchtitan import it",
            remedy=f"pip install '{wanted}'",
        )
    if not need.specifier.contains(found, prereleases=True):
        return Finding(
            what=need.name,
            found=found,
            state=State.BROKEN,
            lacks=f"training, which is written for {need.specifier}",
            remedy=f"pip install '{wanted}'",
        )
    return Finding(what=need.name, found=found)


def _devices() -> Iterator[Finding]:
    driver = shutil.which("nvidia-smi") is not None
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / GIB:.0f} GiB"
            yield Finding(what=f"GPU {index}", found=f"{properties.name}, {memory}")
        return
    if driver and not torch.backends.cuda.is_built():
        lacks = "the GPUs that nvidia-smi sees: this torch is a build for CPUs"
        remedy = "Install a CUDA build: pip install torch without an extra index for CPU wheels."
    elif driver:
        lacks = "the GPUs that nvidia-smi sees: torch cannot open them"
        remedy = (
            "See what nvidia-smi says, unset CUDA_VISIBLE_DEVICES, and match the driver to CUDA "
            f"{torch.version.cuda}."
        )
    else:
        lacks = "NCCL, float8, FlexAttention's backward; ranks train on CPU with gloo, slowly"
        remedy = "None needed for small models: NGPU says how many CPU ranks to start."
    yield Finding(what="GPU", found="none", state=State.LIMITED, lacks=lacks, remedy=remedy)


def _collectives() -> Iterator[Finding]:
    gpus = torch.cuda.is_available()
    for name, there, needed in (
        ("gloo", dist.is_gloo_available(), not gpus),
        ("nccl", dist.is_nccl_available(), gpus),
    ):
        if there:
            yield Finding(what=name, found="available")
        elif needed:
            yield Finding(
                what=name,
                found="missing from this torch",
                state=State.BROKEN,
                lacks="collectives, so no rank can train",
                remedy="Install a torch from PyTorch's own wheels.",
            )


def _compiler() -> Iterator[Finding]:
    """What Inductor builds its kernels with: on a CPU all of them, on a GPU their launchers."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    compiler = shutil.which(name)
    header = Path(sysconfig.get_path("include"), "Python.h")
    works = compiler is not None and header.is_file()
    usable = [name for name, b in BACKENDS.items() if works or not b.needs_cpp_compiler]
    yield Finding(what="graph backends", found=", ".join(usable))
    lacks = 'compile.backend = "inductor"'
    if compiler is None:
        yield Finding(
            what="C++ compiler",
            found=f"no {name}",
            state=State.LIMITED,
            lacks=lacks,
            remedy="Install g++ (Debian and Ubuntu: apt install g++), set CXX, or keep "
            'compile.backend = "eager".',
        )
    else:
        yield Finding(what="C++ compiler", found=compiler)
    if not header.is_file():
        yield Finding(
            what="Python headers",
            found=f"no {header}",
            state=State.LIMITED,
            lacks=lacks,
            remedy="Install them (Debian and Ubuntu: apt install python3-dev), or keep "
            'compile.backend = "eager".',
        )


def _memory() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(what="cores", found=str(cores))
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    yield _space(
        "memory",
        free,
        total,
        LEAST_MEMORY,
        "two CPU ranks, which the system may kill",
        "End other programs, start fewer ranks (NGPU), or lower training.local_batch_size.",
    )
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        yield _space(
            "/dev/shm",
            usage.free,
            usage.total,
            LEAST_SHARED_MEMORY,
            "NCCL between GPUs of one machine, and workers of data loaders (bus error)",
            "Make it larger: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm.",
        )


def _folders() -> Iterator[Finding]:
    from graph_trainer.titan.data.cache import cache_dir

    for what, folder, remedy in (
        (
            "output folder",
            Path.cwd(),
            "Free space, or name another: --dump_folder /large/disk/run.",
        ),
        ("cache folder", cache_dir(), "Free space, or name another: GRAPH_TRAINER_CACHE=/folder."),
    ):
        there = next(each for each in (folder, *folder.parents) if each.is_dir())
        if not os.access(there, os.W_OK | os.X_OK):
            yield Finding(
                what=what,
                found=f"{folder} cannot be written",
                state=State.BROKEN,
                lacks="a run, which writes there",
                remedy=remedy,
            )
            continue
        usage = shutil.disk_usage(there)
        lacks = "saving checkpoints" if what == "output folder" else "keeping tokenizers"
        yield _space(what, usage.free, usage.total, LEAST_DISK, lacks, remedy)


def _network() -> Iterator[Finding]:
    try:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        yield Finding(what="port", found=f"localhost:{port} can be opened")
    except OSError as error:
        yield Finding(
            what="port",
            found=f"none on localhost: {error}",
            state=State.BROKEN,
            lacks="torchrun, whose ranks meet there",
            remedy="Let localhost resolve to 127.0.0.1 in /etc/hosts, and the loopback be up.",
        )
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if address.startswith("127.") or address == "no address":
        yield Finding(
            what="host name",
            found=f"{name} is {address}",
            state=State.LIMITED,
            lacks="several machines (NNODES): the others cannot reach this one by its name",
            remedy="Give the name its address in /etc/hosts, or set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the interface between them.",
        )
    else:
        yield Finding(what="host name", found=f"{name} is {address}")
    yield from _rendezvous()


def _rendezvous() -> Iterator[Finding]:
    """Where several machines meet, where RDZV_ENDPOINT names it."""
    endpoint = os.environ.get("RDZV_ENDPOINT")
    if endpoint is None:
        return
    host, _, port = endpoint.rpartition(":")
    try:
        socket.getaddrinfo(host, int(port))
        yield Finding(what="RDZV_ENDPOINT", found=f"{endpoint} resolves")
    except (OSError, ValueError, OverflowError) as error:
        yield Finding(
            what="RDZV_ENDPOINT",
            found=f"{endpoint}: {error}",
            state=State.BROKEN,
            lacks="training on several machines, which meet there",
            remedy="Set it to host:port of the machine with NODE_RANK=0, by a name or an address "
            "that every machine resolves.",
        )


def _space(what: str, free: int, total: int, least: int, lacks: str, remedy: str) -> Finding:
    found = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    if free >= least:
        return Finding(what=what, found=found)
    return Finding(what=what, found=found, state=State.LIMITED, lacks=lacks, remedy=remedy)
