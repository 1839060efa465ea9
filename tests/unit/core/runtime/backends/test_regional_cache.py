"""Ranks and launches share what the regional backend compiled."""

import errno
import fcntl
import logging
import threading

import pytest
import torch._inductor.config as inductor_config

import graph_trainer as gt
from graph_trainer.core.runtime.backends.regional import cache
from graph_trainer.core.runtime.backends.regional.cache import compile_all


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_two_processes_compile_different_programs_and_wait_for_each_other(folder):
    """Two threads with locks of their own, as two processes: each is in its first program when the
    other looks for one."""
    both = threading.Barrier(2, timeout=60)
    on_disk, compiled = set(), []

    def program(key, rank):
        def compile_one():
            if key in on_disk:
                return "cached"
            compiled.append((rank, key))
            if len(compiled) <= 2:
                both.wait()  # never ends if the other rank waits for this program
            on_disk.add(key)
            return "compiled"

        return compile_one

    results = [None, None]

    def rank(number):
        results[number] = compile_all({key: program(key, number) for key in "abc"})

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(key for _, key in compiled) == ["a", "b", "c"]
    assert {rank for rank, _ in compiled} == {0, 1}
    for key in "abc":
        assert sorted(result[key] for result in results) == ["cached", "compiled"]
    assert list(results[0]) == list("abc")


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(gt.ConfigError) as raised:
        compile_all({"key": lambda: None})
    for part in ("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"), "may write", '"eager"'):
        assert part in str(raised.value)


def test_a_folder_without_locks_is_refused(folder, monkeypatch):
    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(gt.ConfigError, match=r"TORCHINDUCTOR_CACHE_DIR.*No locks available"):
        compile_all({"key": lambda: None})


def test_ranks_without_a_cache_do_not_wait_for_each_other(folder, caplog):
    caplog.set_level(logging.INFO)
    with inductor_config.patch(fx_graph_cache=False):
        assert compile_all({"key": lambda: "compiled"}) == {"key": "compiled"}
    assert not list(folder.iterdir())
    assert "cache is off" in caplog.text


def test_a_damaged_file_is_removed_and_its_program_compiled_anew(folder, caplog):
    name = "c" + "ab2" * 17
    file = folder / "ab" / f"{name}.so"
    file.parent.mkdir()
    file.write_text("damaged")
    (folder / "ab" / "kept").write_text("")

    def compile_one():
        if file.exists():
            raise RuntimeError("cannot load") from ImportError(f"/somewhere/{name}.so: too short")
        return "compiled"

    assert compile_all({"key": compile_one}) == {"key": "compiled"}
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert str(file) in record.getMessage()
    assert (folder / "ab" / "kept").exists()


def test_an_error_that_is_no_damage_is_raised(folder):
    name = "c" + "ab2" * 17
    calls = []

    def compile_one():
        calls.append(1)
        raise RuntimeError(f"no lowering for {name}")

    with pytest.raises(RuntimeError, match="no lowering"):
        compile_all({"key": compile_one})
    assert len(calls) == 1
    assert cache._files_named(None, folder) == set()


LAUNCH = """
import logging, os, sys
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.getcwd()
import torch
from graph_trainer.testing import Builder
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
aten = torch.ops.aten
b = Builder()
x = b.input("x", 64, 40)
value = b.call(aten.add.Tensor, b.call(aten.sin.default, x), b.call(aten.cos.default, x))
from graph_trainer.core.runtime.backends.regional.regional import compile_graph
(loss,) = compile_graph(b.joint(b.total(value)))([torch.ones(64, 40)])
expected = 64 * 40 * (torch.tensor(1.0).sin() + torch.tensor(1.0).cos())
torch.testing.assert_close(loss, expected)
"""


@pytest.mark.full
def test_a_second_launch_compiles_nothing_and_damage_is_mended(folder, fresh):
    def launched():
        done = fresh("-c", LAUNCH, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "1 programs, 1 compiled and 0 from" in launched()
    assert f"1 programs, 0 compiled and 1 from {folder}" in launched()
    for pattern, replacement in (
        ("??/c*.py", b"x = '''"),
        ("??/c*.main.so", b"nonsense"),
    ):
        (damaged, *_) = (p for p in folder.glob(pattern) if p.is_file())
        damaged.write_bytes(replacement)
        said = launched()  # gives the right number
        assert "compiles anew" in said or "cache unable to load compiled graph" in said
