"""Tables built once: by one process only, whole or not at all."""

import errno
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Value

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.tokenizer import load_or_build

Rows = Iterator[dict[str, Any]]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The cache folder."""
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def count_to_three() -> Rows:
    for number in range(3):
        yield {"number": number}


def never() -> Rows:
    raise AssertionError("built although it was there")


def load(rows: Callable[[], Rows] = count_to_three, key: str = "key") -> list[int]:
    return load_or_build("numbers", key, {"number": Value("int32")}, rows)["number"].to_pylist()


def test_a_table_is_built_once_and_again_for_another_key():
    assert load() == load(never) == [0, 1, 2]
    with pytest.raises(AssertionError, match="although"):
        load(never, "another key")


@pytest.mark.parametrize("name", ["numbers-numbers.arrow", "dataset_info.json"])
def test_a_damaged_file_names_the_remedy(folder, name):
    load()
    (file,) = folder.rglob(name)
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], bytes(len(whole))):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"remove {folder / 'numbers'} if a file in it"):
            load(never)
    shutil.rmtree(folder / "numbers")
    assert load() == [0, 1, 2]


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


def full() -> Rows:
    yield {"number": 0}
    raise OSError(errno.ENOSPC, "No space left")


def test_a_folder_that_cannot_be_written_names_the_remedy(folder):
    with pytest.raises(ConfigError, match="No space left.*GRAPH_TRAINER_CACHE"):
        load(full)
    shutil.rmtree(folder)
    folder.write_text("")
    with pytest.raises(ConfigError, match="GRAPH_TRAINER_CACHE"):
        load()


def test_without_a_folder_of_ours_it_is_that_of_datasets(tmp_path, monkeypatch):
    monkeypatch.delenv("GRAPH_TRAINER_CACHE")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "theirs")
    assert load() == [0, 1, 2]
    assert list((tmp_path / "theirs" / "numbers").rglob("*.arrow"))
