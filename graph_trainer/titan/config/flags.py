"""Read a command line into one nested table, and show its help."""

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import tyro
from torchtitan.config import ConfigManager
from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

from graph_trainer.core.toml_file import parse_toml
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.fields import (
    NONE,
    alternatives,
    is_nullable,
    section_classes,
    settable_hints,
    short_names,
)
from graph_trainer.titan.config.messages import COMMAND_LINE, show

# torchtitan chooses the component of a section with a word such as activation-checkpoint:full.
_SUBCOMMAND = re.compile(r"^(activation[-_]checkpoint):([a-z-]+)$")
_EXAMPLES = {
    "--module": "graph_trainer.llama3",
    "--config": "debugmodel",
    "--tyro-print-completion": "bash",
    "--tyro-write-completion": "bash",
}


class FlagText(str):
    """The text of a flag's value. How it is read depends on the type of the field."""

    def read(self, hint: Any) -> Any:
        """Read the text as TOML, for a field of type `hint`.

        What is no TOML value is a string, and so is everything where the field takes nothing but
        strings. None is no value, where the field may have none; a list may be written a,b,c.
        A flag without a value sets a boolean to true.
        """
        kinds = alternatives(hint)
        if self is NO_VALUE:
            return True if bool in kinds else self
        if self == "None" and is_nullable(hint):
            return None
        value = self._as_toml()
        if not isinstance(value, str):
            return str(self) if all(map(_is_text, kinds)) else value
        lists = [kind for kind in kinds if get_origin(kind) in (list, tuple)]
        if lists and not self.startswith("["):
            (entry, *_) = get_args(lists[0])
            return [FlagText(part).read(entry) for part in self.split(",")]
        return value

    def _as_toml(self) -> Any:
        try:
            table = parse_toml(f"value = {self}", "value")
        except ConfigError:
            return str(self)
        return table["value"] if len(table) == 1 else str(self)


def _is_text(kind: Any) -> bool:
    return kind in (str, type(None)) or get_origin(kind) is Literal


NO_VALUE = FlagText("")
"""The value of a flag that has none."""


@dataclass(frozen=True)
class Flags:
    """A command line."""

    module: str | None
    config: str | None
    table: dict[str, Any]
    """Nested table of the keys: values are `FlagText`, or false for `--section.no-key`."""
    shown: list[str]
    """The words that ask for help or for a shell's completion instead of a run."""

    def keys(self) -> frozenset[str]:
        """Return the keys and tables that are set, as `section` and `section.key`."""
        return frozenset(_paths(self.table, ""))


def _paths(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def read_flags(argv: Sequence[str]) -> Flags:
    """Read a command line.

    Raises:
        ConfigError: --module or --config without a value, a word that no flag takes, or one key
            as a value and as a section.
    """
    words = [_SUBCOMMAND.sub(r"--\1.type=\2", word) for word in argv]
    values, words = take_flags(words, _EXAMPLES)
    module, config = values.pop("--module", None), values.pop("--config", None)
    shown = [word for word in words if word in ("-h", "--help")]
    for flag, shell in values.items():
        shown += [flag, shell]
    words = [word for word in words if word not in shown]
    table: dict[str, Any] = {}
    while words:
        name, equals, text = words.pop(0).partition("=")
        *sections, key = name[2:].replace("-", "_").split(".")
        if not name.startswith("--") or not key:
            raise ConfigError(
                f"{COMMAND_LINE}: unexpected {show(name)}: every value follows its flag, and a "
                "list is one value: a,b,c or [1, 2]. `graph-trainer train --help` lists every flag."
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
    return Flags(module, config, table, shown)


def take_flags(
    argv: Sequence[str], examples: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Take flags that have a value out of a command line.

    Args:
        argv: the command line.
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


def show_help(config: Any, words: Sequence[str], prog: str) -> None:
    """Print what `words` ask for, --help or a shell's completion, with the values of `config`.

    Args:
        prog: the command's name in the text.

    Raises:
        SystemExit: always; with code 0 but for a shell that tyro does not know.
    """
    registry = tyro.constructors.ConstructorRegistry()
    ConfigManager.register_tyro_rules(registry)
    registry.primitive_rule(_texts)
    tyro.cli(
        type(config),
        args=list(words),
        default=config,
        registry=registry,
        prog=prog,
        description=_DESCRIPTION.format(
            plan=_PLAN if prog.endswith("train") else "",
            sections="\n".join(_typed_sections(config)),
        ),
        config=(tyro.conf.AvoidSubcommands,),
    )
    sys.exit(0)


def _texts(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[str, ...]] | None:
    """Show tuples of texts as torchtitan's rule shows lists: a,b,c."""
    if kind.type != tuple[str, ...]:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,C,...",
        instance_from_str=lambda words: tuple(words[0].split(",")),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(value)],
    )


_DESCRIPTION = """\
Train a model from one captured graph.

--module NAME  a package of configs (default graph_trainer.llama3)
--config NAME  one of its configs, or a path to a .toml file (default debugmodel)
{plan}
Flags override the file, the file overrides its base. Values are written as in TOML; text needs no \
quotes, a list of texts is a,b,c, and None is no value. The sections below that can be one of \
several components take --SECTION.type:
{sections}"""

_PLAN = """\
--plan FILE    train only what `graph-trainer plan --save FILE` planned, and at the end
               show predicted beside measured; give its --config and flags again
"""


def _typed_sections(config: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in settable_hints(type(config)).items():
        if names := short_names(section_classes(hint)):
            off = [NONE] if is_nullable(hint) else []
            yield f"  --{prefix}{name}.type {{{','.join([*names, *off])}}}"
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from _typed_sections(value, f"{prefix}{name}.")
