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
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from graph_trainer.titan import checkpoint_files
from graph_trainer.titan.checkpoint_files import (
    SUMS,
    PublishingWriter,
    clean,
    damage,
    publish,
    sums_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA = "__0_0.distcp"


def save(
    folder: Path, step: int, value: float = 1.0, numel: int = 1000, verify: bool = True
) -> Path:
    final = folder / f"step-{step}"
    state = {"weight": torch.full((numel,), value), "counters": {"step": step}}
    writer = PublishingWriter(folder / f"writing-{step}", publish_as=final, verify=verify)
    dcp.save(state, storage_writer=writer)
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
@pytest.mark.parametrize("harm", [None, flip_a_bit, cut, Path.unlink])
def test_a_list_cut_anywhere_is_damage(tmp_path: Path, harm: object, sizes: bool) -> None:
    saved = save(tmp_path, 2)
    if not sizes:
        without_sizes(saved)
        assert damage(saved) == []
    if harm:
        harm(saved / DATA)  # type: ignore[operator]
    whole = (saved / SUMS).read_bytes()
    for end in range(0, len(whole) - 1, 7):
        (saved / SUMS).write_bytes(whole[:end])
        assert any(SUMS in line for line in damage(saved)), end
    (saved / SUMS).write_text("".join(whole.decode().splitlines(keepends=True)[:-1]))
    assert damage(saved, share=0, shares=2)


def test_a_size_is_compared_before_the_digest(tmp_path: Path) -> None:
    saved = save(tmp_path, 2)
    size = (saved / DATA).stat().st_size
    cut(saved / DATA)
    (line,) = damage(saved)
    assert line == f"{DATA} is truncated or changed: {size - 7:,} bytes instead of {size:,}"


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
        (".metadata", cut, ".metadata cannot be read"),
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_large_is_hashed_on_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    hashed: list[tuple[threading.Thread, int]] = []

    class Sha256:
        def __init__(self) -> None:
            self.real = hashlib.sha256()
            self.hexdigest = self.real.hexdigest

        def update(self, data: bytes) -> None:
            hashed.append((threading.current_thread(), memoryview(data).nbytes))
            self.real.update(data)

    fake = types.SimpleNamespace(sha256=Sha256, file_digest=hashlib.file_digest)
    monkeypatch.setattr(checkpoint_files, "hashlib", fake)
    state = {"weight": torch.ones(100_000)}
    writer = PublishingWriter(tmp_path / "writing-2", publish_as=tmp_path / "step-2")
    if asynchronous:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dcp.async_save(state, storage_writer=writer).result()  # type: ignore[union-attr]
    else:
        dcp.save(state, storage_writer=writer)
    assert damage(tmp_path / "step-2") == []
    training = sum(size for thread, size in hashed if thread is threading.main_thread())
    assert training == 0 if asynchronous else training < 20_000
    assert sum(size for _, size in hashed) > 400_000


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
        assert error.filename == str(tmp_path / "writing-4")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "writing-4"]
        assert damage(earlier) == []


def test_what_a_killed_run_left_does_not_get_into_a_checkpoint(tmp_path: Path) -> None:
    left = tmp_path / "writing-2"
    left.mkdir()
    (left / "__7_0.distcp").write_text("of a run on eight ranks")
    saved = save(tmp_path, 2)
    assert sorted(p.name for p in saved.iterdir()) == [".metadata", SUMS, DATA]


def test_a_writer_can_go_to_the_process_that_saves_asynchronously(tmp_path: Path) -> None:
    writer = PublishingWriter(tmp_path / "writing-2", publish_as=tmp_path / "step-2")
    dcp.save({"weight": torch.ones(8)}, storage_writer=pickle.loads(pickle.dumps(writer)))
    assert damage(tmp_path / "step-2") == [] and sums_of(tmp_path / "step-2") is not None


def killed_in_save(folder: Path, at: int) -> tuple[int, int]:
    """Save step 2 over an older one and then step 4 in a process that ends at one of its accesses
    to files there, counted from 1: its exit status, and how many accesses it saw."""
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
        for step in (2, 4):
            save(folder, step, value=3.0)
        os.write(write, bytes([seen]))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return os.waitstatus_to_exitcode(status), ord(pipe.read(1) or b"\0")


def test_a_kill_at_ten_moments_of_saving_leaves_whole_checkpoints(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    save(whole, 2)
    status, accesses = killed_in_save(whole, 0)
    assert status == 0 and accesses >= 10
    moments = sorted({1 + i * (accesses - 1) // 9 for i in range(10)})
    assert len(moments) == 10
    for at in moments:
        folder = tmp_path / f"killed-{at}"
        save(folder, 2)
        assert killed_in_save(folder, at)[0] == 9
        clean(folder)
        found = {path.name: weight(path) for path in folder.iterdir()}
        assert "step-2" in found and found.keys() <= {"step-2", "step-4"}, (at, [*found])
        for name, value in found.items():
            assert damage(folder / name) == []
            assert len(value.unique()) == 1 and value[0] in (
                (1.0, 3.0) if name == "step-2" else (3.0,)
            )


def test_a_checkpoint_replaces_an_earlier_one_of_its_step(tmp_path: Path) -> None:
    save(tmp_path, 2, value=1.0)
    saved = save(tmp_path, 2, value=3.0)
    assert torch.equal(weight(saved), torch.full((1000,), 3.0))
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


def test_the_name_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment of the renaming every file is there and right."""
    seen = []

    def look(written: Path, name: Path) -> None:
        seen.append((damage(written), sorted(p.name for p in written.iterdir()), name.exists()))
        publish(written, name)

    monkeypatch.setattr(checkpoint_files, "publish", look)
    save(tmp_path, 2)
    assert seen == [([], [".metadata", SUMS, DATA], False)]


def test_what_killed_runs_left_is_removed_and_a_replaced_checkpoint_comes_back(
    tmp_path: Path,
) -> None:
    for name in ("step-2", "step-6", "writing-6", "replaced-2", "replaced-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "whose").write_text(name)
    clean(tmp_path)
    left = {path.name: (path / "whose").read_text() for path in tmp_path.iterdir()}
    assert left == {"step-2": "step-2", "step-4": "replaced-4", "step-6": "step-6"}
