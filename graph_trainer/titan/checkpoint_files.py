"""The files of a checkpoint: complete once `.metadata` is there, verified before they are loaded.

The format is torch's distributed checkpoint. torch gives `.metadata` its name when everything else
is on the disk, and torchtitan takes a folder without it for no checkpoint. `SHA256SUMS`, written
just before, holds a digest of every file, for `sha256sum -c SHA256SUMS`, and in a comment its size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator
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

Sums = dict[str, tuple[str, int | None]]
"""File name -> SHA-256 in hexadecimal, and bytes: None in a list that `sha256sum` wrote."""

_STEP = re.compile(r"step-(\d+)")
_SIZE = re.compile(r"# (\d+) bytes  (.+)")  # the line above a digest, a comment to `sha256sum`
_DIGEST = re.compile(r"([0-9a-f]{64})  ([^/]+)")


class ManifestWriter(FileSystemWriter):
    """Write a checkpoint with a list of its files' digests.

    Every rank hashes its files while it writes them; the coordinator writes the list. An error on
    any rank comes before that, and before `.metadata`.

    Args:
        verify: write the list of digests, at the cost of one pass of SHA-256 over the bytes.
    """

    def __init__(self, path: str | os.PathLike[str], verify: bool = True) -> None:
        super().__init__(path)
        self._sums: Sums = {}
        if verify:
            self.fs = _HashingFileSystem(self._sums)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of this rank.

        Returns:
            One result for each tensor, with the digests of this rank's files.

        Raises:
            OSError: of the disk, with the path of the checkpoint.
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
        written: Future[list[WriteResult]] = Future()
        written.set_result([_HashedResult(**vars(r), sums=self._sums) for r in results])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the digests of all ranks' files and then `.metadata`, on the coordinator."""
        for result in itertools.chain(*results):
            if isinstance(result, _HashedResult):
                self._sums |= result.sums
        super().finish(metadata, results)


@dataclass(frozen=True)
class _HashedResult(WriteResult):
    """What one rank sends the coordinator about one tensor, with the digests of its files."""

    sums: Sums


class _HashingFileSystem(FileSystem):
    """Hash each file while it is written, and list all digests before `.metadata` gets its name."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _HashingFile(io.FileIO(path, mode)) as file:
            yield file
        self._sums[Path(path).name] = file.sha256.hexdigest(), os.stat(path).st_size

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Write the list to the disk, then rename: torch renames `.metadata` alone."""
        self._sums[Path(new_path).name] = self._sums.pop(Path(path).name)
        _write_sums(Path(new_path).parent, self._sums)
        super().rename(path, new_path)


class _HashingFile(io.BufferedWriter):
    """A file to append to, with the SHA-256 of its content."""

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


def is_complete(checkpoint: Path) -> bool:
    """Tell whether a checkpoint has the file that we, and torchtitan's exports, write last."""
    return (checkpoint / METADATA).is_file() or (checkpoint / HF_INDEX).is_file()


def steps_in(folder: Path) -> dict[int, bool]:
    """List the steps that have a folder below this one, the newest first, and whether each is
    complete."""
    steps = {
        int(name[1]): is_complete(path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (name := _STEP.fullmatch(path.name))
    }
    return dict(sorted(steps.items(), reverse=True))


def empty(checkpoint: Path) -> None:
    """Remove a checkpoint, or what a killed run left of one.

    Raises:
        OSError: the file that makes it complete cannot be removed.
    """
    for name in (METADATA, HF_INDEX):  # first: half of a checkpoint must not look complete
        (checkpoint / name).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def publish(staging: Path, sums: Sums | None) -> None:
    """Move an export to the folder around it, with the digests of all files unless that is None."""
    if sums is not None:
        others = digests(path for path in staging.iterdir() if path.name not in sums)
        _write_sums(staging, sums | others)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == HF_INDEX):
        path.rename(staging.parent / path.name)
    staging.rmdir()


def digests(files: Iterable[Path]) -> Sums:
    """Hash files."""
    sums: Sums = {}
    for path in files:
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
    return sums


def _write_sums(folder: Path, sums: Sums) -> None:
    with (folder / SUMS).open("w") as file:
        for name, (digest, size) in sorted(sums.items()):
            file.write(f"# {size} bytes  {name}\n{digest}  {name}\n")
        file.flush()
        os.fsync(file.fileno())


def sums_of(folder: Path) -> Sums:
    """Read the digests and sizes that were written with a checkpoint.

    Returns:
        Empty if there is no list: another program wrote the checkpoint, or `checkpoint.verify` was
        off.

    Raises:
        ValueError: the file is not such a list, or is not all of one.
        OSError: the file cannot be read.
    """
    try:
        lines = (folder / SUMS).read_text("ascii").splitlines()
    except FileNotFoundError:
        return {}
    sums: Sums = {}
    sizes: dict[str, int] = {}
    for line in lines:
        if size := _SIZE.fullmatch(line):
            sizes[size[2]] = int(size[1])
        elif digest := _DIGEST.fullmatch(line):
            sums[digest[2]] = digest[1], sizes.get(digest[2])
        elif not line.startswith("#"):
            raise ValueError("it has a line that is not a digest")
    if not {METADATA, HF_INDEX} & sums.keys() or (sizes and sizes.keys() != sums.keys()):
        raise ValueError(f"it has not a digest and a size for {METADATA} and each other file")
    return sums


def damage(folder: Path, *, verify: bool = True, share: int = 0, shares: int = 1) -> list[str]:
    """Find damaged files of a checkpoint.

    Args:
        verify: compare every byte with the digests. Without that, and without digests, files
            are only checked for existence and size.
        share: which part of the files to read, 0 to `shares` - 1.
        shares: the number of parts, so that many ranks can share the work.

    Returns:
        A line for each damaged file; none if the checkpoint can be loaded.
    """
    lines: dict[str, str] = {}  # by file name
    sums: Sums = {}
    needed = {METADATA: 0} if share == 0 else {}  # file name -> its least length in bytes
    reading = SUMS
    try:
        sums = sums_of(folder) if verify else {}
        needed = {} if HF_INDEX in sums else needed
        reading = METADATA
        places = DataReader(str(folder)).read_metadata().storage_data if needed else {}
        for place in places.values():
            end = place.offset + place.length
            needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
    except CheckpointError as error:
        lines[reading] = str(error)
    except Exception as error:  # unpickling damaged bytes raises anything
        lines[reading] = f"{reading} is damaged: {type(error).__name__}: {error}"
    # Each share compares its part of the list; the first one compares the list with `.metadata`.
    for name in sorted(sums)[share::shares] if sums else needed:
        digest, size = sums.get(name, ("", None))
        try:
            with (folder / name).open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                if size not in (None, length):
                    problem = f"truncated or changed: {length:,} bytes instead of {size:,}"
                elif length < needed.get(name, 0):
                    problem = f"truncated: {length:,} bytes instead of {needed[name]:,} or more"
                elif digest and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    problem = f"truncated or changed: its SHA-256 is not that of {SUMS}"
                else:
                    continue
        except FileNotFoundError:
            problem = "missing"
        except OSError as error:
            problem = f"unreadable: {type(error).__name__}: {error.strerror}"
        lines[name] = f"{name} is {problem}"
    unlisted = [name for name in needed if sums and name not in sums]
    if unlisted:
        lines[SUMS] = f"{SUMS} is damaged: it does not list {', '.join(unlisted)}"
    return list(lines.values())
