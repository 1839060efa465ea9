"""Prose that is broken into lines, and tables of text."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Sequence

WIDTH = 92
"""Columns of a line that a rank prints: 100 with torchrun's "[rank0]:" before it."""


def wrapped(line: str, width: int = WIDTH) -> str:
    """Break a line at spaces after at most `width` columns, never inside `a = b` or a word."""
    if len(line) <= width or "  " in line.strip():  # a row of a table
        return line
    kept = line.replace(" = ", "\0=\0")
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    lines = textwrap.wrap(
        kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def error_text(error: object, width: int = 100) -> str:
    """Write an error for a terminal, each of its lines broken at spaces."""
    return "\n".join(wrapped(line, width) for line in f"error: {error}".split("\n"))


def aligned(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Write each row of a table as a line; the columns whose numbers are in `right` stand right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        texts = [t.rjust(width) if n in right else t.ljust(width) for n, (t, width) in cells]
        lines.append("  ".join(texts).rstrip())
    return lines
