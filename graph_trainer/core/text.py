"""Prose that is broken into lines, and tables of text."""

from __future__ import annotations

import os
import textwrap
import traceback
from collections.abc import Container, Sequence

WIDTH = 100
"""The most columns of a line."""

COLUMNS = "GRAPH_TRAINER_COLUMNS"
"""Says in the environment of ranks, which print into a pipe, how wide the launcher's terminal is.
COLUMNS itself may be of any process above: Python's readline sets it."""


def width_in_pipe() -> int:
    """Return the columns of a line that is printed into a pipe."""
    columns = os.environ.get(COLUMNS, "")
    return max(40, min(int(columns), WIDTH)) if columns.isdecimal() else WIDTH


def width_of_ranks() -> int:
    """Return the columns of a line that a rank prints, without torchrun's "[rank0]:" before it."""
    return width_in_pipe() - len("[rank0]:")


def wrapped(line: str, width: int | None = None) -> str:
    """Break a line at spaces after at most `width` columns, by default those of a rank, never
    inside `a = b`, `'a': b` or a word."""
    width = width or width_of_ranks()
    if len(line) <= width or "  " in line.strip():  # a row of a table
        return line
    kept = line.replace(" = ", "\0=\0").replace("': ", "':\0")
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    lines = textwrap.wrap(
        kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def error_text(error: object, width: int = WIDTH) -> str:
    """Write an error for a terminal, each of its lines broken at spaces."""
    return "\n".join(wrapped(line, width) for line in f"error: {error}".split("\n"))


def place_of(error: BaseException) -> str:
    """Return " at file.py:12", the line that raised an error, or "" for what names it itself."""
    (*_, line) = traceback.extract_tb(error.__traceback__)
    return f" at {line.filename}:{line.lineno}" if not line.filename.startswith("<") else ""


def aligned(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Write each row of a table as a line; the columns whose numbers are in `right` stand right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        texts = [t.rjust(width) if n in right else t.ljust(width) for n, (t, width) in cells]
        lines.append("  ".join(texts).rstrip())
    return lines
