"""Read a checkpoint as data: whatever its files name, no code runs.

torch pickles a checkpoint's `.metadata` and every value that is no tensor, and unpickles both
without limits, which runs what a file names. Here both may name what a checkpoint needs, and
anything else is an error.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import itertools
import pickle
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torchtitan.tools import filesystem

from graph_trainer.core.torch_private import fsspec_reader
from graph_trainer.errors import CheckpointError

METADATA = ".metadata"

_OF_RECORDS = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "pathlib",
    "pathlib._local",
)
_TYPES = (bytes, bytearray, set, frozenset, complex)
# What builds a shape, a layout, a tensor or one of Python's types, and does no more. The last as
# protocols up to 3 write them, under the names of Python 2 and 3.
_BUILDERS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("_codecs", "encode"),
    *itertools.product(("builtins", "__builtin__"), (kind.__name__ for kind in _TYPES)),
}
_FROM_BYTES = ("torch.storage", "_load_from_bytes")
_GETATTR = ("builtins", "getattr")


class DataReader(FileSystemReader):
    """torch's reader, except that reading `.metadata` runs no code."""

    # An argument called kwargs would tell torch to look for one file a rank after an error.
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read what a checkpoint holds, and in which files.

        Raises:
            CheckpointError: the file names something that is no part of a checkpoint.
        """
        with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "rb") as file:
            metadata = _Unpickler(io.BytesIO(file.read()), METADATA).load()
        if not isinstance(metadata, Metadata):
            raise _names(METADATA, type(metadata).__name__)
        # Older versions of torch wrote no storage_meta.
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class DataLoadPlanner(DefaultLoadPlanner):
    """torch's planner, except that loading a value that is no tensor runs no code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state that is loaded.

        torchtitan's data loaders keep a pickle of their state, and unpickle it themselves. Any
        bytes may be such a pickle, also inside another value: protocols 0 and 1 have no mark.

        Raises:
            CheckpointError: the value names something else than data, or bytes in it cannot be
                read as a pickle.
        """
        name = read_item.storage_index.fqn
        loaded = _load_archive(value, name)
        _check_bytes(loaded, name)
        plain = io.BytesIO()
        torch.save(loaded, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def reader_of(path: str) -> FileSystemReader:
    """Return the reader for a checkpoint in a folder, or on remote storage ("gs://...")."""
    if not filesystem.is_remote(path):
        return DataReader(path)

    class Remote(DataReader, fsspec_reader()):  # type: ignore[misc] # found when it is needed
        pass

    return Remote(path)


_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):
    """Builds Python's own types, tensors, and the records of torch's metadata.

    Derived from the unpickler in Python, since the one in C lets nobody look at what a state is
    given to.
    """

    dispatch = dict(_PythonUnpickler.dispatch)

    def __init__(self, file: io.BytesIO, name: str) -> None:
        super().__init__(file)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, where it is part of a checkpoint.

        Raises:
            CheckpointError: it is not; nothing is imported for it.
        """
        where = (module, name)
        if where == _FROM_BYTES:
            # torch's own unpickles without limits
            return lambda data: _load_archive(io.BytesIO(data), self._name)
        if where == _GETATTR:
            return self._member
        if where in _BUILDERS:
            return super().find_class(module, name)
        if "." not in name and module in ("torch", *_OF_RECORDS):
            named = super().find_class(module, name)
            if isinstance(named, torch.dtype) or _is_record(named, module):
                return named
        raise _names(self._name, f"{module}.{name}")

    def _member(self, kind: Any, name: Any) -> Any:
        """Return the member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as an attribute
        of its class.

        Raises:
            CheckpointError: another attribute is asked for.
        """
        if isinstance(kind, enum.EnumType) and isinstance(name, str) and name in kind.__members__:
            return kind[name]
        raise _names(self._name, f"builtins.getattr({kind!r}, {name!r})")

    def _load_build(self) -> None:
        """Give an object its state. A class, a function or an enumeration's member is the
        process's own, and state would change it for all."""
        owner = self.stack[-2]
        if callable(owner) or isinstance(owner, enum.Enum):
            raise _names(self._name, f"a state for {owner!r}")
        self.load_build()

    dispatch[pickle.BUILD[0]] = _load_build


def _names(name: str, named: str) -> CheckpointError:
    return _refused(f"{name} names {named}, which may run code")


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} and is not loaded. If you trust the checkpoint, load it and save it again with "
        "the program that wrote it; leave out a state of a class of your own with "
        "checkpoint.exclude_from_loading"
    )


def _load_archive(file: io.BytesIO, name: str) -> Any:
    try:
        # torch allows the other builders by itself
        with torch.serialization.safe_globals([*_TYPES]):
            return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        file.seek(0)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        raise _names(name, ", ".join(named) or "more than data") from error


def _check_bytes(value: Any, name: str) -> None:
    """Refuse bytes, at any depth of a value and of the pickles in it, that are no pickle of data.

    They stay as they are: a program that unpickles them builds what was built here.
    """
    seen: dict[int, Any] = {}  # alive, so that no id is given twice
    pending = [value]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, bytes | bytearray):
            pickled = io.BytesIO(each)
            try:
                pending.append(_Unpickler(pickled, name).load())
            except CheckpointError:
                raise
            except Exception as error:  # unpickling other bytes raises anything
                raise _refused(f"{name} holds bytes that are no pickle of data") from error
            if pickled.read(1):
                raise _refused(f"{name} holds bytes that are no pickle of data alone")
        elif isinstance(each, Mapping):
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            pending += each
        if not isinstance(each, type):
            pending += _attributes(each)


def _attributes(value: Any) -> list[Any]:
    """List what a pickle may have set on a value, a container too: OrderedDict has attributes."""
    attributes = [getattr(value, "__dict__", None)]
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        attributes += [getattr(value, name, None) for name in names]
    if isinstance(value, torch.Tensor):
        attributes.append(value._backward_hooks)  # an argument of what builds a tensor
    return attributes


def _is_record(value: object, module: str) -> bool:
    """Whether a module defines it, and it is a record, an enumeration or a path."""
    return (
        isinstance(value, type)
        and value.__module__ == module
        and (dataclasses.is_dataclass(value) or issubclass(value, enum.Enum | PurePath))
    )
