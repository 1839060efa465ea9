"""What a step of a rank may need, as its device tells: free memory, containers, ranks, reserves;
and what it takes of a CPU's."""

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from graph_trainer.core.units import GIB
from graph_trainer.testing import Builder
from graph_trainer.titan import device, device_memory
from graph_trainer.titan.device_memory import MemoryOfRun, available_on_cpu, logger

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """One with 16 GiB available, in no container, for one rank."""
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GIB, total=24 * GIB)
    )
    monkeypatch.setattr(device_memory, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(device_memory, "_OF_PROCESS", tmp_path / "of_process")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


@pytest.fixture
def joint():
    """Reads a parameter and a batch of 1 MiB each."""
    b = Builder()
    weight, x = b.parameter("weight", 512, 512), b.input("x", 512, 512)
    return b.joint(b.call(aten.sum.default, b.call(aten.mul.Tensor, weight, x)))


def memory(joint, device=CPU, parameters=(), optimizers=()):
    return MemoryOfRun(device, parameters, optimizers)(joint)


def group(root, path="", version=2, **files):
    """Make a control group's files; sizes in GiB."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    for name, key in zip(names, ("limit", "usage"), strict=True):
        value = files[key]
        (folder / f"memory.{name}").write_text(f"{value if value == 'max' else value * GIB}\n")
    prefix = "" if version == 2 else "total_"
    parts = {"inactive_file": files["cached"] / 2, "active_file": files["cached"] / 2}
    lines = [f"{prefix}{name} {int(gib * GIB)}" for name, gib in parts.items()]
    (folder / "memory.stat").write_text("\n".join(["anon 5", *lines]) + "\n")


def test_the_ranks_of_a_machine_share_what_is_available(machine, joint):
    found = memory(joint)
    held = 2 * 2**20  # parameter and batch: predicted, and there already
    assert found.bytes == 16 * GIB + held
    machine.setenv("LOCAL_WORLD_SIZE", "4")
    found = memory(joint)
    assert found.bytes == 4 * GIB + held
    assert found.source.startswith("16.00 GiB available on this machine / 4 ranks, plus 0.00195")


def test_what_the_run_has_allocated_already_is_not_counted_twice(machine, joint):
    weight = nn.Parameter(torch.zeros(1024))
    optimizer = torch.optim.AdamW([weight])
    before = memory(joint, parameters=[weight], optimizers=[optimizer]).bytes
    weight.grad = torch.zeros(1024)
    assert memory(joint, parameters=[weight], optimizers=[optimizer]).bytes == before + 4096
    optimizer.step()
    now = memory(joint, parameters=[weight], optimizers=[optimizer]).bytes
    assert now - before == 3 * 4096 + 4  # two moments, and the number of steps


def test_a_container_may_leave_less(machine, tmp_path):
    root, of_process = tmp_path / "groups", tmp_path / "of_process"
    assert available_on_cpu() == (16 * GIB, "on this machine")  # no such files
    of_process.write_text("0::/\n")
    group(root, limit="max", usage=3, cached=1)
    assert available_on_cpu() == (16 * GIB, "on this machine")
    group(root, limit=8, usage=3, cached=1)
    assert available_on_cpu() == (6 * GIB, "in this container")
    # the limits above this group's count as well, and where its path is the host's, the root does
    group(root, "a/b", limit=7, usage=2, cached=0)
    for path, left in (("/a/b", 5), ("/a/b/c", 5), ("/a", 6), ("/elsewhere", 6)):
        of_process.write_text(f"0::{path}\n")
        assert available_on_cpu() == (left * GIB, "in this container"), path
    of_process.write_text("7:blkio:/x\n4:memory:/x\n0::/\n")
    group(root, limit="max", usage=3, cached=1)
    group(root / "memory", "x", 1, limit=5, usage=4, cached=1)
    assert available_on_cpu() == (2 * GIB, "in this container")
    group(root / "memory", "x", 1, limit=5, usage=6, cached=0)
    assert available_on_cpu() == (0, "in this container")


def test_a_gpu_has_what_is_free_and_what_the_allocator_keeps(machine, joint):
    machine.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))
    machine.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    machine.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    found = memory(joint, torch.device("cuda", 0))
    assert found.bytes == 42 * GIB + 2 * 2**20
    assert found.source.startswith("42.00 GiB free on the GPU, plus 0.00195")


def test_a_run_is_told_once(machine, joint):
    run = MemoryOfRun(CPU, [], [])
    first = run(joint)
    machine.setattr(psutil, "virtual_memory", lambda: pytest.fail("asked again"))
    assert run(joint) is first


def fails(*args):
    raise RuntimeError("no such query")


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_a_device_that_tells_nothing(machine, joint, device):
    machine.setattr(psutil, "virtual_memory", fails)
    machine.setattr(torch.cuda, "mem_get_info", fails)
    said = []
    machine.setattr(logger, "warning", said.append)
    run = MemoryOfRun(torch.device(device), [], [])
    assert run(joint) is None and run(joint) is None
    (line,) = said
    assert (
        f"compile.memory_limit_gib is unset, and it is unknown how much memory '{device}'" in line
    )
    assert "Set compile.memory_limit_gib to" in line


def test_host_memory_is_shared_by_the_ranks_and_asked_for_once(machine, joint):
    machine.setenv("LOCAL_WORLD_SIZE", "4")
    run = MemoryOfRun(torch.device("cuda"), [], [])
    found = run.on_host(joint)
    assert (
        found.bytes == 4 * GIB and "16.00 GiB available on this machine / 4 ranks" in found.source
    )
    machine.setenv("LOCAL_WORLD_SIZE", "8")
    assert run.on_host(joint) is found, "by then copies are there"


def test_host_memory_may_be_unknown(machine, joint):
    def fails():
        raise OSError

    machine.setattr(psutil, "virtual_memory", fails)
    assert MemoryOfRun(CPU, [], []).on_host(joint) is None


def test_memory_that_was_freed_before_does_not_hide_what_is_taken():
    def take():
        """Take 48 MiB in pieces, and free all but the last: the allocator keeps the others."""
        return [torch.ones(2**14) for _ in range(768)][-1]

    kept = [take()]
    for _ in range(2):
        with device.resident_growth() as growth:
            kept.append(take())
        if sys.platform != "linux":  # which alone tells a peak of resident memory
            assert growth == []
            continue
        (num_bytes,) = growth
        assert 46 * 2**20 < num_bytes < 60 * 2**20


def test_a_system_that_tells_no_peak(monkeypatch):
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: SimpleNamespace())
    with device.resident_growth() as growth:
        pass
    assert growth == []
