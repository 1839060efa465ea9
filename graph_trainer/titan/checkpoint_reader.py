"""Read a checkpoint as data: no code runs that its files name.

torch pickles a checkpoint's `.metadata` and every value that is not a tensor, and unpickles both
without limits, which runs the functions that a file names. Here both may name what a checkpoint
needs, and anything else is an error.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torchtitan.tools import filesystem

from graph_trainer.core.torch_private import fsspec_reader
from graph_trainer.errors import CheckpointError

METADATA = ".metadata"

_TYPES = (bytes, bytearray, set, frozenset, complex)
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
# Module -> names that build a shape, a layout, a tensor, a record or a value of Python's own types,
# and do nothing else. Protocols up to 3 write Python's types under the names of Python 2.
_ALLOWED: dict[str, set[str]] = {
    "builtins": {kind.__name__ for kind in _TYPES},
    "__builtin__": {kind.__name__ for kind in _TYPES},
    "_codecs": {"encode"},
    "collections": {"OrderedDict"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "torch": {"Size"} | {name for name in dir(torch) if isinstance(vars(torch)[name], torch.dtype)},
    "torch._utils": {"_rebuild_tensor_v2"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class DataReader(FileSystemReader):
    """torch's reader of a folder or of remote storage, but reading `.metadata` runs no code."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        if filesystem.is_remote(path):
            remote = fsspec_reader()(path)
            self.fs, self.path = remote.fs, remote.path

    # An argument called kwargs would tell torch to look for one file a rank after an error.
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read what a checkpoint holds, and in which files.

        Raises:
            CheckpointError: the file names something that is not part of a checkpoint.
        """
        with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "rb") as file:
            metadata = _Unpickler(io.BytesIO(file.read()), METADATA).load()
        if not isinstance(metadata, Metadata):
            raise _refused(f"{METADATA} is a pickle of {type(metadata).__name__}")
        # Older versions of torch wrote no storage_meta.
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class DataLoadPlanner(DefaultLoadPlanner):
    """torch's planner, but loading a value that is not a tensor runs no code.

    Args:
        optional: a state of which the checkpoint may lack values. What it lacks stays as it is,
            and its names are in `missing` afterwards.
        options: of torch's planner.
    """

    def __init__(self, optional: str = "", **options: bool) -> None:
        super().__init__(**options)
        self._optional = optional
        self.missing: list[str] = []

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        for name in [*self.state_dict]:
            optional = name.partition(".")[0] == self._optional
            if optional and name not in metadata.state_dict_metadata:
                self.missing.append(name)
                del self.state_dict[name]

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


_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):
    """Unpickle Python's own types, tensors, and the records of torch's metadata.

    Python's own unpickler, not the one in C, since only it lets `_load_build` see what a state is
    given to.
    """

    dispatch = dict(_PythonUnpickler.dispatch)

    def __init__(self, file: io.BytesIO, name: str) -> None:
        super().__init__(file)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, if it is part of a checkpoint.

        Raises:
            CheckpointError: it is not; nothing is imported for it.
        """
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            # torch's own unpickles without limits
            return lambda data: _load_archive(io.BytesIO(data), self._name)
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as an attribute.
            return lambda kind, member: enum.EnumType.__getitem__(kind, member)
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise _refused(f"{self._name} names {module}.{name}, which may run code")

    def _load_build(self) -> None:
        """Give an object its attributes, but none that the process owns or `_check_bytes` misses.

        A class, a function or a member of an enumeration is shared by the whole process. Where
        there is no `__dict__`, attributes would be in slots.
        """
        owner = self.stack[-2]
        if callable(owner) or isinstance(owner, enum.Enum) or not hasattr(owner, "__dict__"):
            raise _refused(f"{self._name} names a state for {owner!r}, which may run code")
        self.load_build()

    dispatch[pickle.BUILD[0]] = _load_build


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} and is not loaded. If you trust the checkpoint, load it and save it again with "
        "the program that wrote it; leave out a state of a class of your own with "
        "checkpoint.exclude_from_loading"
    )


def _load_archive(file: io.BytesIO, name: str) -> Any:
    """Load what torch.save wrote, if it is data: tensors, which torch allows, and `_TYPES`."""
    try:
        with torch.serialization.safe_globals([*_TYPES]):
            return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        file.seek(0)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        what = ", ".join(named) or "more than data"
        raise _refused(f"{name} names {what}, which may run code") from error


def _check_bytes(value: Any, name: str) -> None:
    """Refuse bytes that are not a pickle of data, at any depth of a value and the pickles in it.

    They stay as they are: a program that unpickles them builds what was built here.
    """
    seen: dict[int, Any] = {}  # alive, so that no id is given twice
    pending = [value]
    while pending:
        entry = pending.pop()
        if id(entry) in seen:
            continue
        seen[id(entry)] = entry
        if isinstance(entry, bytes | bytearray):
            pickled = io.BytesIO(entry)
            try:
                pending.append(_Unpickler(pickled, name).load())
            except CheckpointError:
                raise
            except Exception as error:  # unpickling other bytes raises anything
                raise _refused(f"{name} holds bytes that are not a pickle of data") from error
            if pickled.read(1):
                raise _refused(f"{name} holds bytes that are not a pickle of data alone")
        elif isinstance(entry, Mapping):
            pending += [*entry.keys(), *entry.values()]
        elif isinstance(entry, list | tuple | set | frozenset):
            pending += entry
        if not isinstance(entry, type):
            # A pickle may set attributes, also of an OrderedDict, and pass a tensor its hooks.
            pending += [getattr(entry, "__dict__", None), getattr(entry, "_backward_hooks", None)]
