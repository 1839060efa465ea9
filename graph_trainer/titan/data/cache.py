"""Files that are built once, by whichever process comes first, and then read."""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from graph_trainer.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

SLOW_SECONDS = 2.0
"""Work that takes longer than this says so in the log."""


class CorruptCacheError(Exception):
    """A cached file whose content is not what its name promises."""


def cache_dir() -> Path:
    """The folder of everything that is built once and kept between runs.

    Returns:
        ``$GRAPH_TRAINER_CACHE``, else ``$XDG_CACHE_HOME/graph_trainer``, else
        ``~/.cache/graph_trainer``. The folder may not exist yet.
    """
    if own := os.environ.get("GRAPH_TRAINER_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "graph_trainer"
    return Path("~/.cache/graph_trainer").expanduser()


def load_or_build(
    path: Path, *, load: Callable[[Path], T], build: Callable[[Path], None], what: str
) -> T:
    """Read ``path``; where it is missing or corrupt, build it first.

    Several processes, on several machines too, may ask for the same file at
    once: one builds, the others wait and read. A reader never sees a half
    written file, since it appears under its name by one rename. Locks only
    save work: without them (a file system that has none) each process would
    build the same bytes and the last rename would win.

    Args:
        path: the cached file; its name must depend on everything its content
            depends on.
        load: reads the file. Raises FileNotFoundError or CorruptCacheError.
        build: writes the file at the path it is given.
        what: the content's name, for the log and for errors.

    Returns:
        What ``load`` returns.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    try:
        found = _try_load(path, load, what)
        if found is not None:
            return found[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock"), what):
            # Another process may have built it while this one waited.
            found = _try_load(path, load, what)
            if found is not None:
                return found[0]
            _build_atomically(path, build, what)
        return load(path)
    except OSError as error:
        raise ConfigError(
            f"cannot keep {what} in the cache folder {path.parent}: {error}. Make the folder "
            "writable, free some space, or name another with GRAPH_TRAINER_CACHE=<folder>."
        ) from error


def _try_load(path: Path, load: Callable[[Path], T], what: str) -> tuple[T] | None:
    try:
        return (load(path),)
    except FileNotFoundError:
        return None
    except CorruptCacheError as error:
        logger.warning("cached %s at %s is corrupt (%s): building it again", what, path, error)
        return None


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    # The lock file stays behind on purpose: removing it would let a process
    # lock the removed file while another locks its successor. The lock itself
    # goes with the process that holds it, however that process ends.
    with open(path, "a") as handle:
        began = time.monotonic()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("no file locks at %s (%s): going on without", path.parent, error)
        waited = time.monotonic() - began
        if waited > SLOW_SECONDS:
            logger.info("waited %.1f s while another process built %s", waited, what)
        yield


def _build_atomically(path: Path, build: Callable[[Path], None], what: str) -> None:
    began = time.monotonic()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".tmp")
    os.close(handle)
    unfinished = Path(name)
    try:
        build(unfinished)
        # Bytes before name: after a power cut the file is whole or absent.
        with open(unfinished, "rb+") as written:
            os.fsync(written.fileno())
        # mkstemp makes the file private; a shared cache must be readable.
        umask = os.umask(0)
        os.umask(umask)
        unfinished.chmod(0o666 & ~umask)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    took = time.monotonic() - began
    if took > SLOW_SECONDS:
        logger.info("built %s in %.1f s, kept at %s", what, took, path)
