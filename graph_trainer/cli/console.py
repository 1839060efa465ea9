"""Tables for people."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from graph_trainer.core.passes.report import HEADINGS, Report

WIDTH = 100


def report_table(report: Report) -> Table:
    """What each pass did, in at most 100 columns."""
    name, *numbers = HEADINGS
    table = Table(
        title="What each pass did to the joint graph",
        title_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column(name, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in report.cells():
        table.add_row(*row)
    if report.notes():
        table.caption = "\n".join(report.notes())
        table.caption_justify = "left"
    return table


def show_report(report: Report) -> None:
    """Print the table, 100 columns wide where the output is no terminal."""
    console = Console()
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    Console(width=width).print(report_table(report))
