"""What torchtitan needs and this torch or this machine lacks: a CPU device module, time-outs.

torchtitan binds its device type and module when torchtitan.tools.utils is imported, to CUDA where
it finds no accelerator. `setup` binds both to the CPU there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist

from graph_trainer.core.runtime.backends.registry import (
    COMPILER_REMEDY,
    find_backend,
    missing_compiler,
)
from graph_trainer.core.sharding.ordered_gloo import cpu_backend
from graph_trainer.core.sharding.process_groups import groups_made
from graph_trainer.core.torch_private_groups import set_process_group_timeout
from graph_trainer.errors import ConfigError


def setup() -> None:
    """Bind torchtitan to the CPU where there is no accelerator; elsewhere do nothing.

    Modules that torchtitan has imported before, as `python -m torchtitan.train` does, have names of
    their own for what utils binds.
    """
    if torch.accelerator.is_available():
        return
    from torchtitan.tools import utils

    if utils.device_type == "cpu":
        return
    to_cpu = {"device_type": "cpu", "device_module": _cpu_module()}
    bound = {name: getattr(utils, name) for name in to_cpu}
    for module in [m for name, m in sys.modules.items() if name.startswith("torchtitan.")]:
        for name, value in to_cpu.items():
            if getattr(module, name, None) is bound[name]:
                setattr(module, name, value)


def own_cpu_backend() -> contextlib.AbstractContextManager[Any]:
    """Inside, torchtitan lets CPU ranks talk by `cpu_backend`.

    It takes the backend of a device from a table of torch, which has gloo for the CPU.
    """
    return patch.dict(dist.Backend.default_device_backend_map, cpu=cpu_backend())


def check_compiler(backend: str) -> None:
    """Refuse a backend that compiles for the CPU where there is no compiler.

    Raises:
        ConfigError: there is no C++ compiler, or no header of Python.
    """
    if find_backend(backend).needs_cpp_compiler and (missing := missing_compiler()):
        raise ConfigError(
            f'compile.backend = "{backend}": it builds kernels for the CPU, and there is no '
            f'{missing}. {COMPILER_REMEDY}, or set compile.backend = "eager".'
        )


def _cpu_module() -> ModuleType:
    module = ModuleType("graph_trainer_cpu")
    module.__dict__.update(
        {name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
        set_device=lambda device: None,
        current_device=lambda: 0,
        # one for each rank of the machine: torchtitan compares LOCAL_RANK with it
        device_count=lambda: max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        get_device_name=lambda device=None: platform.processor() or platform.machine(),
        get_device_properties=lambda device=None: SimpleNamespace(
            total_memory=psutil.virtual_memory().total
        ),
        memory_stats=_memory_stats,
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
    )
    return module


def _memory_stats(device: Any = None) -> dict[str, int]:
    """Return the process's resident memory under the names of CUDA's allocator, in bytes.

    The CPU allocator keeps no statistics; resident memory is what a machine has too little of.
    Its peak counts from the start of the process, or from the latest `resident_growth` on.
    """
    import resource

    resident = psutil.Process().memory_info().rss
    unit = 1 if sys.platform == "darwin" else 1024  # kilobytes on Linux, bytes on macOS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "active_bytes.all.peak": resident,
        "reserved_bytes.all.peak": max(resident, peak),
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


@contextlib.contextmanager
def resident_growth() -> Iterator[list[int]]:
    """While entered: measure how many bytes of resident memory the process takes at its peak.

    Everything counts, of any thread: tensors, the allocator's gaps, Python's objects. Memory that
    was freed before does not hide it, because the allocator gives that back first.

    Yields:
        a list that gets the bytes at the end; none but on Linux with glibc.
    """
    growth: list[int] = []
    before = 0
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
        before = _peak_resident()
    yield growth
    if before:
        growth.append(_peak_resident() - before)


def _peak_resident() -> int:
    line = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(line[1]) * 1024 if line else 0


@contextlib.contextmanager
def process_group_timeouts() -> Iterator[None]:
    """Let torchtitan shorten time-outs after the first step, also of groups that passes made.

    torchtitan 0.3.0 calls torch.distributed.set_timeout, which torch 2.13 does not have yet, for
    the groups of its meshes and then for the group of all ranks, None.
    """
    set_one = getattr(dist, "set_timeout", set_process_group_timeout)

    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        for process_group in (group, *(groups_made() if group is None else ())):
            set_one(timeout, process_group)

    with patch.object(dist, "set_timeout", set_timeout, create=True):
        yield
