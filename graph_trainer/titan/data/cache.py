"""Tables that are built once on a machine, by whichever process comes first, and then read.

Files, locks and the name of a build are those of Hugging Face `datasets`, without the network.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from graph_trainer.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

Rows: TypeAlias = Generator[dict[str, Any], None, str]
"""The rows of a table, by column; the generator returns the digest of all of them."""

_ROWS_IN_MEMORY = 100
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)


class CorruptCacheError(Exception):
    """A cached table whose content is not what was written."""


def cache_dir() -> Path:
    """Name the folder of everything that is built once and kept between runs.

    Returns:
        ``$GRAPH_TRAINER_CACHE``, else ``$XDG_CACHE_HOME/graph_trainer``, else
        ``~/.cache/graph_trainer``. The folder may not exist yet.
    """
    if ours := os.environ.get("GRAPH_TRAINER_CACHE"):
        return Path(ours).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "graph_trainer"


def load_or_build(
    name: str,
    key: str | None,
    *,
    columns: Mapping[str, Any],
    rows: Callable[[], Rows],
    digest: Callable[[pa.Table], str],
) -> tuple[pa.Table, str]:
    """Read a table from the cache; build it first where it is missing or damaged.

    Several processes may ask for the same table at once: one builds, the others wait and read.
    A table appears in the cache by one rename, complete. Each load compares its digest with the
    one that the build has written, which costs a pass over the bytes.

    Args:
        name: what the table holds, for the folder, the log and errors.
        key: depends on everything that the table's content depends on; None caches nothing.
        columns: column name -> ``datasets`` feature.
        rows: generates the rows and returns their digest.
        digest: computes the same digest from the table that was read.

    Returns:
        The table, mapped from disk, and its digest.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    import datasets

    def load(folder: Path, key: str) -> tuple[pa.Table, str]:
        info = datasets.DatasetInfo(features=datasets.Features(columns))

        def generate() -> Generator[dict[str, Any], None, None]:
            # Written with the rows, in the same rename.
            info.description = yield from rows()

        try:
            dataset = datasets.Dataset.from_generator(
                generate,
                cache_dir=str(folder),
                fingerprint=key,
                split=datasets.NamedSplit(name),
                dataset_name=name,
                info=info,
                writer_batch_size=_ROWS_IN_MEMORY,
            )
            table = dataset.with_format("arrow")[:]
            if digest(table) != dataset.info.description:
                raise CorruptCacheError("the checksum is wrong")
        except datasets.exceptions.DatasetGenerationError as error:
            cause = error.__cause__ or error
            raise cause from cause.__cause__
        except Exception as error:  # damaged files raise anything, a bare OSError of Arrow's too
            if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
                raise
            raise CorruptCacheError(f"{type(error).__name__}: {error}") from error
        return table, dataset.info.description

    folder = cache_dir()
    try:
        if key is not None:
            try:
                return load(folder, key)
            except CorruptCacheError as error:
                logger.warning("the %s in %s are corrupt (%s): building again", name, folder, error)
            # Without this file `datasets` takes a build for unfinished: it replaces the build.
            for mark in (folder / name).glob(f"*{key}/*/{datasets.config.DATASET_INFO_FILENAME}"):
                mark.unlink(missing_ok=True)
            return load(folder, key)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise ConfigError(
                f"cannot keep the {name} of a dataset in the cache folder {folder}: {error}. Make "
                "the folder writable, free some space, or name another with "
                "GRAPH_TRAINER_CACHE=<folder>."
            ) from error
        logger.warning("no file locks in %s (%s): the %s are not cached", folder, error, name)
    with tempfile.TemporaryDirectory() as private:  # the mapping outlives the file's name
        return load(Path(private), "private")
