"""The keys of configs, read from the schema of files without torch: what a file and flags get wrong
by themselves, and what a shell completes. The loader of configs checks more, after seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graph_trainer.core.suggest import (
    AS_SECTION,
    nearest,
    show,
    unknown_key,
    wrong_choice,
    wrong_type,
)
from graph_trainer.core.toml_file import parse_toml, read_toml
from graph_trainer.errors import ConfigError

_FLAGS = "command line"
_OLD = "a key of torchtitan before 0.3"
_TYPES = {"boolean": bool, "integer": int, "number": int | float, "string": str, "array": list}
_SKIPPED = ("type", "unset", "module", "base")


def check_early(argv: Sequence[str]) -> None:
    """Refuse unknown keys of the file and of the flags, and wrong types in the file.

    What only the classes of a config know is left to the loader: the components and passes of a
    user's own, and modules of configs that are not graph_trainer's.

    Raises:
        ConfigError: a file that cannot be read or is not TOML; all that is wrong, a line each.
    """
    flags: dict[str, str] = {}
    for word, after in zip(argv, [*argv[1:], "--"], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            value = value if equals or after.startswith("--") else after
            flags[name[2:].replace("-", "_")] = value
    config, table = flags.get("config", ""), {}
    if config.endswith(".toml") or "/" in config:
        table = read_toml(Path(config), "--config")
    check = _Check()
    modules = check.schema["properties"]["module"]["examples"]
    module = flags.get("module") or table.get("module", modules[0])
    if module not in modules and f"graph_trainer.{module}" not in modules:
        return
    of_flags: dict[str, Any] = {}
    for name, value in flags.items():
        *sections, key = name.split(".")
        inside = of_flags
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):  # a value and a section: the loader says so
                return
        if sections:  # the others are few, or the command's
            inside[key] = value
    check.table(table, "", config)
    if any(_OLD in line for line in check.lines) and "base" not in table:
        start = 'Begin it with base = "llama3_8b", or what has its model, and change these keys:'
        check.lines.insert(0, f"{config}: a config of torchtitan before 0.3. {start}")
    check.table(of_flags, "", _FLAGS, table)
    if check.lines:
        raise ConfigError("\n".join(check.lines))


def with_names_of_environment(argv: Sequence[str]) -> list[str]:
    """Return the flags with --module and --config from MODULE and CONFIG where no flag names them.

    A resolved file names its own module, so there is no default here.
    """
    words = list(argv)
    for flag in ("--config", "--module"):
        value = variable(flag.removeprefix("--").upper())
        if value and not any(word == flag or word.startswith(f"{flag}=") for word in argv):
            words[:0] = [flag, value]
    return words


def variable(name: str, default: str = "") -> str:
    """Read a variable of the environment; an empty one counts as unset."""
    return os.environ.get(name) or default


def print_completion(words: Sequence[str]) -> int:
    """Print the script that completes in a shell, or the words that it asks for.

    Args:
        words: "bash" or "zsh"; or "words", then those of a command line up to the cursor.

    Raises:
        ConfigError: no such shell.
    """
    shell, *line = words or [""]
    if shell in _SCRIPTS:
        print(_SCRIPTS[shell] + _SCRIPT, end="")
    elif shell == "words":
        print("\n".join(_completed(line)))
    else:
        raise ConfigError(f"completion {shell}: write {' or '.join(_SCRIPTS)}.")
    return 0


def _completed(line: list[str]) -> Iterator[str]:
    """Yield what may stand in place of the last word of a command line, its first the command."""
    from graph_trainer.cli.main import _COMMANDS

    before = line[-2] if len(line) > 1 else ""
    check = _Check()
    if len(line) < 2:
        yield from ["--help", "--version", *_COMMANDS]
    elif before == "--config":
        yield from sorted({path.stem for path in _folder().glob("*/*.toml")})
    elif before == "--module":
        yield from check.schema["properties"]["module"]["examples"]
    elif (key := before.removeprefix("--").replace("-", "_")) in check.keys:
        for schema in check.keys[key].values():
            yield from [] if "enum" not in schema else map(str, schema["enum"])
    else:
        yield from ["--help", "--module", "--config", *_OWN.get(line[0], [])]
        yield from (f"--{key}" for key, kinds in check.keys.items() if {} not in kinds.values())


SCHEMA = "--schema"
DRY_RUN = "--dry-run"
_OWN = {"train": [DRY_RUN, "--plan", "--quiet", "--verbose"], "config": [SCHEMA], "plan": []}
_SCRIPTS = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
_SCRIPT = """\
_graph_trainer() {
    local words
    words=$(graph-trainer completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _graph_trainer graph-trainer
"""


def _shipped(name: str) -> str:
    """Read a file of configs/."""
    return (_folder() / name).read_text(encoding="utf-8")


def _folder() -> Path:
    """Return configs/ of the installed package, or of the checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(
        each / "configs" for each in (package, package.parent) if (each / "configs").exists()
    )


class _Check:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.schema: dict[str, Any] = json.loads(_shipped("schema.json"))
        self.keys: dict[str, dict[str, dict[str, Any]]] = {}
        """Key, without indices of lists -> by the section's type, or "", the schema of its value;
        empty where it is a section."""
        for key, kind, schema in self._walk(self.schema, ""):
            self.keys.setdefault(key, {})[kind] = schema

    def _walk(self, schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
        for option in schema.get("anyOf", [schema]):
            named = option.get("$ref", "").rpartition("/")[2]
            properties = self.schema["$defs"].get(named, option).get("properties", {})
            kind = properties.get("type", {}).get("const", "")
            for name, value in properties.items():
                if name in _SKIPPED:
                    continue
                inner = list(self._walk(value.get("items", value), f"{path}{name}."))
                yield f"{path}{name}", kind, {} if inner and "items" not in value else value
                yield from inner

    def table(
        self, table: Mapping[str, Any], path: str, where: str, below: Any = None, shown: str = ""
    ) -> None:
        """Check a section, or an entry of a list of tables.

        Args:
            path: what its keys begin with in `self.keys`.
            below: the section in the file, where `table` is of the flags.
            shown: what its keys begin with in messages, if not with `path`.
        """
        below = below if isinstance(below, Mapping) else {}
        kind, shown = table.get("type", below.get("type")), shown or path
        for name, value in table.items():
            plain = name.removeprefix("no_") if where == _FLAGS else name
            kinds = self.keys.get(path + name) or self.keys.get(path + plain)
            inside = f"{path}{name}."
            if name.isdigit() and isinstance(value, Mapping):  # --section.list.0.key
                self.table(value, path, where, None, f"{shown[:-1]}[{name}].")
            elif kinds is None:
                if name not in _SKIPPED and ":" not in str(kind):
                    self.unknown(value, path, name, where, shown + name)
            elif isinstance(value, Mapping) and self.names(inside):
                self.table(value, inside, where, below.get(name))
            elif isinstance(value, list) and self.names(inside):
                for i, each in enumerate(value):
                    if isinstance(each, Mapping):
                        self.table(each, inside, where, None, f"{inside[:-1]}[{i}].")
            elif where != _FLAGS and {} in kinds.values():
                self.refuse(value, path + name, where, "expected a section", AS_SECTION)
            elif where != _FLAGS and (kind is None or kind in kinds or "" in kinds):
                schema = kinds.get(kind) or next(iter(kinds.values()))
                self.type(value, schema, shown + name, where)

    def names(self, path: str) -> list[str]:
        """Return the names of the keys that begin with `path` and go one level further."""
        below = [key.removeprefix(path) for key in self.keys if key.startswith(path)]
        return [name for name in below if "." not in name]

    def refuse(self, value: Any, key: str, where: str, problem: str, remedy: str) -> None:
        remedy = remedy.replace("{key}", key).replace("{value}", str(value).lower())
        self.lines.append(f"{where}: {key} = {show(value)}: {problem}. {remedy}".rstrip())

    def unknown(self, value: Any, path: str, name: str, where: str, shown: str) -> None:
        """Refuse an unknown key, or each key of an unknown section of torchtitan's."""
        moved = parse_toml(_shipped("torchtitan_keys.toml"), "torchtitan_keys.toml")
        section = (path + name).partition(".")[0]
        if isinstance(value, Mapping) and section in moved:
            for key, each in value.items():
                self.unknown(each, f"{path}{name}.", key, where, f"{shown}.{key}")
        elif not (isinstance(value, Mapping) and section == "compile"):  # of a pass of the user's
            siblings = self.names(path)
            keys = [each for each, kinds in self.keys.items() if {} not in kinds.values()]
            text = moved.get(path + name) or (nearest(name, siblings) == [] and moved.get(section))
            otherwise = unknown_key(shown, siblings, keys)
            self.refuse(value, shown, where, _OLD if text else "unknown key", text or otherwise)

    def type(self, value: Any, schema: Mapping[str, Any], key: str, where: str) -> None:
        """Refuse a value of the wrong type."""
        options = schema.get("anyOf", [schema])
        choices = [c for each in options for c in each.get("enum", [each.get("const")])]
        kinds = [each["type"] for each in options if "type" in each]
        fits = not kinds or any(isinstance(value, _TYPES.get(kind, dict)) for kind in kinds)
        if choices[0] is not None and value not in choices:
            self.refuse(value, key, where, *wrong_choice(value, choices))
        elif not fits or (isinstance(value, bool) and "boolean" not in kinds):
            self.refuse(value, key, where, *wrong_type(key, value, kinds))
