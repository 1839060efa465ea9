"""The line between core and plugin, held by the imports themselves.

The core (all but PLUGIN) serves any nn.Module, so it imports neither torchtitan nor the rooms that
do. Nothing imports torchtitan.experiments. Private names of torch stand in torch_private.py and
nowhere else, so that a new release of torch is read in one file.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "graph_trainer"

# The modules right under graph_trainer that know torchtitan; a folder counts whole. So does every
# model's folder, which has a config_registry.py. Any other room is core: a new one has to say that
# it is not.
PLUGIN = {"__main__", "cli", "planner", "titan", "train"}
DOOR = "core/torch_private.py"


class Use(NamedTuple):
    """A dotted name that a module imports, or reads as an attribute of what it imported."""

    line: int
    name: str
    is_import: bool


def uses(source: str, module: str, *, is_package: bool = False) -> Iterator[Use]:
    """Yields every imported or attribute-read dotted name of `source`, aliases resolved.

    Imports for type checkers alone are left out: they never run.
    """
    tree = ast.parse(source)
    package = module if is_package else module.rpartition(".")[0]

    never_run: set[ast.AST] = set()
    inner_attributes: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            never_run.update(inner for child in node.body for inner in ast.walk(child))
        elif isinstance(node, ast.Attribute):
            inner_attributes.add(node.value)

    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if node in never_run:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                aliases[bound] = alias.name if alias.asname else bound
                yield Use(node.lineno, alias.name, True)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + [base] * bool(base))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                aliases[alias.asname or alias.name] = name
                yield Use(node.lineno, name, True)
        elif isinstance(node, ast.Call) and node.args:
            # importlib.import_module("torchtitan") and its kind; find_spec only asks.
            function = node.func.attr if isinstance(node.func, ast.Attribute) else None
            function = node.func.id if isinstance(node.func, ast.Name) else function
            argument = node.args[0]
            if (
                function in ("import_module", "__import__")
                and isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
            ):
                yield Use(node.lineno, argument.value, True)

    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node in inner_attributes or node in never_run:
            continue
        parts: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name) and value.id in aliases:
            name = ".".join([aliases[value.id], *reversed(parts)])
            yield Use(node.lineno, name, False)


def within(name: str, root: str) -> bool:
    return name == root or name.startswith(root + ".")


def own_room(name: str) -> str | None:
    """The module right under graph_trainer that a dotted name leads to, or None."""
    parts = name.split(".")
    return parts[1] if parts[0] == "graph_trainer" and len(parts) > 1 else None


def is_private_torch(name: str) -> bool:
    """Whether a dotted name of torch has a part that starts with one underscore.

    An aten op is no private name: the underscore in aten._unsafe_view is part of the graph's
    vocabulary.
    """
    if within(name, "torch.ops.aten"):
        return False
    first, *rest = name.split(".")
    return first == "torch" and any(p.startswith("_") and not p.startswith("__") for p in rest)


def room_of(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def core_rooms(paths: Iterable[str]) -> set[str]:
    models = {room_of(path) for path in paths if path.endswith("/config_registry.py")}
    return {room_of(path) for path in paths} - PLUGIN - models


def violations(sources: dict[str, str]) -> list[str]:
    """Checks a whole package, given as path below graph_trainer/ -> source."""
    rooms = {room_of(path) for path in sources}
    core_room = core_rooms(sources)
    found = []
    for path, source in sorted(sources.items()):
        room = room_of(path)
        parts = ["graph_trainer", *path.removesuffix(".py").split("/")]
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        core = room in core_room

        def say(use: Use, what: str, path: str = path) -> None:
            found.append(f"graph_trainer/{path}:{use.line}: {what} ({use.name})")

        for use in uses(source, module, is_package=is_package):
            if within(use.name, "torchtitan.experiments"):
                say(use, "nothing imports torchtitan.experiments")
            elif within(use.name, "torchtitan") and core:
                say(use, "the core never imports torchtitan")
            if is_private_torch(use.name) and path != DOOR:
                say(use, "private names of torch stand in torch_private.py alone")
            target = own_room(use.name)
            if use.is_import and core and target in rooms - core_room:
                say(use, "the core never imports the plugin")
    return found


def package_sources() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text()
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_the_package_keeps_the_line() -> None:
    sources = package_sources()
    assert "__init__.py" in sources, f"no package at {PACKAGE}"
    found = violations(sources)
    assert not found, "\n" + "\n".join(found)


def test_every_core_room_imports_where_torchtitan_is_absent() -> None:
    """What no reading of the source shows: an import hidden behind a name made at run time."""
    rooms = sorted(core_rooms(package_sources()) - {"__init__"})
    modules = ["graph_trainer"] + [f"graph_trainer.{room}" for room in rooms]
    program = (
        "import sys, importlib\n"
        "sys.modules['torchtitan'] = None\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        f"print(sys.modules['graph_trainer'].__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == PACKAGE / "__init__.py"
