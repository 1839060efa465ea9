"""A checkpoint of someone else is data: whatever code its files name does not run."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader

from graph_trainer.errors import CheckpointError
from graph_trainer.titan.checkpoint_files import METADATA, SUMS, ManifestWriter, damage
from graph_trainer.titan.checkpoint_reader import (
    DataLoadPlanner,
    DataReader,
    _check_bytes,
    _Unpickler,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata
]


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def load(state: dict[str, Any], checkpoint: Path | str) -> dict[str, Any]:
    dcp.load(state, storage_reader=DataReader(str(checkpoint)), planner=DataLoadPlanner())
    return state


def state() -> dict[str, Any]:
    """Every kind of value that torchtitan's checkpoints have."""
    return {
        "weight": torch.arange(12.0).view(3, 4).t(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "train_state": {"step": torch.tensor(3), "tokens": 7, "loss": [0.5, None, "x"]},
        "counts": {"pickled": pickle.dumps([1, "x", None]), "shape": torch.Size([2])},
    }


def empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: empty(inner) for key, inner in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


@pytest.mark.parametrize("remote", [False, True])
def test_what_torch_writes_is_read(tmp_path: Path, remote: bool) -> None:
    checkpoint = f"memory://{tmp_path.name}" if remote else str(tmp_path / "step-1")
    dcp.save(state(), checkpoint_id=checkpoint)
    loaded = load(empty(state()), checkpoint)
    torch.testing.assert_close(loaded["weight"], state()["weight"], rtol=0, atol=0)
    torch.testing.assert_close(loaded["half"], state()["half"], rtol=0, atol=0)
    assert {key: loaded[key] for key in ("train_state", "counts")} == {
        key: state()[key] for key in ("train_state", "counts")
    }


@pytest.mark.parametrize(("digests", "where"), [(True, "planner_data"), (False, "whole")])
def test_metadata_runs_nothing(tmp_path: Path, digests: bool, where: str) -> None:
    checkpoint, touched = tmp_path / "step-1", tmp_path / "touched"
    writer = ManifestWriter(checkpoint, verify=digests)
    dcp.save({"weight": torch.ones(4)}, storage_writer=writer)
    assert damage(checkpoint) == []
    content: Any = Touch(touched)
    if where == "planner_data":
        content = DataReader(checkpoint).read_metadata()
        content.planner_data = Touch(touched)
    file = checkpoint / METADATA
    before, after = file.read_bytes(), pickle.dumps(content)
    file.write_bytes(after)
    if digests:
        sums = (checkpoint / SUMS).read_text()
        for of in (lambda data: hashlib.sha256(data).hexdigest(), lambda data: f"{len(data)} by"):
            sums = sums.replace(of(before), of(after))
        (checkpoint / SUMS).write_text(sums)
    (line,) = damage(checkpoint)
    assert line.startswith(f"{METADATA} names posix.mkdir, which may run code")
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, .* save it again with"):
        DataReader(checkpoint).read_metadata()
    with pytest.raises(dcp.CheckpointException, match=r"\.metadata names posix\.mkdir"):
        load({"weight": torch.zeros(4)}, checkpoint)
    assert not touched.exists()
    pickle.loads(after)  # as torch itself reads it
    assert touched.exists()


@pytest.mark.parametrize(
    "named",
    [
        (b"os", b"system"),
        (b"torch.storage", b"_load_from_bytes.__globals__"),
        (b"torch.distributed.checkpoint.filesystem", b"pickle.loads"),
        (b"builtins", b"setattr"),
        (b"planted_by_a_checkpoint", b"x"),
    ],
)
def test_metadata_looks_up_nothing_else(tmp_path: Path, named: tuple[bytes, bytes]) -> None:
    for version, opcode in ((2, b"c%b\n%b\n"), (4, b"\x8c%c%b\x8c%c%b\x93")):
        parts = named if version == 2 else [p for n in named for p in (len(n), n)]
        (tmp_path / METADATA).write_bytes(b"\x80%c" % version + opcode % tuple(parts) + b".")
        with pytest.raises(CheckpointError, match=f"names {b'.'.join(named).decode()}, which may"):
            DataReader(tmp_path).read_metadata()


def test_metadata_is_metadata(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"\.metadata is a pickle of dict and is not loaded"):
        DataReader(tmp_path).read_metadata()


@pytest.mark.parametrize("pickled", [None, 0, 2, pickle.HIGHEST_PROTOCOL])
def test_a_value_runs_nothing(tmp_path: Path, pickled: int | None) -> None:
    """As the state of a class, and as the pickle that torchtitan's data loaders keep."""
    touched = tmp_path / "touched"
    value: Any = Touch(touched)
    if pickled is not None:
        value = pickle.dumps(value, pickled)
    stored = {"dataloader": {"dp_rank_0": value}}
    dcp.save(stored, checkpoint_id=tmp_path / "step-1")
    with pytest.raises(dcp.CheckpointException) as caught:
        load(empty(stored), tmp_path / "step-1")
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, CheckpointError)
    said = "dataloader.dp_rank_0 names posix.mkdir, which may run code"
    assert str(error).startswith(said) and "checkpoint.exclude_from_loading" in str(error)
    assert not touched.exists()


BY_TEXT = b"cposix\nsystem\n(S'touch x'\ntR."
ARCHIVE = io.BytesIO()  # another reader's to unpickle
torch.save(torch.nn.ReLU(), ARCHIVE)


def load_value(value: Any) -> Any:
    """Load what a file may hold and a state is not saved as: it would be taken apart."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    item: Any = SimpleNamespace(storage_index=MetadataIndex("x"), dest_index=MetadataIndex("x"))
    planner = DataLoadPlanner(flatten_state_dict=False)
    planner.state_dict = {}
    planner.load_bytes(item, file)
    return planner.state_dict["x"]


def with_attribute(value: Any) -> Any:
    value.planted = BY_TEXT
    return value


def rebuilt(hooks: Any) -> bytes:
    """Return a pickle of a tensor with what torch takes as its hooks."""

    class Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            storage = torch.storage.TypedStorage(
                wrap_storage=torch.ones(1).untyped_storage(), dtype=torch.float32, _internal=True
            )
            return torch._utils._rebuild_tensor_v2, (storage, 0, (1,), (1,), False, hooks)

    return pickle.dumps(Tensor())


@pytest.mark.parametrize(
    "value",
    [
        bytearray(BY_TEXT),
        pickle.dumps([1, {"x": (BY_TEXT,)}]),
        pickle.dumps({BY_TEXT: 1, "x": 2}, 0),
        pickle.dumps({"dataset": {pickle.dumps([BY_TEXT])}}),
        with_attribute(OrderedDict(a=1)),
        pickle.dumps([{"x": (with_attribute(OrderedDict()),)}], 0),
        with_attribute(torch.ones(1)),
        rebuilt(OrderedDict(planted=BY_TEXT)),
    ],
    ids=["bytearray", "value", "key", "pickle", "attribute", "in pickle", "of tensor", "hooks"],
)
def test_bytes_run_nothing_wherever_they_are(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"x names posix\.system"):
        load_value([value])


@pytest.mark.parametrize(
    "state",
    [
        b"cpathlib\nPath\n(N}S'exists'\ncbuiltins\nset\nstb.",
        b"cpathlib\nPath\n(S'x'\ntR(N}S'_drv'\n" + pickle.dumps(BY_TEXT, 0)[:-1] + b"stb.",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(I0\ntR}S'_value_'\nI3\nsb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'__doc__'\nI3\nsb.",
    ],
)
def test_a_state_is_given_only_to_what_a_file_made_and_is_checked(state: bytes) -> None:
    owned = [Path.exists, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value]
    with pytest.raises(CheckpointError, match="names a state for"):
        _check_bytes({"x": state}, "dataloader")
    assert owned == [Path.exists, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value]


def attribute_of(kind: bytes, name: bytes) -> bytes:
    """A pickle of `getattr(kind, name)`."""
    return b"cbuiltins\ngetattr\n(c" + kind + b"\nV" + name + b"\ntR."


ENUMERATION = b"torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING"


def test_a_member_of_an_enumeration_is_read_as_python_3_11_2_writes_it() -> None:
    pickled = attribute_of(ENUMERATION, b"TORCH_CONTIGUOUS_FORMAT")
    _check_bytes(pickled, "state")
    member = _Unpickler(io.BytesIO(pickled), "state").load()
    assert member is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ENUMERATION, b"__init_subclass__"),
        (b"collections\nOrderedDict", b"fromkeys"),
        (b"torch.serialization\n_get_layout", b"__globals__"),
    ],
)
def test_no_other_attribute_is_looked_up(kind: bytes, name: bytes) -> None:
    with pytest.raises(CheckpointError, match="state holds bytes that are not a pickle of data"):
        _check_bytes(attribute_of(kind, name), "state")


@pytest.mark.parametrize("value", [frozenset({1}), 1j])
def test_what_a_pickle_may_build_a_value_may(value: Any) -> None:
    assert load_value(value) == value


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"I" + b"9" * 5000 + b"\n.",
        pickle.dumps(1) + BY_TEXT,
        ARCHIVE.getvalue(),
        b"(" * 100_000,
    ],
)
def test_bytes_that_are_no_pickle_are_refused(value: bytes) -> None:
    """What this reader cannot read another one may, `torch.load` for example."""
    with pytest.raises(CheckpointError, match="^x holds bytes that are not a pickle of data"):
        load_value(value)


def test_a_pickle_of_data_keeps_its_bits(tmp_path: Path) -> None:
    recursive: list[Any] = [b"N."]
    recursive.append(recursive)
    stored = {f"p{p}": pickle.dumps([recursive, {"k": (2, {3})}], p) for p in range(6)}
    dcp.save(stored, checkpoint_id=tmp_path / "step-1")
    assert load(empty(stored), tmp_path / "step-1") == stored


class Numbers(IterableDataset[int]):
    """Draws from a generator, whose state is a tensor."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Any:
        while True:
            yield int(torch.randint(1000, (), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict["generator"])


def loader() -> ParallelAwareDataloader:
    return ParallelAwareDataloader(Numbers(), dp_rank=0, dp_world_size=1, batch_size=2)


def test_a_loader_of_torchtitan_goes_on(tmp_path: Path) -> None:
    whole = loader()
    batches = iter(whole)
    next(batches)
    dcp.save({"dataloader": whole}, checkpoint_id=tmp_path / "step-1")
    again = loader()
    load({"dataloader": again}, tmp_path / "step-1")
    assert torch.equal(next(iter(again)), next(batches))


def test_a_pickled_tensor_runs_nothing(tmp_path: Path) -> None:
    """torch pickles a tensor as bytes that torch.load reads, which may be a pickle of code."""
    touched = tmp_path / "touched"
    file = io.BytesIO()
    torch.save(Touch(touched), file)

    class Storage:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.storage._load_from_bytes, (file.getvalue(),)

    stored = {"dataloader": {"dp_rank_0": pickle.dumps(Storage())}}
    dcp.save(stored, checkpoint_id=tmp_path / "step-1")
    with pytest.raises(dcp.CheckpointException, match="posix.mkdir"):
        load(empty(stored), tmp_path / "step-1")
    assert not touched.exists()
