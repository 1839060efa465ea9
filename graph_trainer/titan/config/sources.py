"""Where the keys of a config come from: the flags, the file and the registry entry they name."""

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints

from torchtitan.trainer import Trainer

from graph_trainer.core.text import place_of
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.config_names import (
    DEFAULT_CONFIG,
    DEFAULT_MODULE,
    find_config,
    no_such_module,
)
from graph_trainer.titan.config.remedies import show, wrong_base
from graph_trainer.titan.config.run_config import GraphTrainerConfig, to_graph_trainer_config
from graph_trainer.titan.config.toml_file import read_toml
from graph_trainer.titan.optimizer import with_shared_settings

COMMAND_LINE = "command line"
"""What messages call the place that flags come from."""

UNSET = "unset"
"""The key that lists a table's keys whose value is None, which TOML cannot write."""


@dataclass
class Origins:
    """Which keys of a merged table file and flags set."""

    base: str = "config"
    """What messages call the registry entry, which has the keys that nothing else sets."""
    where: dict[str, str] = dataclasses.field(default_factory=dict)
    """Key -> the file or the command line; entries of lists by index, as `section.list.0.key`."""

    def of(self, *keys: str) -> str:
        """Return the command line if a flag set one of these keys, a key below it or the table
        around it; otherwise the file if that did; otherwise ""."""
        places: set[str] = set()
        for key in keys:
            path = f"{key.replace('[', '.').replace(']', '')}."
            for key, where in self.where.items():
                if path.startswith(f"{key}.") or f"{key}.".startswith(path):
                    places.add(where)
        return COMMAND_LINE if COMMAND_LINE in places else "".join(places)


CONFIGURED: Any = object()
"""Stands for the value that the config has."""


class Problem(NamedTuple):
    """One thing that is wrong with a config."""

    key: str
    problem: str
    """What is wrong, a clause."""
    remedy: str
    """What to write instead, a sentence."""
    others: tuple[str, ...] = ()
    """Other keys that decide; a flag may have set one of them."""
    value: Any = CONFIGURED
    """The value to show; `CONFIGURED` for the config's value of the key."""


def refusal(problems: Iterable[Problem], origins: Origins) -> ConfigError:
    """Make the error of all problems, a line each, with the place that set the key.

    Where a file or a flag set only another key that decides, the line names that place, and the
    registry entry that the value comes from.
    """
    lines = []
    for key, problem, remedy, others, value in problems:
        key_origin = origins.of(key)
        deciding = origins.of(*others)
        of_entry = ""
        if value is not None and deciding and not key_origin:
            of_entry = f" of {origins.base}"
        place = deciding or key_origin or origins.base
        if key_origin == COMMAND_LINE:
            place = key_origin
        line = f"{place}: {key} = {show(value)}{of_entry}: {problem.rstrip('.')}. {remedy}"
        lines.append(line.rstrip())
    return ConfigError("\n".join(lines))


def unreadable(key: str, value: Any, error: ConfigError, *others: str) -> Problem:
    """Make the problem of a key that names what cannot be read; the error has the remedy."""
    return Problem(key, str(error).removeprefix(f"{key} {value}: "), "", others)


# torchtitan chooses the component of a section with a word such as activation-checkpoint:full.
_SUBCOMMAND = re.compile(r"^(activation[-_]checkpoint):([a-z-]+)$")
_SHORT = {f"--{level}": f"--metrics.console={level}" for level in ("quiet", "verbose")}
_EXAMPLES = {"--module": "graph_trainer.llama3", "--config": "debugmodel"}


class FlagText(str):
    """The text of a flag's value. How it is read depends on the type of the field."""


NO_VALUE = FlagText("")
"""The value of a flag that has none."""


@dataclass(frozen=True)
class Flags:
    """A command line."""

    module: str | None
    config: str | None
    table: dict[str, Any]
    """Nested table of the keys: values are `FlagText`, or false for `--section.no-key`."""
    shown: list[str] | None
    """The words after --help, to look for; None without it."""


def read_flags(argv: Sequence[str]) -> Flags:
    """Read a command line.

    Raises:
        ConfigError: --module or --config without a value, a word that no flag takes, or one key
            as a value and as a section.
    """
    words = [_SUBCOMMAND.sub(r"--\1.type=\2", word) for word in argv]
    words = [_SHORT.get(word, word) for word in words]
    values, words = take_flags(words, _EXAMPLES)
    shown = None
    for place, word in enumerate(words):
        if word in ("-h", "--help"):
            shown = [*takewhile(lambda word: not word.startswith("-"), words[place + 1 :])]
            del words[place : place + 1 + len(shown)]
            break
    table: dict[str, Any] = {}
    while words:
        name, equals, text = words.pop(0).partition("=")
        *sections, key = name[2:].replace("-", "_").split(".")
        if not name.startswith("--") or not key:
            guess = f"Did you mean --{name} {text}? " if equals and name[:1].isalpha() else ""
            raise ConfigError(
                f"{COMMAND_LINE}: unexpected {show(name)}: {guess}Every value follows its flag, "
                "and a list is one value: a,b,c or [1, 2]. `graph-trainer train --help` lists "
                "every flag."
            )
        value: FlagText | bool = NO_VALUE
        if equals:
            value = FlagText(text)
        elif words and not words[0].startswith("--"):
            value = FlagText(words.pop(0))
        elif key.startswith("no_"):
            key, value = key.removeprefix("no_"), False
        inside = table
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                break
        if not isinstance(inside, dict) or isinstance(inside.get(key), dict):
            raise ConfigError(
                f"{COMMAND_LINE}: {name}: one flag gives this section a value and another one of "
                "its keys. Keep one of both."
            )
        inside[key] = value
    return Flags(values.get("--module"), values.get("--config"), table, shown)


def take_flags(
    argv: Sequence[str], examples: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Take flags that have a value out of a command line.

    Args:
        examples: by flag, an example of its value.

    Returns:
        Value by flag, and the other words.

    Raises:
        ConfigError: one of the flags without a value.
    """
    values: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in examples:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value or (not equals and value.startswith("--")):
            raise ConfigError(
                f"{COMMAND_LINE}: {flag} has no value. Write for example {flag} {examples[flag]}."
            )
        values[flag] = value
    return values, rest


def with_none(value: Any, where: str, path: str = "") -> Any:
    """Return parsed TOML with None for the keys that a table's `unset = ["key", ...]` lists.

    Raises:
        ConfigError: `unset` is not a list of names, or one of them is set as well.
    """
    if isinstance(value, list):
        return [with_none(entry, where, path) for entry in value]
    if not isinstance(value, dict):
        return value
    prefix = f"{path}." if path else ""
    unset = value.get(UNSET, [])
    table = {k: with_none(v, where, prefix + k) for k, v in value.items() if k != UNSET}
    if not isinstance(unset, list) or not all(isinstance(entry, str) for entry in unset):
        remedy = 'Write unset = ["key"] with the keys of this section that shall have no value.'
        raise ConfigError(f"{where}: {prefix}{UNSET} = {show(unset)}: not key names. {remedy}")
    for key in unset:
        if key in table:
            raise ConfigError(
                f"{where}: {prefix}{key} = {show(table[key])}: both set and listed in {UNSET}. "
                "Keep one of both."
            )
    return table | dict.fromkeys(unset)


def read_source(
    module: str | None, name: str | None
) -> tuple[str, GraphTrainerConfig, dict[str, Any]]:
    """Find and read the config that the flags name.

    Args:
        module: the value of --module, which overrides the file's `module`.
        name: the value of --config; None means debugmodel.

    Returns:
        What messages call the file, as a rule its name; the registry entry that it changes; the
        document without `module` and `base`, with None for the keys that it lists as unset.

    Raises:
        ConfigError: there is no such module or config, or the file cannot be used.
    """
    registry = registry_module(module or DEFAULT_MODULE)
    path = find_config(registry.__name__, name, lambda: registry_functions(registry))
    name = name or DEFAULT_CONFIG
    where, table = f"config {name}", {"base": name}
    if path is not None:
        where, table = str(path), with_none(read_toml(path, "--config"), str(path))
    in_file, base = table.pop("module", DEFAULT_MODULE), table.pop("base", None)
    if not isinstance(in_file, str):
        raise ConfigError(
            f"{where}: module = {show(in_file)}: expected a string. Write module = "
            f'"{DEFAULT_MODULE}".'
        )
    if module is None:
        registry = registry_module(in_file, where)
    functions = registry_functions(registry)
    if not isinstance(base, str) or base not in functions:
        raise ConfigError(f"{where}: {wrong_base(base, registry.__name__, [*functions])}")
    try:
        entry = functions[base]()
        if not isinstance(entry, GraphTrainerConfig):
            entry = to_graph_trainer_config(entry)
    except Exception as error:  # a package or a GPU that the entry needs, or what we refuse
        reason = str(error).rstrip(".")
        raise ConfigError(
            f"{where}: base = {show(base)}: {reason}. Or choose another entry of "
            f"{registry.__name__}."
        ) from error
    entry.optimizer = with_shared_settings(entry.optimizer)  # a function may have set another
    entry.module, entry.base = registry.__name__.removesuffix(".config_registry"), base
    return where, entry, table


def registry_module(name: str, where: str | None = None) -> ModuleType:
    """Import the module of registry functions that `--module name` means.

    Args:
        name: a package with a config_registry module, or such a module itself; "graph_trainer."
            may be left out.
        where: what names it, for the error message; None means the flag.

    Raises:
        ConfigError: there is none, or its import fails.
    """
    asked = f"--module {name}" if where is None else f"{where}: module = {show(name)}"
    here, without_entries = Path.cwd(), None
    inside = here.name == name and (here / "config_registry.py").is_file()
    if inside and str(here.parent) not in sys.path:
        sys.path.append(str(here.parent))
    if all(part.isidentifier() for part in name.split(".")):
        for candidate in (f"{name}.config_registry", f"graph_trainer.{name}.config_registry", name):
            try:
                module = importlib.import_module(candidate)
            except ModuleNotFoundError as e:
                # Missing is the candidate itself or a package above it: try the next.
                if e.name is not None and (candidate + ".").startswith(e.name + "."):
                    continue
                raise ConfigError(f"{asked}: its import fails: {e}. Install it.") from e
            except Exception as e:  # packages that do not fit each other raise anything
                raise ConfigError(f"{asked}: its import fails{place_of(e)}: {e}. Mend it.") from e
            if registry_functions(module):
                return module
            if candidate != name:  # a registry, and no other module that happens to have the name
                without_entries = without_entries or module
    if without_entries:
        raise ConfigError(
            f"{asked}: {without_entries.__name__} has no config: a public function without "
            "arguments that is declared to return one. Write for example `def small() -> "
            "graph_trainer.titan.trainer.GraphTrainer.Config:` in config_registry.py."
        )
    raise no_such_module(asked, name)


def registry_functions(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """Return the entries of a registry module, by name: its public functions without arguments that
    are declared to return a config. A file that names any other function cannot call it."""
    entries: dict[str, Callable[[], Any]] = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        is_own = function.__module__ == module.__name__ and not name.startswith("_")
        if is_own and not inspect.signature(function).parameters:
            declared = get_type_hints(function).get("return")
            if isinstance(declared, type) and issubclass(declared, Trainer.Config):
                entries[name] = function
    return entries
