"""The files of a checkpoint: complete once `.metadata` is there, verified before they are loaded.

The format is torch's distributed checkpoint, which anything that reads those can load. torch gives
`.metadata` its name when everything else is on the disk, and torchtitan takes a folder without it
for no checkpoint. `SHA256SUMS`, written just before, holds a digest of every file, in the format of
the tool of that name, `sha256sum -c SHA256SUMS`, and in a comment its size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
from collections.abc import Iterator
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
HF_INDEX = "model.safetensors.index.json"

_SIZE = re.compile(r"# (\d+) bytes  (.+)")
"""The line above a file's digest; `sha256sum` takes it for a comment."""

_INLINE_BYTES = 1 << 16
"""Smaller writes are hashed where they are written: to start another thread takes as long."""


class ManifestWriter(FileSystemWriter):
    """Write a checkpoint with a list of its files' digests, in place of what its folder holds.

    Every rank hashes its files while it writes them, on another thread than the one that saves; the
    coordinator writes the list. An error on any rank comes before that, and before `.metadata`.

    Args:
        path: where to write.
        verify: write the list of digests, at the cost of one pass of SHA-256 over the bytes.
    """

    def __init__(self, path: str | os.PathLike[str], verify: bool = True) -> None:
        super().__init__(path)
        self._hashing: _HashingFileSystem | None = None
        if verify:
            self.fs = self._hashing = _HashingFileSystem()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Empty the folder, on the coordinator: all ranks have planned and none has written.

        Raises:
            OSError: see `empty`.
        """
        empty(Path(self.path))
        os.makedirs(self.path, exist_ok=True)
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
            disk: BaseException | None = error
            while disk is not None and not isinstance(disk, OSError):
                disk = disk.__cause__ or disk.__context__
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
        """Write the digests of all ranks' files and then `.metadata`, on the coordinator."""
        if self._hashing is not None:
            for of_rank in results:
                for r in of_rank:
                    if isinstance(r, _HashedResult):
                        self._hashing.digests[r.storage_data.relative_path] = r.sha256, r.file_bytes
        super().finish(metadata, results)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint has the file that is written last, here and by torchtitan's exports."""
    return (checkpoint / METADATA).is_file() or (checkpoint / HF_INDEX).is_file()


def empty(checkpoint: Path) -> None:
    """Remove a checkpoint, or what a killed run left of one.

    Raises:
        OSError: the file that makes it complete cannot be removed.
    """
    for name in (METADATA, HF_INDEX):  # first: half of a checkpoint must not look complete
        (checkpoint / name).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


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
    lines = []
    # What metadata says is read once: file name -> how long it has to be at least.
    needed: dict[str, int] = {}
    if share == 0:
        try:
            for place in DataReader(folder).read_metadata().storage_data.values():
                end = place.offset + place.length
                needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
        except CheckpointError as error:
            lines.append(str(error))
        except Exception as error:  # unpickling damaged bytes raises anything
            if sums is None and isinstance(error, FileNotFoundError):
                lines.append(f"{METADATA} is missing: it was never completed")
            elif sums is None:
                lines.append(f"{METADATA} cannot be read: {_format_error(error, folder)}")
            # Otherwise its digest tells.
    if sums is None:
        names = sorted(needed)
    else:
        unlisted = [name for name in needed if name not in sums]
        lines += [f"{SUMS} is damaged: it does not list {name}" for name in unlisted]
        names = sorted(sums)[share::shares]
    for name in names:
        digest, size = sums[name] if sums is not None else (None, None)
        end = needed.get(name, 0)
        try:
            with (folder / name).open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                if size not in (None, length):
                    problem = f"truncated or changed: {length:,} bytes instead of {size:,}"
                elif length < end:
                    problem = f"truncated: {length:,} bytes instead of {end:,} or more"
                elif digest and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    problem = f"truncated or changed: its SHA-256 is not that of {SUMS}"
                else:
                    continue
            lines.append(f"{name} is {problem}")
        except FileNotFoundError:
            lines.append(f"{name} is missing")
        except OSError as error:
            lines.append(_format_error(error, folder))
    return lines


def _format_error(error: Exception, folder: Path) -> str:
    return f"{type(error).__name__}: {error}".replace(f"{folder}/", "")


@dataclass(frozen=True)
class _HashedResult(WriteResult):
    """What one rank sends the coordinator about one tensor, with digest and size of its file."""

    sha256: str
    file_bytes: int


class _HashingFileSystem(FileSystem):
    """Hash each file while it is written: file name -> SHA-256 and bytes in `digests`.

    The file that torch renames is `.metadata`, the last one; the list of all is written before.
    """

    def __init__(self) -> None:
        self.digests: dict[str, tuple[str, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with ThreadPoolExecutor(1) as thread, _HashingFile(path, mode, thread) as file:
            yield file
        self.digests[Path(path).name] = file.sha256.hexdigest(), file.written

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Write the list of digests to the disk, then rename."""
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)
        with (Path(new_path).parent / SUMS).open("w") as file:
            for name, (digest, size) in sorted(self.digests.items()):
                file.write(f"# {size} bytes  {name}\n{digest}  {name}\n")
            file.flush()
            os.fsync(file.fileno())
        super().rename(path, new_path)


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
