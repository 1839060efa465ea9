"""What this machine has, and what will not work on it.

Facts about the machine come from torch.utils.collect_env where it has them; what they mean for
training, and what to do about them, is ours.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from rich.console import Group
from rich.text import Text
from torch.utils import collect_env

from graph_trainer.cli.launcher import usable_cores
from graph_trainer.core.runtime.backends.registry import BACKENDS
from graph_trainer.core.simulation.detect import HARDWARE_KEY, detect_hardware
from graph_trainer.core.simulation.hardware import known_hardware
from graph_trainer.core.units import GIB
from graph_trainer.errors import ConfigError
from graph_trainer.planner.console import plain_table, print_table

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


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was looked at, and what was found."""

    what: str
    found: str
    state: State = State.OK
    lacks: str = ""
    """What does not work for it; empty where all is well."""
    remedy: str = ""
    """What to do about it."""


def main(argv: Sequence[str]) -> int:
    """Print what this machine has and lacks; 1 where something keeps it from training.

    Raises:
        ConfigError: there are words, and the command takes none.
    """
    if argv:
        raise ConfigError(f"command line: doctor takes no arguments, found {' '.join(argv)}.")
    findings = examine()
    print_table(report(findings))
    return int(any(each.state is State.BROKEN for each in findings))


def examine() -> list[Finding]:
    """Examine the machine without changing it; takes a few seconds."""
    facts = collect_env.get_env_info()
    checks = (
        _system(facts),
        _packages(),
        _devices(facts),
        _collectives(),
        _compiler(),
        _memory(),
        _folders(),
        _network(),
    )
    return [finding for check in checks for finding in check]


def report(findings: list[Finding]) -> Group:
    """Make a table of the findings, and one of what will not work and its remedies."""
    table = plain_table("This machine")
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("state", no_wrap=True)
    for each in findings:
        table.add_row(each.what, Text(each.found), each.state.value)
    bad = [each for each in findings if each.state is not State.OK]
    if not bad:
        return Group(table, Text("Everything works here."))
    lacking = plain_table("What will not work here, and what to do")
    lacking.add_column("what", no_wrap=True)
    lacking.add_column("does not work", overflow="fold", ratio=2)
    lacking.add_column("remedy", overflow="fold", ratio=3)
    for each in bad:
        lacking.add_row(each.what, Text(each.lacks), Text(each.remedy))
    return Group(table, lacking)


def _judge(works: bool, what: str, found: str, state: State, lacks: str, remedy: str) -> Finding:
    """Make a finding that is OK where it works, and else what is given."""
    return Finding(what, found, state, lacks, remedy) if not works else Finding(what, found)


def _system(facts: collect_env.SystemEnv) -> Iterator[Finding]:
    yield _judge(
        facts.python_platform.startswith("Linux"),
        "system",
        f"{facts.os}, {facts.python_platform}",
        State.LIMITED,
        "torchtitan, which imports triton: there is none for this system",
        "Train on Linux; elsewhere the core works (import graph_trainer).",
    )
    yield Finding("python", f"{facts.python_version}, {sys.executable}")


def _packages() -> Iterator[Finding]:
    """Compare the version of every required package with the range that we ask for."""
    try:
        requirements = importlib.metadata.requires("graph_trainer") or []
        yield Finding("graph_trainer", importlib.metadata.version("graph_trainer"))
    except importlib.metadata.PackageNotFoundError:
        requirements = []
        yield Finding(
            "graph_trainer",
            f"not installed, read from {Path(__file__).parents[1]}",
            State.LIMITED,
            "the command graph-trainer, and the versions below are not checked",
            "Install it: pip install -c constraints.txt -e . in the checkout.",
        )
    for need in map(Requirement, requirements):
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        remedy = f"pip install '{need.name}{need.specifier}'"
        try:
            found = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            lacks = "training: graph_trainer and torchtitan import it"
            yield Finding(need.name, "missing", State.BROKEN, lacks, remedy)
        else:
            fits = need.specifier.contains(found, prereleases=True)
            lacks = f"training, which is written for {need.specifier}"
            yield _judge(fits, need.name, found, State.BROKEN, lacks, remedy)


def _devices(facts: collect_env.SystemEnv) -> Iterator[Finding]:
    for what, version in (
        ("NVIDIA driver", facts.nvidia_driver_version),
        ("CUDA of torch", facts.cuda_compiled_version),
        ("cuDNN", facts.cudnn_version),
    ):
        if version:
            yield Finding(what, version)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / GIB:.0f} GiB"
            yield Finding(f"GPU {index}", f"{properties.name}, {memory}")
        yield _profile()
        return
    yield _profile()
    # Not the driver's version: nvidia-smi may be there and fail.
    if shutil.which("nvidia-smi") is None:
        lacks = "NCCL, float8, FlexAttention's backward; ranks train on CPU with gloo, slowly"
        remedy = "None needed for small models: NGPU says how many CPU ranks to start."
    elif facts.cuda_compiled_version is None:
        lacks = "the GPUs that nvidia-smi sees: this torch is a build for CPUs"
        remedy = "Install a CUDA build: pip install torch without an extra index for CPU wheels."
    else:
        lacks = "the GPUs that nvidia-smi sees: torch cannot open them"
        remedy = (
            "See what nvidia-smi says, unset CUDA_VISIBLE_DEVICES, and match the driver to CUDA "
            f"{facts.cuda_compiled_version}."
        )
    yield Finding("GPU", "none", State.LIMITED, lacks, remedy)


def _profile() -> Finding:
    """Find what passes that decide by simulation take for this machine."""
    found = detect_hardware()
    return _judge(
        found.exact,
        "hardware profile",
        found.hardware.name,
        State.LIMITED,
        f"simulating this machine: passes decide as for {found.why.partition(':')[0]}",
        f"Set {HARDWARE_KEY} to one of {', '.join(known_hardware())}, or to the path of a copy of "
        "one with this machine's figures.",
    )


def _collectives() -> Iterator[Finding]:
    gpus = torch.cuda.is_available()
    for name, there, needed in (
        ("gloo", dist.is_gloo_available(), not gpus),
        ("nccl", dist.is_nccl_available(), gpus),
    ):
        if there or needed:
            yield _judge(
                there,
                name,
                "available" if there else "missing from this torch",
                State.BROKEN,
                "collectives, so no rank can train",
                "Install a torch from PyTorch's own wheels.",
            )


def _compiler() -> Iterator[Finding]:
    """Find what Inductor builds its kernels with: on a CPU all of them, on a GPU their launchers.

    collect_env knows gcc's version alone, and not CXX, g++ or the headers of Python.
    """
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    compiler = shutil.which(name)
    header = Path(sysconfig.get_path("include"), "Python.h")
    works = compiler is not None and header.is_file()
    needing = [name for name, b in BACKENDS.items() if b.needs_cpp_compiler]
    usable = [name for name in BACKENDS if works or name not in needing]
    yield Finding("graph backends", ", ".join(usable))
    lacks = ", ".join(f'compile.backend = "{name}"' for name in needing)
    yield _judge(
        compiler is not None,
        "C++ compiler",
        compiler or f"no {name}",
        State.LIMITED,
        lacks,
        "Install g++ (Debian and Ubuntu: apt install g++), set CXX, or keep "
        'compile.backend = "eager".',
    )
    yield _judge(
        header.is_file(),
        "Python headers",
        str(header) if header.is_file() else f"no {header}",
        State.LIMITED,
        lacks,
        "Install them (Debian and Ubuntu: apt install python3-dev), or keep "
        'compile.backend = "eager".',
    )


def _memory() -> Iterator[Finding]:
    yield Finding("cores", str(usable_cores()))
    memory = psutil.virtual_memory()
    yield _space(
        "memory",
        memory.available,
        memory.total,
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
    remedy = "Free space, or name another: --dump_folder /large/disk/run."
    yield _folder("output folder", Path.cwd(), "saving checkpoints", remedy)
    try:
        from graph_trainer.titan.data.cache import cache_dir
    except ImportError:  # torchtitan is missing or broken, which a row above says
        return
    remedy = "Free space, or name another: GRAPH_TRAINER_CACHE=/folder."
    yield _folder("cache folder", cache_dir(), "keeping tokenizers", remedy)


def _folder(what: str, folder: Path, lacks: str, remedy: str) -> Finding:
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        found, lacks = f"{folder} cannot be written", "a run, which writes there"
        return Finding(what, found, State.BROKEN, lacks, remedy)
    usage = shutil.disk_usage(there)
    return _space(what, usage.free, usage.total, LEAST_DISK, lacks, remedy)


def _space(what: str, free: int, total: int, least: int, lacks: str, remedy: str) -> Finding:
    found = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    return _judge(free >= least, what, found, State.LIMITED, lacks, remedy)


def _network() -> Iterator[Finding]:
    try:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        yield Finding("port", f"localhost:{port} can be opened")
    except OSError as error:
        yield Finding(
            "port",
            f"none on localhost: {error}",
            State.BROKEN,
            "torchrun, whose ranks meet there",
            "Let localhost resolve to 127.0.0.1 in /etc/hosts, and the loopback be up.",
        )
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    yield _judge(
        not address.startswith("127.") and address != "no address",
        "host name",
        f"{name} is {address}",
        State.LIMITED,
        "several machines (NNODES): the others cannot reach this one by its name",
        "Give the name its address in /etc/hosts, or set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME to the interface between them.",
    )
    yield from _rendezvous()


def _rendezvous() -> Iterator[Finding]:
    """Look up the rendezvous of several machines, where RDZV_ENDPOINT names it."""
    endpoint = os.environ.get("RDZV_ENDPOINT")
    if endpoint is None:
        return
    host, _, port = endpoint.rpartition(":")
    try:
        socket.getaddrinfo(host, int(port))
        yield Finding("RDZV_ENDPOINT", f"{endpoint} resolves")
    except (OSError, ValueError, OverflowError) as error:
        yield Finding(
            "RDZV_ENDPOINT",
            f"{endpoint}: {error}",
            State.BROKEN,
            "training on several machines, which meet there",
            "Set it to host:port of the machine with NODE_RANK=0, by a name or an address "
            "that every machine resolves.",
        )
