"""Tables for people, printed at most 100 columns wide."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table

from graph_trainer.core.passes.report import HEADINGS, Report

WIDTH = 100


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
    """Print a table: 100 columns wide where the output is no terminal, at most 100 on one."""
    terminal = Console(stderr=stderr)
    width = min(terminal.width, WIDTH) if terminal.is_terminal else WIDTH
    Console(stderr=stderr, width=width, highlight=False).print(table)


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
