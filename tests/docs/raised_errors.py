"""Every error that the package raises on purpose, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


_PROBLEM = {"bad_value": 3, "require": 2, "refused": 0}
"""Functions of titan/config that make a ConfigError of a problem, and which argument that is."""


def raised_errors() -> list[Raised]:
    """All of them, those that a function of _PROBLEM makes with their problem as message."""
    found = []
    for path, tree in _sources():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                where = f"{path}:{node.lineno}"
                if name in CLASSES and node.args:
                    found.append(Raised(where, name, text_of(node.args[0])))
                elif name in _PROBLEM and len(node.args) > _PROBLEM[name]:
                    texts = _texts(node.args[_PROBLEM[name]], function)
                    found += [Raised(where, "ConfigError", text) for text in texts]
    return sorted(set(found))


def all_texts() -> list[str]:
    """Every text that stands in the package's source."""
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    return [text_of(n) for _, tree in _sources() for n in ast.walk(tree) if isinstance(n, kinds)]


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def _texts(node: ast.expr, function: ast.FunctionDef) -> list[str]:
    """The text of an argument; of a name all texts that the function assigns to it."""
    if not isinstance(node, ast.Name):
        return [text_of(node)]
    texts = []
    for assign in (n for n in ast.walk(function) if isinstance(n, ast.Assign)):
        target, value = assign.targets[0], assign.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        texts += [text_of(v) for t, v in pairs if getattr(t, "id", None) == node.id]
    return texts


def text_of(node: ast.expr) -> str:
    """The text that an expression makes, as far as the source says it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return HOLE
