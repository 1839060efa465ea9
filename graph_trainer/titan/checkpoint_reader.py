"""Read a checkpoint as data: whatever its files name, no code runs.

torch pickles a checkpoint's `.metadata` and every value that is no tensor, and unpickles both
without limits, which runs what a file names. Here both may name what a checkpoint needs, and
anything else is an error.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
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
# What builds a shape, a layout and a tensor, and does no more.
_BUILDERS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2"),
}
_FROM_BYTES = ("torch.storage", "_load_from_bytes")


class DataReader(FileSystemReader):
    """torch's reader, except that reading `.metadata` runs no code."""

    # An argument called kwargs would tell torch to look for one file a rank after an error.
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read what a checkpoint holds, and in which files.

        Raises:
            CheckpointError: the file names something that is no part of a checkpoint.
        """
        with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "rb") as file:
            metadata = _load(file.read(), METADATA)
        if not isinstance(metadata, Metadata):
            raise _refused(METADATA, type(metadata).__name__)
        # Older versions of torch wrote no storage_meta.
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class DataLoadPlanner(DefaultLoadPlanner):
    """torch's planner, except that loading a value that is no tensor runs no code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state that is loaded.

        torchtitan's data loaders keep a pickle of their state, and unpickle it themselves: it is
        loaded here, and pickled again.

        Raises:
            CheckpointError: the value names something else than data.
        """
        name = read_item.storage_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            value.seek(0)
            named = torch.serialization.get_unsafe_globals_in_checkpoint(value)
            raise _refused(name, ", ".join(named) or "more than data") from error
        if isinstance(loaded, bytes) and loaded.startswith(pickle.PROTO):
            loaded = pickle.dumps(_load(loaded, name))
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


class _Unpickler(pickle.Unpickler):
    """Builds Python's own types, tensors, and the records of torch's metadata."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, where it is part of a checkpoint.

        Raises:
            CheckpointError: it is not; nothing is imported for it.
        """
        where = (module, name)
        if where == _FROM_BYTES:
            return _storage_of  # torch's own unpickles without limits
        if where in _BUILDERS:
            return super().find_class(module, name)
        if "." not in name and module in ("torch", *_OF_RECORDS):
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or _is_record(found, module):
                return found
        raise _refused(self._name, f"{module}.{name}")


def _refused(name: str, named: str) -> CheckpointError:
    return CheckpointError(
        f"{name} names {named}, which may run code and is not loaded. If you trust the checkpoint, "
        "load it and save it again with the program that wrote it; leave out a state of a class "
        "of your own with checkpoint.exclude_from_loading"
    )


def _load(data: bytes, name: str) -> Any:
    return _Unpickler(data, name).load()


def _is_record(found: object, module: str) -> bool:
    """Whether a module defines it, and it is a record, an enumeration or a path."""
    return (
        isinstance(found, type)
        and found.__module__ == module
        and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum | PurePath))
    )


def _storage_of(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
