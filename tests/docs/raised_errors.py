"""Every error that the package raises on purpose, read from its source."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import graph_trainer.errors
from graph_trainer.errors import GraphTrainerError

PACKAGE = Path(graph_trainer.errors.__file__).parent
CLASSES = {
    name
    for name, value in vars(graph_trainer.errors).items()
    if isinstance(value, type) and issubclass(value, GraphTrainerError)
}
HOLE = "\N{HORIZONTAL ELLIPSIS}"
"""What stands in a message for a value that is only known at run time."""


class Raised(NamedTuple):
    """One place that makes an error."""

    where: str
    """Path below the package and line."""
    error: str
    message: str
    """Its text, with HOLE for every value."""


def raised_errors() -> list[Raised]:
    """All of them, those that `bad_value` makes with their problem as message."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            where = f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}"
            if name in CLASSES and node.args:
                found.append(Raised(where, name, text_of(node.args[0])))
            elif name == "bad_value":
                found.append(Raised(where, "ConfigError", text_of(node.args[3])))
    return found


def text_of(node: ast.expr) -> str:
    """The text that an expression makes, as far as the source says it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return HOLE
