"""Read a TOML file of the user's, with errors that show the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli

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
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = sorted(p.name for p in path.parent.glob("*.toml"))
        stems = [name.removesuffix(".toml") for name in siblings]
        near = [f"{stem}.toml" for stem in nearest(path.stem, stems)]
        guess = f"Did you mean {' or '.join(near)}? " if near else ""
        remedy = f"TOML files there: {', '.join(siblings)}." if siblings else "Check the path."
        raise ConfigError(f"{key} {path}: there is no such file. {guess}{remedy}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key} {path}: cannot be read: {reason}. Name a readable UTF-8 TOML file."
        ) from error
    return parse_toml(text, f"{key} {path}")


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Parse TOML.

    Args:
        what: the name of the document, for messages.

    Raises:
        ConfigError: it is not TOML; then with line and column. Or it has a number or a nesting
            that is valid and has no use.
    """
    try:
        table = tomli.loads(text)
        level: list[Any] = [table]
        for _ in range(100):  # levels; what reads a table has an end to its stack
            inside: list[Any] = []
            for value in level:
                if isinstance(value, int):
                    # fails for a hexadecimal number of too many digits to be shown in a message
                    str(value)
                elif isinstance(value, dict):
                    inside += value.values()
                elif isinstance(value, list):
                    inside += value
            level = inside
            if not level:
                return table
        raise RecursionError
    except tomli.TOMLDecodeError as error:
        raise ConfigError(_syntax_error(what, error)) from None
    except RecursionError:
        raise ConfigError(f"{what}: nested too deeply to be read. Flatten it.") from None
    except ValueError:  # Python refuses to convert thousands of digits
        raise ConfigError(
            f"{what}: an integer in it is too long to be read. Write one of at most 64 bits."
        ) from None


def _syntax_error(what: str, error: tomli.TOMLDecodeError) -> str:
    line = error.doc.split("\n")[error.lineno - 1].rstrip("\r")
    label = f"  {error.lineno} | "
    # A tab stays a tab in front of the caret, so that the caret is below its column.
    indent = "".join("\t" if c == "\t" else " " for c in line[: error.colno - 1])
    return (
        f"{what}, line {error.lineno}, column {error.colno}: not valid TOML: {error.msg}.\n"
        f"{label}{line}\n{' ' * len(label)}{indent}^\n"
        'A line is `key = value`; text stands in quotes ("..."), true and false in lower case, '
        "and each key once."
    )
