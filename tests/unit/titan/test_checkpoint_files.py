"""A checkpoint appears complete or not at all, and later damage to its files is found."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from graph_trainer.titan.checkpoint_files import (
    HF_INDEX,
    SUMS,
    ManifestWriter,
    damage,
    empty,
    is_complete,
    sums_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA = "__0_0.distcp"


def save(
    folder: Path, step: int, value: float = 1.0, numel: int = 1000, verify: bool = True
) -> Path:
    """Save as CheckedCheckpointManager does."""
    final = folder / f"step-{step}"
    empty(final)
    state = {"weight": torch.full((numel,), value), "counters": {"step": step}}
    dcp.save(state, storage_writer=ManifestWriter(final, verify=verify))
    return final


def weight(checkpoint: Path, numel: int = 1000) -> torch.Tensor:
    """Load as a program without graph_trainer does."""
    state = {"weight": torch.zeros(numel)}
    dcp.load(state, checkpoint_id=checkpoint)
    return state["weight"]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def test_a_saved_checkpoint_is_whole_and_lists_its_digests(tmp_path: Path) -> None:
    saved = save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]
    assert damage(saved) == []
    expected = {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
        for path in saved.iterdir()
        if path.name != SUMS
    }
    assert sums_of(saved) == expected and len(expected) == 2
    command = ["sha256sum", "--check", "--strict", "--warn", SUMS]
    said = subprocess.run(command, cwd=saved, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [f"{name}: OK" for name in sorted(expected)]
    assert said.stderr == ""
    assert torch.equal(weight(saved), torch.ones(1000))


@pytest.mark.parametrize("harm", [flip_a_bit, cut, Path.unlink])
@pytest.mark.parametrize("name", [DATA, ".metadata"])
def test_damage_is_found_and_named(tmp_path: Path, name: str, harm: object) -> None:
    saved = save(tmp_path, 2)
    harm(saved / name)  # type: ignore[operator]
    (line,) = damage(saved)
    assert line.startswith(f"{name} is ")
    assert ("missing" in line) == (harm is Path.unlink)


def without_sizes(saved: Path) -> None:
    """As earlier versions wrote the list, and `sha256sum` writes it."""
    lines = (saved / SUMS).read_text().splitlines(keepends=True)
    (saved / SUMS).write_text("".join(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize(
    "text",
    ["", "abc  .metadata\n", "\xff", f"{'0' * 64}  {DATA}\n", f"{'0' * 64}  ../{DATA}\n", "# x"],
)
def test_a_damaged_list_is_damage(tmp_path: Path, text: str) -> None:
    saved = save(tmp_path, 2)
    (saved / SUMS).write_text(text, "latin-1")
    assert len(damage(saved)) == 1


@pytest.mark.parametrize("sizes", [True, False])
def test_a_list_cut_anywhere_is_damage(tmp_path: Path, sizes: bool) -> None:
    saved = save(tmp_path, 2)
    if not sizes:
        without_sizes(saved)
        assert damage(saved) == []
    flip_a_bit(saved / DATA)
    whole = (saved / SUMS).read_bytes()
    for end in range(0, len(whole) - 1, 7):
        (saved / SUMS).write_bytes(whole[:end])
        assert any(SUMS in line for line in damage(saved)), end
    (saved / SUMS).write_text("".join(whole.decode().splitlines(keepends=True)[:-1]))
    assert damage(saved, share=0, shares=2)


def test_sizes_are_compared(tmp_path: Path) -> None:
    saved = save(tmp_path, 2)
    size = (saved / DATA).stat().st_size
    text = (saved / SUMS).read_text()
    (saved / SUMS).write_text(text.replace(f"# {size} ", f"# {size + 7} "))
    changed = f"{DATA} is truncated or changed: {size:,} bytes instead of {size + 7:,}"
    assert damage(saved) == [changed]
    (saved / SUMS).write_text(text.replace(f"# {size} ", "# "))
    (line,) = damage(saved)
    assert line.startswith(f"{SUMS} is damaged")


def test_shares_are_the_whole_together(tmp_path: Path) -> None:
    saved = save(tmp_path, 2)
    for path in (saved / DATA, saved / ".metadata"):
        flip_a_bit(path)
    shares = [damage(saved, share=share, shares=3) for share in range(3)]
    assert sorted(sum(shares, [])) == sorted(damage(saved)) and len(damage(saved)) == 2


@pytest.mark.parametrize("case", ["torch's", "saved without", "loaded without"])
def test_without_digests_missing_and_short_files_are_found(tmp_path: Path, case: str) -> None:
    plain, verify = tmp_path / "step-2", case != "loaded without"
    if case == "torch's":
        dcp.save({"weight": torch.ones(1000)}, checkpoint_id=plain)
    else:
        save(tmp_path, 2, verify=not verify)
    assert (plain / SUMS).exists() == (not verify)
    assert torch.equal(weight(plain), torch.ones(1000))
    assert damage(plain, verify=verify) == []
    for name, harm, words in (
        (DATA, cut, f"{DATA} is truncated"),
        (DATA, Path.unlink, f"{DATA} is missing"),
        (".metadata", cut, ".metadata is damaged"),
        (".metadata", Path.unlink, ".metadata is missing"),
    ):
        harmed = tmp_path / "harmed"
        shutil.copytree(plain, harmed)
        harm(harmed / name)
        (line,) = damage(harmed, verify=verify)
        assert line.startswith(words)
        shutil.rmtree(harmed)
    flip_a_bit(plain / DATA)
    assert damage(plain, verify=verify) == []


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may grow beyond 100 kB. A write beyond fails in the kernel as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_and_the_last_checkpoint_stays(
    tmp_path: Path, full_disk: None
) -> None:
    for _ in range(2):  # the second time over what the first has left
        earlier = save(tmp_path, 2)
        with pytest.raises(dcp.CheckpointException) as caught:
            save(tmp_path, 4, numel=100_000)
        ((error, _),) = caught.value.failures.values()
        assert isinstance(error, OSError) and error.errno == errno.EFBIG
        assert error.filename == str(tmp_path / "step-4")
        assert is_complete(earlier) and damage(earlier) == []
        assert not is_complete(tmp_path / "step-4")


def test_a_writer_can_go_to_the_process_that_saves_asynchronously(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path / "step-2")
    dcp.save({"weight": torch.ones(8)}, storage_writer=pickle.loads(pickle.dumps(writer)))
    assert damage(tmp_path / "step-2") == [] and sums_of(tmp_path / "step-2")


def killed_in_save(folder: Path, at: int) -> tuple[int, int]:
    """Save step 4 over an older one in a process that ends at one of its accesses to files there,
    counted from 1: its exit status, and how many accesses it saw."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            is_file = event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove")
            if is_file and str(folder) in str(arguments[0]):
                seen += 1
                if seen == at:
                    os._exit(9)

        sys.addaudithook(hook)
        save(folder, 4, value=3.0)
        os.write(write, bytes([seen]))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return os.waitstatus_to_exitcode(status), ord(pipe.read(1) or b"\0")


@pytest.mark.parametrize("replaced", [False, True])
def test_killed_at_any_moment_of_a_save_a_complete_checkpoint_is_whole(
    tmp_path: Path, replaced: bool
) -> None:
    whole = tmp_path / "whole"
    if replaced:
        save(whole, 4)
    status, accesses = killed_in_save(whole, 0)
    assert status == 0 and accesses >= 5
    states = set()
    for at in range(1, accesses + 1):
        folder = tmp_path / f"killed-{at}"
        if replaced:
            save(folder, 4)
        assert killed_in_save(folder, at)[0] == 9
        complete = is_complete(folder / "step-4")
        states.add(complete)
        if complete:
            assert damage(folder / "step-4") == []
            assert (folder / "step-4" / SUMS).exists()
            (value,) = weight(folder / "step-4").unique()
            assert value == 1.0 and replaced  # nothing of this one is touched after its last file
    assert states == ({True, False} if replaced else {False})


@pytest.mark.parametrize("last", [".metadata", HF_INDEX])
def test_what_makes_a_checkpoint_complete_is_removed_first(
    tmp_path: Path, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / last).touch()
    (tmp_path / DATA).touch()
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: seen.append(is_complete(path)))
    assert is_complete(tmp_path)
    empty(tmp_path)
    assert seen == [False]
