"""Tables for people, at most 100 columns wide, and the progress of a long command."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table

from graph_trainer.core.passes.report import HEADINGS, Report

WIDTH = 100

OnProgress = Callable[[str], None]
"""Prints one line."""


def plain_table(title: str, title_style: str = "bold") -> Table:
    """Make an empty table with a title, in the style that all tables share."""
    return Table(
        title=title,
        title_justify="left",
        title_style=title_style,
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )


def print_table(table: RenderableType, *, stderr: bool = False) -> None:
    """Print a table: 100 columns wide where the output is not a terminal, at most 100 on one.

    A table that needs more than a narrow terminal has is 100 wide too: its digits would be cut.
    """
    terminal = Console(stderr=stderr)
    page = Console(stderr=stderr, width=WIDTH, highlight=False)
    if terminal.is_terminal and page.measure(table).minimum <= terminal.width:
        page.width = min(terminal.width, WIDTH)
    page.print(table)


def report_table(report: Report) -> Table:
    """Make the table of what each pass did, in at most 100 columns."""
    name, *numbers = HEADINGS
    table = plain_table("What each pass did to the joint graph", title_style="")
    table.add_column(name, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in report.cells():
        table.add_row(*row)
    if report.notes():
        table.caption = "\n".join(report.notes())
        table.caption_justify = "left"
    return table


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
        print(f"{what} [{time.perf_counter() - start:5.1f} s] {line}", file=sys.stderr, flush=True)

    yield say
