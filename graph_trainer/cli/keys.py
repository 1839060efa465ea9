"""The keys of configs, read from the schema of files without torch: what a file and flags get wrong
by themselves, and what a shell completes. The loader of configs checks more, after seconds."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from graph_trainer.core.config_names import find_config, may_be_imported, no_such_module
from graph_trainer.core.suggest import (
    AS_SECTION,
    did_you_mean,
    nearest,
    show,
    unknown_key,
    wrong_base,
    wrong_choice,
    wrong_type,
)
from graph_trainer.core.toml_file import config_folders, parse_toml, read_toml
from graph_trainer.errors import ConfigError

SCHEMA = "--schema"
DRY_RUN = "--dry-run"
_FLAGS = "command line"
_OLD = "a key of torchtitan before 0.3"
_TYPES = {"boolean": bool, "integer": int, "number": int | float, "string": str, "array": list}
_FLAGS_OF_ALL = ["--help", "--quiet", "--verbose", "--config", "--module"]
_FLAGS_OF = {
    "train": ["--plan", DRY_RUN],
    "plan": [
        *("--world-size", "--hardware", "--like", "--compare", "--rank", "--verify-order"),
        *("--all-ranks", "--memory-curve", "--expert-imbalance", "--routing"),
        *("--json", "--html", "--trace", "--save", "--table"),
    ],
    "export": ["--to"],
    "config": [SCHEMA],
}
"""By command, its own flags: those that are no keys of a config."""
_OF_TORCHRUN = {"nproc_per_node": "NGPU", "nnodes": "NNODES", "node_rank": "NODE_RANK"}
"""By flag of torchrun, the variable of the environment that says the same."""
_NUMBERS = ("boolean", "integer", "number")
_NO_KEYS = ("type", "unset", "module", "base")

_Known = dict[str, dict[str, dict[str, Any]]]
"""Key, without indices of lists -> by the section's type, or "", the schema of its value; empty
where the key is a section."""


class CommandParser(argparse.ArgumentParser):
    """A parser of a command's own flags, whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError in place of a page of usage."""
        raise ConfigError(f"{message}. `{self.prog} --help` explains its flags.")


def check_early(argv: Sequence[str], command: str = "train") -> None:
    """Refuse unknown keys of the file and of the flags, and wrong types in the file; beside these
    also wrong numbers in flags.

    What only the classes of a config know is left to the loader: the components and passes of a
    user's own, and modules of configs that are not graph_trainer's.

    Raises:
        ConfigError: a file that cannot be read or is not TOML; all that is wrong, a line each.
    """
    flags = _given_flags(argv)
    config = flags.get("config", "")
    is_path = config.endswith(".toml") or "/" in config
    # a pipe is read once, by the loader
    is_file = is_path and (
        not os.path.exists(config) or Path(config).is_file() or Path(config).is_dir()
    )
    table = read_toml(Path(config), "--config") if is_file else {}
    if {"peak_flops", "memory_gib"} <= table.keys():
        raise ConfigError(
            f"{config}: a hardware profile, no config of a run. Name it with --hardware."
        )
    configs = config_folders()[0]
    schema = json.loads((configs / "schema.json").read_text("utf-8"))
    module = flags.get("module") or table.get("module", schema["properties"]["module"]["default"])
    bases = [
        each["then"]["properties"]["base"]["enum"]
        for each in schema["allOf"]
        if module in each["if"]["properties"]["module"]["enum"]
    ]
    if not bases:  # the configs of another module may have keys of their own
        if isinstance(module, str) and not may_be_imported(module):
            by_flag = "module" in flags
            asked = f"--module {module}" if by_flag else f"{config}: module = {show(module)}"
            raise no_such_module(asked, module)
        return
    if config:  # a name, or a path, which is taken as it is
        of_ours = f"graph_trainer.{module.removeprefix('graph_trainer.')}"
        find_config(of_ours, config, lambda: bases[0])

    known: _Known = {}
    free: list[str] = []  # tables with keys of any name
    for key, of_type, of_value in _keys(schema, schema["$defs"]):
        known.setdefault(key, {})[of_type] = of_value
        free += [f"{key}."] if of_value.get("type") == "object" else []
    # the place, the key without indices of lists, the key as messages show it, the value
    given = [(config, *each) for each in _flat(table, known)]
    for name, value in flags.items():
        if "." in name:  # the others are few, or the command's
            plain = re.sub(r"\.\d+(?=\.)", "", name)
            plain = plain if plain in known else re.sub(r"\.no_(?=\w+$)", ".", plain)
            given.append((_FLAGS, plain, re.sub(r"\.(\d+)(?=\.)", r"[\1]", name), value))
    values = {key: str(value) for _, key, _, value in given}

    moved = parse_toml((configs / "torchtitan_keys.toml").read_text("utf-8"), "torchtitan_keys")
    lines = list(_wrong_flags(argv, command, schema["properties"]))
    wrong_values: list[str] = []  # of flags: alone they are left to the loader
    for where, key, shown, value in given:
        section, _, name = key.rpartition(".")
        # the component that the section's `type` chooses here; None for that of the base
        component = values.get(f"{section}.type")
        schemas = known.get(key)
        of_pass = section.startswith("compile.") and section not in known
        of_user = of_pass or ":" in str(component) or key.startswith(tuple(free))
        if name in _NO_KEYS or (schemas is None and of_user):
            continue
        wrong: tuple[str, str] | None = None
        of_transformers = section == "model" and not module.endswith("transformers")
        if schemas is None:
            top, siblings = key.partition(".")[0], _names_below(known, section)
            # where there still is such a section, a key like one of its keys is misspelt, not old
            is_near = top in known and nearest(name, siblings)
            text = moved.get(key) or (not is_near and moved.get(top))
            keys = [each for each, of_each in known.items() if {} not in of_each.values()]
            wrong = (_OLD, text) if text else ("unknown key", unknown_key(shown, siblings, keys))
        elif {} in schemas.values():
            wrong = ("expected a section", AS_SECTION)
        elif of_transformers:
            remedy = "Name their module: --module graph_trainer.transformers."
            wrong = ("a key of models of Hugging Face", remedy)
        elif component is None or component in schemas or "" in schemas:
            # otherwise it is a key of another component, which the loader names
            of_key = schemas.get(component or "") or [*schemas.values()][0]
            value = _read(value, of_key) if where == _FLAGS else value
            wrong = _wrong_value(shown, value, of_key, where == _FLAGS)
        if wrong:
            problem, remedy = wrong
            remedy = remedy.replace("{key}", shown).replace("{value}", str(value).lower())
            line = f"{where}: {shown} = {show(value)}: {problem}. {remedy}".rstrip()
            is_value = schemas is not None and where == _FLAGS and not of_transformers
            (wrong_values if is_value else lines).append(line)

    base = table.get("base")
    if is_file and base is None and any(_OLD in line for line in lines):
        flavor = str(table["model"].get("flavor") if isinstance(table.get("model"), dict) else "8b")
        named = [each for each in bases[0] if each.endswith(f"_{flavor.lower()}")]
        start = f'Begin it with base = "{(named or ["llama3_8b"])[0]}"'
        start += "" if named else ", or what has its model"
        lines.insert(0, f"{config}: a config of torchtitan before 0.3. {start}, and change these:")
    elif is_file and base not in bases[0] and module.startswith("graph_trainer."):
        lines.insert(0, f"{config}: {wrong_base(base, f'{module}.config_registry', bases[0])}")
    if lines:
        raise ConfigError("\n".join([*lines, *wrong_values]))


def _given_flags(argv: Sequence[str]) -> dict[str, str]:
    """Return by flag, as a key is written, the text of its value; "" where it has none."""
    flags: dict[str, str] = {}
    if {"--quiet", "--verbose"} <= {*argv}:
        raise ConfigError(f"{_FLAGS}: --quiet and --verbose: which of the two? Keep one.")
    for word, after in zip(argv, [*argv[1:], "--"], strict=False):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            value = value if equals or after.startswith("--") else after
            key = name[2:].replace("-", "_")
            if key in ("config", "module") and flags.get(key, value) != value:
                both = f"{name} {flags[key]} and {name} {value}"
                raise ConfigError(f"{_FLAGS}: {both}: which of the two? Keep one.")
            flags[key] = value
    return flags


def _wrong_flags(argv: Sequence[str], command: str, keys: Iterable[str]) -> Iterator[str]:
    """Say which words resemble a flag of the command, or are one of another command."""
    known = {*_FLAGS_OF_ALL, *_FLAGS_OF.get(command, ())}
    for word in argv:
        flag = word.partition("=")[0]
        is_key = flag[2:].replace("-", "_") in keys or re.search("[.:]", flag)
        if not flag.startswith("--") or flag in known or is_key:
            continue
        others = [each for each, flags in _FLAGS_OF.items() if flag in flags]
        if others:
            yield f"{_FLAGS}: {flag} is a flag of `graph-trainer {others[0]}`. Leave it out."
        elif name := _OF_TORCHRUN.get(flag[2:].replace("-", "_")):
            how = f"`{name}=N graph-trainer {command} ...`"
            yield f"{_FLAGS}: {flag} is a flag of torchrun. Set a variable instead: {how}."
        elif guess := did_you_mean(flag, known, "Did you mean {}?", cutoff=0.75):
            yield f"{_FLAGS}: there is no {flag}. {guess}"


def completed_flags() -> dict[str, list[str]]:
    """Return all flags, each with the values that a shell completes: none for most."""
    configs = config_folders()[0]
    schema = json.loads((configs / "schema.json").read_text("utf-8"))
    flags: dict[str, list[str]] = {flag: [] for flag in sum(_FLAGS_OF.values(), _FLAGS_OF_ALL)}
    flags |= {"--config": [], "--hardware": [], "--like": ["graph_trainer", "torchtitan"]}
    flags["--module"] = schema["properties"]["module"]["examples"]
    for file in sorted(configs.glob("*/*.toml")):
        flags["--hardware" if file.parent.name == "hardware" else "--config"].append(file.stem)
    for key, of_type, value in _keys(schema, schema["$defs"]):
        if value:
            known = flags.setdefault(f"--{key}", [])
            for enum in re.findall(r'"enum": (\[.*?\])', json.dumps(value)):  # of items too
                known += json.loads(enum)
            if key.endswith(".dataset") and of_type in ("text", "byte_bpe"):
                known += ["stdlib", "text"]
    return {flag: list(dict.fromkeys(values)) for flag, values in flags.items()}


def _read(text: str, schema: Mapping[str, Any]) -> Any:
    """Read a flag's text as TOML where the key takes numbers alone, else as something right."""
    options = schema.get("anyOf", [schema])
    if text in ("", "None") or not all(each.get("type") in _NUMBERS for each in options):
        return ...
    try:
        return parse_toml(f"value = {text}", "value").get("value", text)
    except ConfigError:
        return text


def _wrong_value(
    key: str, value: Any, schema: Mapping[str, Any], is_flag: bool
) -> tuple[str, str] | None:
    """Return problem and remedy of a value that is not what its schema describes, as `...` is."""
    options = schema.get("anyOf", [schema])
    choices = [choice for each in options for choice in each.get("enum", ())]
    kinds = [each["type"] for each in options if "type" in each]
    if value is ...:
        return None
    if choices and value not in choices:
        return wrong_choice(value, choices)
    fits = not kinds or any(isinstance(value, _TYPES.get(kind, dict)) for kind in kinds)
    is_right = fits and (not isinstance(value, bool) or not kinds or "boolean" in kinds)
    return None if is_right else wrong_type(key, value, kinds, is_flag=is_flag)


def _flat(
    table: Mapping[str, Any], known: _Known, path: str = "", shown: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Yield a file's keys, without indices of lists and as messages show them, and their values."""
    for name, value in table.items():
        key, kinds = path + name, known.get(path + name) or {}
        if isinstance(value, Mapping) and {} in (kinds, *kinds.values()):
            yield from _flat(value, known, f"{key}.", f"{shown}{name}.")
        elif isinstance(value, list) and any(_names_below(known, key)):
            for i, each in enumerate(value):
                if isinstance(each, Mapping):
                    yield from _flat(each, known, f"{key}.", f"{shown}{name}[{i}].")
        else:
            yield key, shown + name, value


def _names_below(known: Iterable[str], section: str) -> list[str]:
    path = f"{section}." if section else ""
    return [key[len(path) :] for key in known if re.fullmatch(rf"{re.escape(path)}\w+", key)]


def _keys(
    schema: Mapping[str, Any], classes: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield key, type of its section and schema of its value."""
    for option in schema.get("anyOf", [schema]):
        properties = classes.get(option.get("$ref", "")[8:], option).get("properties", {})
        kind = properties.get("type", {}).get("const", "")
        if kind:
            yield f"{path}type", "", {"enum": [kind]}
        for name in [each for each in properties if each not in _NO_KEYS]:
            value = properties[name]
            inner = list(_keys(value.get("items", value), classes, f"{path}{name}."))
            yield f"{path}{name}", kind, {} if inner and "items" not in value else value
            yield from inner


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


def import_config_classes() -> None:
    """Import the classes of configs, torchtitan's with them, in a process that compiles nothing.

    torchtitan compiles FlexAttention as it is imported, for which torch imports Inductor: a quarter
    of the time in which a mistake is told. No captured step calls it (see `_model_spec`).
    """
    from unittest.mock import patch

    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}):
        resolve_name("graph_trainer.titan.config.run_config")
