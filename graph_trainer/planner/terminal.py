"""Tables for people, at most 100 columns wide, and the progress of a long command."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from graph_trainer.core.text import WIDTH, width_in_pipe, wrapped

_NAME = 20
"""The letters of a name that stand on one line, however narrow the console."""

OnProgress = Callable[[str], None]
"""Prints one line."""


class Name:
    """A name in a table; where it has no room, its lines end behind a dot, a "_" or a space."""

    def __init__(self, name: object) -> None:
        self._name = str(name)

    def __str__(self) -> str:
        return self._name

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the lengths of the longest word and of the longest line."""
        return Measurement.get(console, options, Text(self._name))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Break each line that is longer than the column."""
        most = f".{{1,{options.max_width}}}"
        lines = re.findall(f"{most}$|{most}(?<=[._ ])|{most}", self._name, re.MULTILINE)
        yield Text("\n".join(line.strip() for line in lines))


class PlainTable(Table):
    """A table that leaves columns out where the console is too narrow, and never cuts a digit."""

    optional: tuple[tuple[Column, ...], ...] = ()
    """Columns to leave out, those of the first tuple first."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render what fits; wider than the console where all that is left does not fit."""
        shown, hidden = copy.copy(self), dict[str, None]()
        for columns in ((), *self.optional):
            shown.columns = [copy.copy(column) for column in shown.columns if column not in columns]
            hidden |= {str(column.header).replace("\n", " "): None for column in columns}
            spans = [_span(console, column) for column in shown.columns]
            # edges, separators and padding
            left = options.max_width - 2 * len(spans) - 1 - sum(least for least, _ in spans)
            if left >= 0:
                break
        if hidden:
            left_out = f"No room for: {', '.join(hidden)}."
            shown.caption = f"{self.caption}\n{left_out}" if self.caption else left_out
        options = options.update_width(options.max_width - min(0, left))
        order = sorted(
            zip(spans, shown.columns, strict=True), key=lambda pair: pair[0][1] - pair[0][0]
        )
        for place, ((least, most), column) in enumerate(order):
            more = min(most - least, max(0, left) // (len(order) - place))
            column.width = least + more
            left -= more
        yield from Table.__rich_console__(shown, console, options)


def _span(console: Console, column: Column) -> tuple[int, int]:
    """Return the widths that a column needs and can use; a name may be folded."""
    wide = console.options.update_width(10 * WIDTH)
    cells = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
    most = max(cell.maximum for cell in cells)
    least = most if column.no_wrap else max(cell.minimum for cell in cells)
    least = max(column.min_width or 0, min(least, _NAME) if column.overflow == "fold" else least)
    return least, max(least, most)


def plain_table(title: str, title_style: str = "bold") -> PlainTable:
    """Make an empty table with a title, in the style that all tables share."""
    return PlainTable(
        title=title,
        title_justify="left",
        title_style=title_style,
        caption_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise it, for the command line to end as it always does, where rich exits with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_table(table: RenderableType, *, stderr: bool = False) -> None:
    """Print a table at most 100 columns wide, and as wide as the terminal where it is one.

    torchrun's prefix of a line, such as "[rank0]:", counts.
    """
    console = _Console(stderr=stderr, highlight=False)
    width = min(console.width, WIDTH) if console.is_terminal else width_in_pipe()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        width -= len("[{ROLE_NAME}{LOCAL_RANK}]:".format_map(os.environ))
    console.width = width
    console.print(table, crop=False)


@contextlib.contextmanager
def progress(what: str) -> Iterator[OnProgress]:
    """Yield a function that prints a line: in place on a terminal, else one after the other.

    It prints on stderr, because stdout is for the result.
    """
    console = Console(stderr=True)
    start = time.perf_counter()
    if console.is_terminal:
        with console.status(what) as status:
            yield lambda line: status.update(f"{what}: {line}")
        return

    def say(line: str) -> None:
        begin = f"{what} [{time.perf_counter() - start:5.1f} s] "
        print(begin + wrapped(line, WIDTH - len(begin)), file=sys.stderr, flush=True)

    yield say
