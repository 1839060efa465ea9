"""The files of a checkpoint: written beside the others, published whole, checked before use.

What is written is torch's distributed checkpoint, which anything that reads those can load. It
is written under a name that no loader takes and renamed when every byte of it is on the disk, so
a folder called step-N is whole from the first moment, whatever ends the run. `SHA256SUMS` inside
holds a digest of every file, in the format of the tool of that name: `sha256sum -c SHA256SUMS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

SUMS = "SHA256SUMS"
METADATA = ".metadata"
WRITING = "writing-"
REPLACED = "replaced-"
"""Before the step's number: the folder that is being written, and the one it takes the place of."""


class PublishingWriter(FileSystemWriter):
    """Writes a checkpoint into one folder and renames that to another when all of it is there.

    Every rank hashes what it writes while it writes it; the coordinator writes the list and
    renames. An error on any rank comes before that. Costs one pass of SHA-256 over the bytes.

    Arguments:
        path: where to write; what is there is removed first.
        publish_as: the name of the finished checkpoint; what is there is replaced.
    """

    def __init__(self, path: str | os.PathLike[str], publish_as: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs: _HashingFileSystem = _HashingFileSystem()
        self._publish_as = Path(publish_as)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Runs on the coordinator when every rank has planned and none has written: the one
        # moment to remove what a run that was killed left here.
        shutil.rmtree(self.path, ignore_errors=True)
        os.makedirs(self.path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:
            # torch.save hides what the disk said behind "unexpected pos", and only the
            # exception itself travels to the other ranks
            disk = _os_error_behind(error)
            raise OSError(disk.errno, disk.strerror, str(self.path)) if disk else error from error
        digests = self.fs.digests
        hashed: Future[list[WriteResult]] = Future()
        hashed.set_result(
            [
                _HashedResult(
                    r.index, r.size_in_bytes, r.storage_data, digests[r.storage_data.relative_path]
                )
                for r in results
            ]
        )
        return hashed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        sums = {
            r.storage_data.relative_path: r.sha256
            for of_rank in results
            for r in of_rank
            if isinstance(r, _HashedResult)
        }
        sums[METADATA] = self.fs.digests[f"{METADATA}.tmp"]
        written = Path(self.path)
        with (written / SUMS).open("w") as file:
            file.writelines(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
            file.flush()
            os.fsync(file.fileno())
        publish(written, self._publish_as)


def publish(written: Path, name: Path) -> None:
    """Give a finished folder its name, in place of what had it.

    Atomic on one file system where nothing has the name yet; otherwise a moment is left in
    which `clean` has to give the older one its name back.
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
    """Remove what runs that were killed left among the checkpoints of a folder.

    A checkpoint that was about to be replaced gets its name back.
    """
    for replaced in folder.glob(f"{REPLACED}*"):
        name = replaced.with_name(f"step-{replaced.name.removeprefix(REPLACED)}")
        if name.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(name)
    for writing in folder.glob(f"{WRITING}*"):
        shutil.rmtree(writing, ignore_errors=True)


def sums_of(folder: Path) -> dict[str, str] | None:
    """The digests that were written with a checkpoint: file name -> SHA-256 in hexadecimal.

    None where there are none: another program wrote it, or an older graph_trainer.

    Raises:
        ValueError: there is a list and it is not one.
        OSError: it cannot be read.
    """
    try:
        lines = (folder / SUMS).read_text("ascii").splitlines()
    except FileNotFoundError:
        return None
    pairs = [line.split("  ", 1) for line in lines]
    if not pairs or any(len(pair) != 2 or len(pair[0]) != 64 for pair in pairs):
        raise ValueError(f"{SUMS} is damaged")
    return {name: digest for digest, name in pairs}


def damage(folder: Path, *, share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with a checkpoint, a line for each file; none means that it can be loaded.

    Arguments:
        folder: the checkpoint.
        share, shares: read only every `shares`-th file, starting with this one, so that many
            ranks can share the work.

    Where no digests were written the files are only looked for and measured.
    """
    try:
        sums = sums_of(folder)
        if sums is None:
            return _too_short(folder) if share == 0 else []
        if METADATA not in sums:
            return [f"{SUMS} is damaged: it does not list {METADATA}"]
    except (OSError, ValueError) as error:
        return [_said(error, folder)]
    found = []
    for name in sorted(sums)[share::shares]:
        try:
            with (folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as error:
            found.append(_said(error, folder))
        else:
            if digest != sums[name]:
                found.append(f"{name} is truncated or changed: its SHA-256 is not that of {SUMS}")
    return found


def _os_error_behind(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _too_short(folder: Path) -> list[str]:
    if not (folder / METADATA).exists():
        return [f"{METADATA} is missing: it was never completed"]
    try:
        metadata = FileSystemReader(folder).read_metadata()
        needed: dict[str, int] = {}
        for place in metadata.storage_data.values():
            end = place.offset + place.length
            needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
    except Exception as error:  # unpickling damaged bytes raises anything
        return [f"{METADATA} cannot be read: {_said(error, folder)}"]
    found = []
    for name, end in sorted(needed.items()):
        try:
            size = (folder / name).stat().st_size
        except OSError:
            found.append(f"{name} is missing")
        else:
            if size < end:
                found.append(f"{name} is truncated: {size:,} bytes instead of {end:,} or more")
    return found


def _said(error: Exception, folder: Path) -> str:
    return f"{type(error).__name__}: {error}".replace(f"{folder}/", "")


def _sync_folder(folder: Path) -> None:
    """A rename or a new file is on the disk for sure only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _HashedResult(WriteResult):
    """What one rank tells the coordinator of one piece, with the digest of the piece's file."""

    sha256: str


class _HashingFileSystem(FileSystem):
    """Hashes each file while it is written: file name -> SHA-256 in `digests`."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)  # type: ignore[arg-type]
            yield hashing
        self.digests[Path(path).name] = hashing.sha256.hexdigest()


class _HashingStream:
    """A file to append to. It cannot seek: what is hashed must be what is in the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
