"""Prose that is broken into lines."""

from __future__ import annotations

import textwrap

WIDTH = 92
"""Columns of a line: 100 with torchrun's "[rank0]:" before it."""


def wrapped(line: str, width: int = WIDTH) -> str:
    """Break a line at spaces after at most `width` columns, never inside `a = b` or a word."""
    if len(line) <= width or "   " in line.strip():  # a row of a table
        return line
    kept = line.replace(" = ", "\0=\0")
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    lines = textwrap.wrap(
        kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")
