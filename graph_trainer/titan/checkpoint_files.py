"""The files of a checkpoint: written under another name, renamed when complete, verified on load.

The format is torch's distributed checkpoint, which anything that reads those can load. The files
are written into a folder that no loader takes, which is renamed once every byte is on the disk: a
folder called step-N is complete whenever it exists. `SHA256SUMS` inside holds a digest of every
file, in the format of the tool of that name, `sha256sum -c SHA256SUMS`, and in a comment its size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from graph_trainer.errors import CheckpointError
from graph_trainer.titan.checkpoint_reader import METADATA, DataReader

SUMS = "SHA256SUMS"
WRITING = "writing-"
REPLACED = "replaced-"
"""Before the step's number: the folder that is being written, and the one that it replaces."""

_SIZE = re.compile(r"# (\d+) bytes  (.+)")
"""The line above a file's digest; `sha256sum` takes it for a comment."""

_INLINE_BYTES = 1 << 16
"""Smaller writes are hashed where they are written: to start another thread takes as long."""


class PublishingWriter(FileSystemWriter):
    """Write a checkpoint into one folder and rename the folder when it is complete.

    Every rank hashes its files while it writes them, on another thread than the one that saves; the
    coordinator writes the list of digests and renames. An error on any rank comes before that.

    Args:
        path: where to write; what is there is removed first.
        publish_as: the name of the finished checkpoint; what is there is replaced.
        verify: write the list of digests, at the cost of one pass of SHA-256 over the bytes.
    """

    def __init__(
        self, path: str | os.PathLike[str], publish_as: str | os.PathLike[str], verify: bool = True
    ) -> None:
        super().__init__(path)
        self._publish_as = Path(publish_as)
        self._hashing: _HashingFileSystem | None = None
        if verify:
            self.fs = self._hashing = _HashingFileSystem()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Empty the folder, on the coordinator: all ranks have planned and none has written."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.makedirs(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of this rank.

        Returns:
            One result for each tensor, with the digest of its file where digests are written.
        """
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:
            # torch.save raises "unexpected pos" in place of the disk's error, which is its cause;
            # other ranks are sent the exception without its cause.
            disk = _find_os_error(error)
            raise OSError(disk.errno, disk.strerror, str(self.path)) if disk else error from error
        if self._hashing is not None:
            digests = self._hashing.digests
            results = [
                _HashedResult(
                    r.index, r.size_in_bytes, r.storage_data, *digests[r.storage_data.relative_path]
                )
                for r in results
            ]
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and digests and rename the folder, on the coordinator."""
        super().finish(metadata, results)
        folder = Path(self.path)
        if self._hashing is not None:
            sums = {
                r.storage_data.relative_path: (r.sha256, r.file_bytes)
                for of_rank in results
                for r in of_rank
                if isinstance(r, _HashedResult)
            }
            sums[METADATA] = self._hashing.digests[f"{METADATA}.tmp"]
            with (folder / SUMS).open("w") as file:
                for name, (digest, size) in sorted(sums.items()):
                    file.write(f"# {size} bytes  {name}\n{digest}  {name}\n")
                file.flush()
                os.fsync(file.fileno())
        publish(folder, self._publish_as)


def publish(written: Path, name: Path) -> None:
    """Rename a finished folder to `name` and remove what had that name.

    Atomic on one file system where nothing has the name yet. Otherwise there is a moment without
    that name, after which `clean` restores the older checkpoint.
    """
    _sync_folder(written)
    replaced = name.with_name(f"{REPLACED}{name.name.rpartition('-')[2]}")
    if name.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        name.rename(replaced)
    written.rename(name)
    _sync_folder(name.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what killed runs left in the folder of all checkpoints.

    A checkpoint that was being replaced and has no successor gets its name back.
    """
    for replaced in folder.glob(f"{REPLACED}*"):
        name = replaced.with_name(f"step-{replaced.name.removeprefix(REPLACED)}")
        if name.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(name)
    for writing in folder.glob(f"{WRITING}*"):
        shutil.rmtree(writing, ignore_errors=True)


def sums_of(folder: Path) -> dict[str, tuple[str, int | None]] | None:
    """Read the digests and sizes that were written with a checkpoint.

    Returns:
        File name -> SHA-256 in hexadecimal, and the number of bytes, None where the list has no
        sizes, as earlier versions and `sha256sum` write it. None where there is no list: another
        program wrote the checkpoint, or `checkpoint.verify` was off.

    Raises:
        ValueError: the file is not such a list, or is not all of one.
        OSError: the file cannot be read.
    """
    try:
        lines = (folder / SUMS).read_text("ascii").splitlines()
    except FileNotFoundError:
        return None
    sizes = {match[2]: int(match[1]) for line in lines if (match := _SIZE.fullmatch(line))}
    pairs = [line.split("  ", 1) for line in lines if not line.startswith("#")]
    if any(len(pair) != 2 or len(pair[0]) != 64 or "/" in pair[1] for pair in pairs):
        raise ValueError(f"{SUMS} is damaged")
    sums = {name: (digest, sizes.get(name)) for digest, name in pairs}
    if METADATA not in sums:
        raise ValueError(f"{SUMS} is damaged: it does not list {METADATA}")
    if sizes and sizes.keys() != sums.keys():
        raise ValueError(f"{SUMS} is damaged: it has not one digest and one size for each file")
    return sums


def damage(folder: Path, *, verify: bool = True, share: int = 0, shares: int = 1) -> list[str]:
    """Find damaged files of a checkpoint.

    Args:
        folder: the checkpoint.
        verify: compare every byte with the digests. Without that, and without digests, files
            are only checked for existence and size.
        share: which part of the files to read, 0 to `shares` - 1.
        shares: the number of parts, so that many ranks can share the work.

    Returns:
        A line for each damaged file; none where the checkpoint can be loaded.
    """
    try:
        sums = sums_of(folder) if verify else None
    except (OSError, ValueError) as error:
        return [_format_error(error, folder)]
    if sums is None:
        return _find_short_files(folder) if share == 0 else []
    lines = _find_unlisted_files(folder, sums) if share == 0 else []
    for name in sorted(sums)[share::shares]:
        expected, size = sums[name]
        try:
            with (folder / name).open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                if size not in (None, length):
                    problem = f"{length:,} bytes instead of {size:,}"
                elif hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    problem = f"its SHA-256 is not that of {SUMS}"
                else:
                    continue
        except FileNotFoundError:
            lines.append(f"{name} is missing")
        except OSError as error:
            lines.append(_format_error(error, folder))
        else:
            lines.append(f"{name} is truncated or changed: {problem}")
    return lines


def _find_os_error(error: BaseException | None) -> OSError | None:
    """Search an exception and its causes."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _needed_bytes(folder: Path) -> dict[str, int]:
    """Return how long each file has to be at least, by what metadata says of it."""
    needed: dict[str, int] = {}
    for place in DataReader(folder).read_metadata().storage_data.values():
        end = place.offset + place.length
        needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
    return needed


def _find_unlisted_files(folder: Path, sums: Container[str]) -> list[str]:
    try:
        needed = _needed_bytes(folder)
    except CheckpointError as error:
        return [str(error)]
    except Exception:  # unpickling damaged bytes raises anything; the digest tells
        return []
    return [f"{SUMS} is damaged: it does not list {name}" for name in needed if name not in sums]


def _find_short_files(folder: Path) -> list[str]:
    if not (folder / METADATA).exists():
        return [f"{METADATA} is missing: it was never completed"]
    try:
        needed = _needed_bytes(folder)
    except CheckpointError as error:
        return [str(error)]
    except Exception as error:  # unpickling damaged bytes raises anything
        return [f"{METADATA} cannot be read: {_format_error(error, folder)}"]
    short = []
    for name, end in sorted(needed.items()):
        try:
            size = (folder / name).stat().st_size
        except OSError:
            short.append(f"{name} is missing")
        else:
            if size < end:
                short.append(f"{name} is truncated: {size:,} bytes instead of {end:,} or more")
    return short


def _format_error(error: Exception, folder: Path) -> str:
    return f"{type(error).__name__}: {error}".replace(f"{folder}/", "")


def _sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk; a rename or a new file is safe only after that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _HashedResult(WriteResult):
    """What one rank sends the coordinator about one tensor, with digest and size of its file."""

    sha256: str
    file_bytes: int


class _HashingFileSystem(FileSystem):
    """Hash each file while it is written: file name -> SHA-256 and bytes in `digests`."""

    def __init__(self) -> None:
        self.digests: dict[str, tuple[str, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with ThreadPoolExecutor(1) as thread, _HashingFile(path, mode, thread) as file:
            yield file
        self.digests[Path(path).name] = file.sha256.hexdigest(), file.written


class _HashingFile(io.BufferedWriter):
    """A file to append to, with the SHA-256 and the number of bytes of its content."""

    def __init__(self, path: str | os.PathLike[str], mode: str, thread: ThreadPoolExecutor) -> None:
        super().__init__(io.FileIO(path, mode))
        self._thread = thread
        self.sha256 = hashlib.sha256()
        self.written = 0

    def write(self, data: Any) -> int:
        """Write and hash at the same time; both release the GIL."""
        size = memoryview(data).nbytes
        self.written += size
        if size < _INLINE_BYTES:
            self.sha256.update(data)
            return super().write(data)
        hashed = self._thread.submit(self.sha256.update, data)
        try:
            return super().write(data)
        finally:
            hashed.result()  # the caller may free the bytes

    def seek(self, target: int, whence: int = 0) -> int:
        """Refuse: what is hashed must be what is in the file."""
        raise io.UnsupportedOperation(f"seek in {self.name}, which is hashed")
