"""A step that an earlier call captured gives the same plan, and a bad cache gives a capture."""

import functools
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch

from graph_trainer.core.capture.fake_mode import fake_mode
from graph_trainer.core.graph.serialize import _UNREAD, graph_from_bytes, graph_to_bytes
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.planner import capture_cache
from graph_trainer.planner.capture_cache import CaptureCache, default_folder, key_of
from graph_trainer.planner.captures import Captures, what_is_captured
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.plan import make_plan
from graph_trainer.testing import code
from graph_trainer.titan.config.load import load_config
from tests.unit.planner.test_captures import (
    BEFORE,
    BEHIND,
    config_of,
    report,
    step_of,
)

HARDWARE = load_hardware("h100-sxm")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "captures"


@pytest.fixture
def warnings(monkeypatch):
    """The warnings so far."""
    said = []

    def warning(line, *more):
        if line.startswith("warning: cache of captured steps:"):
            said.append(line)

    monkeypatch.setattr(capture_cache.logger, "warning", warning)
    return said


def read_or_captured(folder, *change, **more):
    """The step that a call has which finds the cache in a folder, as text."""
    return code(step_of(Captures(cache=CaptureCache(folder)), *change, **more))


MESHES = {
    "fsdp": (),
    "hsdp_tp": ("--parallelism.data_parallel_replicate_degree", "2")
    + ("--parallelism.tensor_parallel_degree", "2"),
    "cp": ("--parallelism.context_parallel_degree", "2"),
    "uneven": ("--parallelism.data_parallel_shard_degree", "7"),
    "ddp": ("--parallelism.data_parallel_replicate_degree", "8")
    + ("--parallelism.data_parallel_shard_degree", "1"),
    "qwen3": ("--module", "graph_trainer.qwen3", "--parallelism.tensor_parallel_degree", "2"),
    "chunked": ("--loss.type", "chunked_cross_entropy"),
    "like": ("--activation_checkpoint.type", "full"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_that_was_read_is_planned_as_one_that_is_captured(mesh, folder, captured):
    world = 7 if mesh == "uneven" else 8
    said = []

    def plan(captures, *more):
        config = load_config(["--training.seq_len", "64", *MESHES[mesh], *more], world_size=world)
        config.model_spec.model.layers = config.model_spec.model.layers[:1]
        given = (config, world, HARDWARE)
        return report(
            make_plan(*given, captures=captures, every_pass=False, on_progress=said.append)
        )

    of_this_call = Captures(cache=CaptureCache(folder))
    always = ("--parallelism.fsdp_reshard_after_forward", "always")
    for more in ((), always):
        of_earlier_call = Captures(cache=CaptureCache(folder))
        assert plan(of_this_call, *more) == plan(of_earlier_call, *more)
    assert len(captured) == 1
    assert len([line for line in said if "by an earlier call" in line]) == 2


def described(value, storages):
    """A value of a node; of a tensor all that a fake tensor has, and which memory it shares."""
    if isinstance(value, list | tuple):
        return [described(each, storages) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    shared = storages.setdefault(storage._cdata, len(storages))
    layout = (value.shape, value.stride(), value.storage_offset(), storage.nbytes(), shared)
    return (*layout, value.dtype, value.device, value.requires_grad, value.is_conj())


@pytest.mark.parametrize("mesh", ["hsdp_tp", "qwen3", "chunked"])
def test_a_step_that_was_read_is_the_captured_one(mesh):
    config = load_config(["--training.seq_len", "64", *MESHES[mesh]], world_size=8)
    config.model_spec.model.layers = config.model_spec.model.layers[:4]
    run = FakeRank(config, 8, 3)
    joint = run.capture()
    content = graph_to_bytes(joint, run.meshes)
    again = FakeRank(config, 8, 3)
    read = graph_from_bytes(content, fake_mode(), again.meshes)
    assert read.signature == joint.signature and read.model_type == joint.model_type
    meshes = [value for spec in read.signature.inputs for _, value in spec.layout.constants]
    assert meshes and all(any(mesh is now for now in again.meshes) for mesh in meshes)
    storages, of_read, conjugated = {}, {}, 0
    for one, two in zip(joint.graph.nodes, read.graph.nodes, strict=True):
        assert (one.op, one.name, one.target) == (two.op, two.name, two.target)
        assert repr((one.args, one.kwargs)) == repr((two.args, two.kwargs))
        wanted = {k: described(v, storages) for k, v in one.meta.items() if k not in _UNREAD}
        assert wanted == {k: described(v, of_read) for k, v in two.meta.items()}, one
        value = one.meta.get("val")
        conjugated += isinstance(value, torch.Tensor) and value.is_conj()
    assert conjugated if mesh == "hsdp_tp" else True, "nothing shows that conjugates are kept"


def test_sizes_that_data_decide_are_captured_every_time(folder, captured, warnings):
    words = ["--module", "graph_trainer.deepseek_v3", "--parallelism.expert_parallel_degree", "2"]
    for number in (1, 2):
        config = load_config(["--training.seq_len", "64", *words], world_size=4)
        config.model_spec.model.layers = config.model_spec.model.layers[1:2]
        read_or_captured(folder, config=config)
        assert len(captured) == number
    assert not warnings and not folder.exists()


def test_calls_share_what_a_capture_depends_on_and_no_more(folder, counted):
    read_or_captured(folder)
    for change in BEHIND:
        read_or_captured(folder, *change)
    assert len(counted) == 1
    for number, change in enumerate(BEFORE, 2):
        read_or_captured(folder, *change)
        assert len(counted) == number, change
    made = len(counted)
    for other in ({"rank": 1}, {"device": "cpu"}, {"config": config_of(layers=2)}):
        read_or_captured(folder, **other)
        made += 1
        assert len(counted) == made, other


class Held:
    """Has a slot and a dict."""

    __slots__ = ("__dict__", "scale")

    def __init__(self, scale):
        self.scale = scale
        self.others = [scale]


def keys(run):
    return key_of(run, what_is_captured(run.config))


def test_a_key_is_of_the_built_model_the_versions_and_the_sources(tmp_path, monkeypatch):
    run = FakeRank(config_of(), 4)
    key = keys(run)
    assert key == keys(FakeRank(config_of(), 4)), "not the same twice"
    run.model.layers["0"].attention.n_heads += 1
    assert keys(run) != key, "an attribute of a module"
    run = FakeRank(config_of(), 4)
    run.model.norm.register_buffer("more", torch.empty(1, device="meta"))
    assert keys(run) != key, "a tensor"
    run = FakeRank(config_of(), 4)
    run.model.layers["0"].eval()
    assert keys(run) != key, "a mode"
    run = FakeRank(config_of(), 4)
    torch.use_deterministic_algorithms(True)
    try:
        assert keys(run) != key, "a setting of torch"
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert keys(run) != key, "the kernels of attention"
    (tmp_path / "some_package-2.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert keys(run) != key, "a version"
    (tmp_path / "some_package-2.0.dist-info").rmdir()
    kinds = ([1.0], {"a": 1.0}, torch.float16, {"a", "b"}, np.ones(2), len, Held(1.0))
    kinds = (functools.partial(pow, 2), functools.partial(pow, 3), *kinds)
    made = [key]
    for holds in kinds:
        run.model.norm.holds = holds
        made.append(keys(run))
        assert made[-1] not in made[:-1], holds
    changed = made[-1]
    holds.scale = [2.0]
    assert keys(run) not in (key, changed), "what an object holds"
    run.model.norm.holds = holds.scale = [holds, Held(3.0)]  # which hold each other
    assert keys(run) not in (key, changed)
    del run.model.norm.holds
    # a module of the user's own, as `python -m` finds it in the current folder
    source = tmp_path / "of_the_user.py"
    source.write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import of_the_user  # noqa: F401

    with_user = keys(run)
    assert with_user != key
    source.write_text("A = os.environ['TIMES_OF_USER']\n")
    without = keys(run)
    assert without not in (key, with_user)
    monkeypatch.setenv("TIMES_OF_USER", "2")
    assert keys(run) not in (key, with_user, without), "a variable that the source names"
    monkeypatch.delenv("TIMES_OF_USER")
    monkeypatch.delitem(sys.modules, "of_the_user")
    assert keys(run) == key


def test_a_model_with_sets_of_names_has_one_key_in_every_process():
    words = ["--module", "transformers", "--config", "debugmodel", "--model.path", "gpt2"]
    program = (
        "from tests.unit.planner.test_capture_cache import *\n"
        f"run = FakeRank(load_config({words}, world_size=2), 2)\n"
        "run.model.names = set('abcdefgh')\n"
        "print(keys(run))"
    )
    said = set()
    for seed in ("1", "2"):  # of the hashes of texts, by which sets are ordered
        # a variable that this file named would be in the key
        environment = os.environ | {"PYTHON" + "HASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        said.add(done.stdout.split()[-1])
    assert len(said) == 1


def test_the_helpers_of_a_model_that_is_installed_are_in_the_key(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "models_of_user"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("A = 1\n")
    (package / "model.py").write_text("from torch import nn\nclass Norm(nn.Module):\n    pass\n")
    monkeypatch.syspath_prepend(package.parent)
    import models_of_user.helper
    import models_of_user.model

    run = FakeRank(config_of(), 4)
    run.model.more = models_of_user.model.Norm()
    key = keys(run)
    (package / "helper.py").write_text("A = 2\n")
    assert keys(run) != key
    for name in ("models_of_user", "models_of_user.helper", "models_of_user.model"):
        monkeypatch.delitem(sys.modules, name)


def test_a_source_that_changes_in_a_long_call_is_what_was_imported(tmp_path, folder, counted):
    """The rows of a comparison are captured from the code that is loaded."""
    source = tmp_path / "edited.py"
    source.write_text("A = 1\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        patched.delitem(sys.modules, "edited", raising=False)
        import edited  # noqa: F401

        captures = Captures(cache=CaptureCache(folder))
        step_of(captures)
        source.write_text("A = 2\n")
        step_of(captures, "--training.seq_len", "32")
        assert len(counted) == 2
        read_or_captured(folder, "--training.seq_len", "32")
        assert len(counted) == 3, "a later call has other code"
        patched.delitem(sys.modules, "edited")


def test_a_step_whose_capture_imports_further_sources_is_not_kept(
    tmp_path,
    folder,
    counted,
    monkeypatch,
):
    original = FakeRank.capture

    def capture(run):
        (tmp_path / "late.py").write_text("A = 1\n")
        monkeypatch.syspath_prepend(tmp_path)
        import late  # noqa: F401

        return original(run)

    monkeypatch.setattr(FakeRank, "capture", capture)
    read_or_captured(folder)
    monkeypatch.delitem(sys.modules, "late")
    assert not list(folder.glob("*.graph"))


def damaged(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path):
    path.write_bytes(b"")


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def of_another_version(path):
    path.write_bytes(zlib.compress(pickle.dumps(("nothing", "like", "it"), 5)))


@pytest.mark.parametrize(
    "damage", [damaged, cut_short, emptied, a_folder, a_pipe, of_another_version]
)
def test_a_file_that_cannot_be_read_is_warned_of_once_and_replaced(
    damage,
    folder,
    counted,
    warnings,
):
    right = read_or_captured(folder)
    (path,) = folder.glob("*.graph")
    damage(path)
    assert read_or_captured(folder) == right and len(counted) == 2
    assert len(warnings) == 1 and "--no-capture-cache" in warnings[0] and str(path) in warnings[0]
    if damage is not a_folder:
        assert read_or_captured(folder) == right and len(counted) == 2 and len(warnings) == 1


def is_a_file(folder):
    folder.write_text("")


def is_below_a_file(folder):
    folder.parent.joinpath("file").write_text("")
    return folder.parent / "file" / "captures"


def is_below_what_no_one_may_write(folder):
    return capture_cache.Path("/proc/captures")


@pytest.mark.parametrize("make", [is_a_file, is_below_a_file, is_below_what_no_one_may_write])
def test_a_folder_that_cannot_be_written_is_warned_of_once(make, folder, counted, warnings):
    folder = make(folder) or folder
    cache = Captures(most=2, cache=CaptureCache(folder))
    for change in ((), BEFORE[0]):
        step_of(cache, *change)
    assert len(counted) == 2 and len(warnings) == 1 and str(folder) in warnings[0]
    lines = warnings[0].splitlines()
    assert len(lines) > 2 and all(len(line) <= 100 or str(folder) in line for line in lines)
    step_of(Captures(cache=CaptureCache(folder, warns=False)))  # as of `train`, which needs none
    assert len(counted) == 3 and len(warnings) == 1


def test_a_disk_that_is_full_is_warned_of_and_leaves_nothing(
    folder, counted, warnings, monkeypatch
):
    def write_bytes(path, content):
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(capture_cache.Path, "write_bytes", write_bytes)
    read_or_captured(folder)
    assert len(warnings) == 1 and "No space left" in " ".join(warnings[0].split())
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_lock_that_is_not_released_is_warned_of(folder, counted, warnings, monkeypatch):
    monkeypatch.setattr(capture_cache, "_LOCK_SECONDS", 0.1)
    folder.mkdir()
    with capture_cache.FileLock(folder / "lock"):
        read_or_captured(folder)
    assert len(warnings) == 1 and not list(folder.glob("*.graph"))


def test_a_folder_that_is_removed_is_made_again(folder, counted, warnings):
    cache = Captures(most=2, cache=CaptureCache(folder))
    for change in ((), BEFORE[0], BEFORE[1]):
        step_of(cache, *change)
        assert len(list(folder.glob("*.graph"))) == 1
        shutil.rmtree(folder)
    assert len(counted) == 3 and not warnings


def test_files_of_another_user_are_read(folder, counted, warnings, monkeypatch):
    right = read_or_captured(folder)

    def utime(path, *times):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(capture_cache.os, "utime", utime)
    assert read_or_captured(folder) == right and len(counted) == 1 and not warnings


def test_files_that_were_used_least_recently_go(folder, counted, monkeypatch):
    read_or_captured(folder)
    (first,) = folder.glob("*.graph")
    os.utime(first, (1, 1))
    other = folder / "0.graph"
    other.write_bytes(b"0" * 1000)
    os.utime(other, (2, 2))
    read_or_captured(folder)  # used again
    read_or_captured(folder, *BEFORE[1])
    (third,) = {*folder.glob("*.graph")} - {first, other}
    most = sum(path.stat().st_size for path in (first, other, third))
    for less, left in ((-500, {first, other, third}), (500, {first, third}), (1500, {third})):
        third.unlink()
        other.write_bytes(b"0" * 1000)
        os.utime(other, (2, 2))
        monkeypatch.setattr(capture_cache, "MOST_BYTES", most - less)
        read_or_captured(folder, *BEFORE[1])
        assert {*folder.glob("*.graph")} == left, less


def test_two_processes_write_and_read_at_once(folder, counted):
    context = multiprocessing.get_context("fork")
    right = read_or_captured(folder.parent / "alone")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=lambda: results.put([read_or_captured(folder) for _ in range(3)]))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    assert [results.get() for _ in processes] == [[right] * 3] * 2
    for process in processes:
        process.join()
    assert len(list(folder.iterdir())) == 2, "one step and the lock"


_MODULE = b"cgraph_trainer.core.graph.serialize\n"


class Evil:
    def __reduce__(self):
        return os.system, ("exit 7",)


@pytest.mark.parametrize(
    "content, message",
    [
        (pickle.dumps(Evil()), "posix.system is not part"),
        (pickle.dumps(getattr), "builtins.getattr is not part"),
        (_MODULE + b"_Reader.op\n(Vaten\nVadd\nV__class__\ntR.", "OpOverloadPacket'> is not part"),
        (_MODULE + b"_Reader.constant\n(Vload\ntR.", "<function load .* is not part"),
        (_MODULE + b"io.open\n.", "io.open is not part"),
    ],
)
def test_nothing_but_parts_of_graphs_is_made_of_a_file(content, message):
    with pytest.raises(pickle.UnpicklingError, match=message):
        graph_from_bytes(zlib.compress(content), fake_mode(), [])


def test_where_the_cache_lies(monkeypatch):
    monkeypatch.setenv(capture_cache.FOLDER, "/a")
    assert str(default_folder()) == "/a"
    monkeypatch.delenv(capture_cache.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert str(default_folder()) == "/b/graph_trainer/captures"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert str(default_folder()) == "/c/.cache/graph_trainer/captures"
