"""Write the files of a plan: whole or not at all, and checked before the work."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from graph_trainer.errors import ConfigError


def check_outputs(outputs: Mapping[str, Path]) -> None:
    """Check before the work that its results, each by the flag that names it, can be written.

    Raises:
        ConfigError: a folder does not exist or is read-only, or two flags name one file.
    """
    flags: dict[Path, str] = {}
    for flag, path in outputs.items():
        if problem := _problem_of(path):
            raise ConfigError(f"{path}: {problem}")
        other = flags.setdefault(path.resolve(), flag)
        if other != flag:
            raise ConfigError(f"{other} and {flag} both write {path}: name two files")


def _problem_of(path: Path) -> str:
    """Try to write; return why that is impossible, or an empty text."""
    folder = path.resolve().parent
    if path.is_dir():
        return "is a folder: name a file"
    if not folder.is_dir():
        return f"there is no folder {folder}: make it, or name another"
    try:
        if _is_special(path):
            path.open("a").close()
        else:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot be written to ({error.strerror}): name another file"
    return ""


def why_no_folder(path: Path) -> str:
    """Try to write to a folder that there is, or that could be made; return why that is impossible,
    or an empty text."""
    path = Path(os.path.abspath(path))
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"nothing can be written to {path} ({error.strerror})"
    return ""


@contextlib.contextmanager
def published(path: Path) -> Iterator[IO[str]]:
    """Open a file that gets its name only when all of it is written.

    A reader finds the old file or the new one, whole. A pipe or a device, such as /dev/stdout, is
    opened directly.

    Raises:
        ConfigError: it cannot be written, for example because the disk is full.
    """
    try:
        if _is_special(path):
            with path.open("w", encoding="utf-8") as file:
                yield file
            return
        target = path.resolve()
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                yield file
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}): make room, or name another file"
        ) from error


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
