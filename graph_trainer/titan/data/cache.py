"""Tables that Hugging Face `datasets` builds once on a machine and then maps from disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph_trainer.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa


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
    fingerprint: str,
    columns: Mapping[str, Any],
    rows: Callable[[], Iterator[dict[str, Any]]],
    folder: Path | None = None,
) -> pa.Table:
    """Read a table from the cache of `datasets`, which builds it first where it is missing.

    Several processes may ask for the same table at once: one builds, the others wait and read.
    A table appears in the cache by one rename, complete.

    Args:
        name: what the table holds, for its folder and for errors.
        fingerprint: depends on everything that the table's content depends on.
        columns: column name -> ``datasets`` feature.
        rows: generates the rows.
        folder: where to keep it; None for `cache_dir`.

    Returns:
        The table, mapped from disk.

    Raises:
        ConfigError: the folder cannot be written, or what is there cannot be read.
    """
    import datasets

    folder = folder or cache_dir()
    try:
        dataset = datasets.Dataset.from_generator(
            rows,
            features=datasets.Features(columns),
            cache_dir=str(folder),
            fingerprint=fingerprint,
            split=datasets.NamedSplit(name),
            dataset_name=name,
            writer_batch_size=100,  # documents in memory
        )
        return dataset.with_format("arrow")[:]
    except Exception as error:  # damaged files raise anything
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            cause = error.__cause__ or error
            if not isinstance(cause, OSError):  # of the rows
                raise cause from cause.__cause__
            error = cause
        raise ConfigError(
            f"cannot keep the {name} of a dataset in the cache folder {folder}: "
            f"{type(error).__name__}: {error}. Make the folder writable, free some space, remove "
            f"{folder / name} if a file in it is damaged, or name another folder with "
            "GRAPH_TRAINER_CACHE=<folder>."
        ) from error
