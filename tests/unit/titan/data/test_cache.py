"""Files built once: by one process only, whole or not at all."""

import multiprocessing
import time
from pathlib import Path

import pytest

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.cache import CorruptCacheError, cache_dir, load_or_build


def load(path: Path) -> str:
    text = path.read_text()
    if not text.endswith("whole"):
        raise CorruptCacheError("cut off")
    return text


def build(path: Path) -> None:
    path.write_text("whole")


def never(path: Path) -> None:
    raise AssertionError("built although it was there")


def get(path: Path, build=build) -> str:
    return load_or_build(path, load=load, build=build, what="the thing")


def test_built_once_then_read(tmp_path):
    path = tmp_path / "a" / "b"
    assert get(path) == "whole"
    assert get(path, never) == "whole"


def test_a_corrupt_file_is_built_again_and_said_so(tmp_path, caplog):
    path = tmp_path / "a"
    path.write_text("wh")
    assert get(path) == "whole"
    assert "the thing" in caplog.text and "corrupt (cut off)" in caplog.text
    assert get(path, never) == "whole"


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(path: Path) -> None:
        path.write_text("wh")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(tmp_path / "a", fail)
    assert [file.name for file in tmp_path.iterdir()] == ["a.lock"]
    assert get(tmp_path / "a") == "whole"


def test_nothing_stands_under_the_name_before_it_is_whole(tmp_path):
    def look(path: Path) -> None:
        path.write_text("wh")
        assert not (tmp_path / "a").exists()
        path.write_text("whole")

    assert get(tmp_path / "a", look) == "whole"


def _rank(folder: Path, barrier, results) -> None:
    def slow(path: Path) -> None:
        with open(folder / "builds", "a") as log:
            log.write("x")
        path.write_text("wh")
        time.sleep(0.3)
        path.write_text("whole")

    barrier.wait()
    results.put(get(folder / "a", slow))


def test_of_many_processes_one_builds(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(6), context.Queue()
    ranks = [context.Process(target=_rank, args=(tmp_path, barrier, results)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    assert [results.get(timeout=30) for _ in ranks] == ["whole"] * 6
    for rank in ranks:
        rank.join()
    assert (tmp_path / "builds").read_text() == "x"


def test_a_folder_that_cannot_be_written_names_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="GRAPH_TRAINER_CACHE"):
        get(tmp_path / "file" / "a")


def test_without_file_locks_each_process_builds_for_itself(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert get(tmp_path / "a") == "whole"
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
