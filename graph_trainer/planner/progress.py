"""What a long command says while it works: on stderr, so that stdout stays the result."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

Progress = Callable[[str], None]


@contextlib.contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Say what is being done: one line that changes on a terminal, a line each elsewhere."""
    console = Console(stderr=True)
    start = time.perf_counter()
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda line: status.update(f"{what}: {line}")
        return

    def say(line: str) -> None:
        print(f"{what} [{time.perf_counter() - start:5.1f} s] {line}", file=sys.stderr, flush=True)

    yield say
