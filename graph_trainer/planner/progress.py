"""Print the progress of a long command: on stderr, because stdout is for the result."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

Progress = Callable[[str], None]


@contextlib.contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Yield a function that prints a line: in place on a terminal, else one after the other."""
    console = Console(stderr=True)
    start = time.perf_counter()
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda line: status.update(f"{what}: {line}")
        return

    def say(line: str) -> None:
        print(f"{what} [{time.perf_counter() - start:5.1f} s] {line}", file=sys.stderr, flush=True)

    yield say
