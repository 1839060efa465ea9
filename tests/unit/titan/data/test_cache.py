"""Tables built once: by one process only, whole or not at all."""

import errno
import fcntl
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from datasets import Value

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.cache import Rows, cache_dir, load_or_build


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The cache folder."""
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def count_to_three() -> Rows:
    for number in range(3):
        yield {"number": number}
    return "3 0 2"


def never() -> Rows:
    raise AssertionError("built although it was there")


def digest(table) -> str:
    numbers = table["number"].to_pylist()
    return f"{len(numbers)} {numbers[0]} {numbers[-1]}"


def load(rows: Callable[[], Rows] = count_to_three, key: str | None = "key") -> list[int]:
    columns = {"number": Value("int32")}
    table, found = load_or_build("numbers", key, columns=columns, rows=rows, digest=digest)
    assert found == "3 0 2"
    return table["number"].to_pylist()


def test_a_table_is_built_once_and_again_for_another_key():
    assert load() == load(never) == [0, 1, 2]
    with pytest.raises(AssertionError, match="although"):
        load(never, "another key")


def test_without_a_key_nothing_is_kept(folder):
    assert load(key=None) == load(key=None) == [0, 1, 2]
    assert not folder.exists()


DAMAGE = {
    "cut": lambda data: data[:-100],
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "a wrong head": lambda data: b"x" + data[1:],
    "a wrong value": lambda data: data.replace(b"\2\0\0\0", b"\7\0\0\0").replace(b"3 0", b"3 1"),
}


@pytest.mark.parametrize("name", ["numbers-numbers.arrow", "dataset_info.json"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_built_again_and_the_log_says_so(folder, name, damage, caplog):
    load()
    (file,) = folder.rglob(name)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    assert load() == [0, 1, 2]
    assert "the numbers in" in caplog.text and "corrupt" in caplog.text
    assert load(never) == [0, 1, 2]


def test_a_lost_file_is_built_again(folder):
    load()
    (file,) = folder.rglob("*.arrow")
    file.unlink()
    assert load() == load(never) == [0, 1, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError("line 3 is bad")])
def test_a_failed_build_keeps_its_error_and_leaves_nothing(folder, error):
    def fail() -> Rows:
        yield {"number": 0}
        assert not list(folder.rglob("numbers-numbers.arrow")), "visible before it is complete"
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)) as caught:
        load(fail)
    assert caught.value is error or isinstance(error, type)
    assert not list(folder.rglob("*.arrow"))
    assert load() == [0, 1, 2]


def _slow(log: Path) -> Rows:
    with log.open("a") as file:
        file.write("x")
    yield {"number": 0}
    time.sleep(0.3)
    yield from ({"number": number} for number in (1, 2))
    return "3 0 2"


def _rank(log: Path, barrier, results) -> None:
    barrier.wait()
    results.put(load(partial(_slow, log)))


def test_of_many_processes_one_builds(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(6), context.Queue()
    log = tmp_path / "builds"
    ranks = [context.Process(target=_rank, args=(log, barrier, results)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    assert [results.get(timeout=30) for _ in ranks] == [[0, 1, 2]] * 6
    for rank in ranks:
        rank.join()
    assert log.read_text() == "x"


def test_a_folder_that_cannot_be_written_names_the_remedy(folder):
    folder.write_text("")
    with pytest.raises(ConfigError, match="GRAPH_TRAINER_CACHE"):
        load()


def test_without_file_locks_each_process_builds_for_itself(folder, monkeypatch, caplog):
    flock = fcntl.flock

    def no_locks(descriptor: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder)):
            raise OSError(errno.ENOLCK, "no locks here")
        flock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert load() == [0, 1, 2]
    assert "no locks here" in caplog.text


def test_the_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("GRAPH_TRAINER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/someone/.cache/graph_trainer")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert cache_dir() == Path("/var/xdg/graph_trainer")
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", "~/own")
    assert cache_dir() == Path("/home/someone/own")
