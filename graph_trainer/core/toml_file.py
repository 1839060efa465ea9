"""Read a TOML file of the user's, with errors that show the line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from graph_trainer.core.suggest import nearest
from graph_trainer.errors import ConfigError


def read_toml(path: Path, key: str) -> dict[str, Any]:
    """Read and parse a TOML file.

    Args:
        key: the flag or config key that names the file, for messages.

    Raises:
        ConfigError: the file cannot be read, or is not TOML; then with line and column.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = sorted(p.name for p in path.parent.glob("*.toml"))
        near = nearest(path.name, siblings)
        guess = f"Did you mean {' or '.join(near)}? " if near else ""
        found = f"{path.parent} has {', '.join(siblings)}." if siblings else "Check the path."
        raise ConfigError(f"{key} {path}: there is no such file. {guess}{found}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key} {path}: cannot be read: {reason}. Name a readable UTF-8 TOML file."
        ) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{key} {_syntax_error(path, text, str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{key} {path}: nested too deeply to be read. Flatten it.") from None


def _syntax_error(path: Path, text: str, message: str) -> str:
    problem, _, position = message.rpartition(" (at ")
    lines = text.split("\n")
    # tomllib gives "(at line 3, column 7)" or "(at end of document)".
    numbers = [int(digits) for digits in re.findall(r"\d+", position)]
    number, column = numbers or (len(lines), len(lines[-1]) + 1)
    line = lines[number - 1].rstrip("\r")
    label = f"  {number} | "
    # A tab stays a tab in front of the caret, so that the caret is below its column.
    indent = "".join("\t" if c == "\t" else " " for c in line[: column - 1])
    return (
        f"{path}, line {number}, column {column}: not valid TOML: {problem}.\n"
        f"{label}{line}\n{' ' * len(label)}{indent}^\n"
        'A line is `key = value`; text stands in quotes ("..."), true and false in lower case, '
        "and each key once."
    )
