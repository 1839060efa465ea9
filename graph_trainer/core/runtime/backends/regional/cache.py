"""Programs that the ranks of a machine and later launches share, in Inductor's cache on disk.

Inductor's cache finds a program by its graph, its inputs, Inductor's settings and sources, and the
device. Added here: a program is compiled by one process while others wait for it, and what is
damaged is removed and compiled anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from graph_trainer.core.torch_private_inductor import (
    compilations,
    inductor_cache_folder,
    inductor_has_cache,
)
from graph_trainer.errors import ConfigError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
# Inductor names a file after its contents, and puts it into a folder of two letters of the name.
_NAME = re.compile(r"\bc[a-z2-7]{51}\b")


def compile_all(wanted: Mapping[str, Callable[[], _T]]) -> dict[str, _T]:
    """Compile programs, or take them from the cache.

    A program that another process compiles comes last, when that process is done: the ranks of a
    machine compile different programs at the same time, and each program once.

    Args:
        wanted: by the key of each program, what compiles it or takes it from Inductor's cache.

    Raises:
        ConfigError: files in the cache folder cannot be written or locked.
    """
    if not wanted:
        return {}
    if not inductor_has_cache():
        logger.info(
            "Backend 'regional': %d programs, all compiled: Inductor's cache is off, and every "
            "rank and launch compiles for itself",
            len(wanted),
        )
        return {key: compile_one() for key, compile_one in wanted.items()}
    folder = _lock_folder()
    start, before = time.perf_counter(), compilations()
    programs: dict[str, _T] = {}
    for waits in (False, True):
        if waits and len(programs) < len(wanted):
            others = len(wanted) - len(programs)
            logger.info("Waiting for %d programs of other processes: locks in %s", others, folder)
        for key, compile_one in wanted.items():
            if key in programs:
                continue
            with _locked(folder / f"{key}.lock", waits) as locked:
                if locked:
                    programs[key] = _healed(compile_one, folder.parent)
    compiled = compilations() - before
    logger.info(
        "Backend 'regional': %d programs, %d compiled and %d from %s, in %.1f s",
        len(programs),
        compiled,
        len(programs) - compiled,
        folder.parent,
        time.perf_counter() - start,
    )
    return {key: programs[key] for key in wanted}


def _lock_folder() -> Path:
    folder = None
    try:
        folder = Path(inductor_cache_folder()) / "graph_trainer"
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "writable", waits=False):
            pass
    except OSError as error:
        raise ConfigError(
            f"backend 'regional' keeps what it compiles in TORCHINDUCTOR_CACHE_DIR, and cannot "
            f"write or lock '{error.filename or folder}' there ({error.strerror}): set "
            'TORCHINDUCTOR_CACHE_DIR to a folder that you may write, or use the backend "eager"'
        ) from error
    return folder


@contextlib.contextmanager
def _locked(path: Path, waits: bool) -> Iterator[bool]:
    """Hold a lock that ends with the process; yield False where another process holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _healed(compile_one: Callable[[], _T], cache: Path) -> _T:
    """Compile, and where a file of the cache cannot be used, remove it and compile again."""
    removed: set[Path] = set()
    while True:
        try:
            return compile_one()
        except Exception as error:
            files = _files_named(error, cache) - removed
            if not files:
                raise
            removed |= files
            for file in files:
                file.unlink(missing_ok=True)
            logger.warning(
                "Backend 'regional' cannot use %s and compiles anew: %s: %.300s",
                *(", ".join(map(str, sorted(files))), type(error).__name__, error),
            )


def _files_named(error: BaseException | None, cache: Path) -> set[Path]:
    """List the cached files whose names are in the messages of an error and of its causes."""
    names: set[str] = set()
    while error is not None:
        names.update(_NAME.findall(str(error)))
        error = error.__cause__ or error.__context__
    return {file for name in names for file in (cache / name[1:3]).glob(f"{name}*")}
