"""Command line flags on top of a config, with torchtitan's own flag rules."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tyro
from torchtitan.config import ConfigManager
from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.fields import (
    NONE,
    is_nullable,
    section_classes,
    settable_hints,
    short_names,
)
from graph_trainer.titan.config.merge import apply_table
from graph_trainer.titan.config.messages import COMMAND_LINE, show

# torchtitan chooses the component of a section with a word such as activation-checkpoint:full.
_SUBCOMMAND = re.compile(r"^(activation[-_]checkpoint):([a-z-]+)$")
_TYPE = re.compile(r"--[^=]*\.type(=|$)")
_PASSES = "--compile.passes"


@dataclass(frozen=True)
class Flags:
    """The command line, split into parts that are read one after the other."""

    module: str | None
    config: str | None
    types: dict[str, Any]
    """Nested table of the `--section.type name` flags."""
    passes: list[str]
    """The entries of --compile.passes, which stays in `rest`."""
    rest: list[str]


def flag_keys(args: Sequence[str]) -> frozenset[str]:
    """Return the keys that a command line's flags set, as `section.key`."""
    names = (a[2:].partition("=")[0].replace("-", "_") for a in args if a.startswith("--"))
    # --section.no_key is how a boolean is set to false.
    return frozenset(k for name in names for k in (name, name.replace(".no_", ".")))


def split_flags(argv: Sequence[str]) -> Flags:
    """Take --module, --config and --<section>.type out of the command line.

    Raises:
        ConfigError: one of these without a value.
    """
    words = [_SUBCOMMAND.sub(r"--\1.type=\2", word) for word in argv]
    examples = {word.partition("=")[0]: "none" for word in words if _TYPE.match(word)}
    examples |= {"--module": "graph_trainer.llama3", "--config": "debugmodel"}
    values, rest = take_flags(words, examples)
    module, config = values.pop("--module", None), values.pop("--config", None)
    types: dict[str, Any] = {}
    for flag, value in values.items():
        table = types
        *sections, key = flag[2:].replace("-", "_").split(".")
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
    passes, _ = take_flags(rest, {_PASSES: "default"})
    return Flags(module, config, types, passes.get(_PASSES, "").split(","), rest)


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


def parse_flags(config: Any, args: list[str], prog: str) -> Any:
    """Return a copy of `config` with the flags applied; `prog` is the command's name in the help.

    Raises:
        ConfigError: an unknown flag, or a value that it does not take.
        SystemExit: after --help, with code 0.
    """
    registry = tyro.constructors.ConstructorRegistry()
    ConfigManager.register_tyro_rules(registry)
    registry.primitive_rule(_texts)
    printed = io.StringIO()
    try:
        with contextlib.ExitStack() as redirected:
            # Help goes to the terminal unchanged; an error is caught and worded as ours.
            if not {"-h", "--help"} & set(args):
                redirected.enter_context(contextlib.redirect_stdout(printed))
                redirected.enter_context(contextlib.redirect_stderr(printed))
            parsed, unknown = tyro.cli(
                type(config),
                args=args,
                default=config,
                registry=registry,
                prog=prog,
                description=_DESCRIPTION.format(
                    plan=_PLAN if prog.endswith("train") else "",
                    sections="\n".join(_typed_sections(config)),
                ),
                config=(tyro.conf.AvoidSubcommands,),
                return_unknown_args=True,
            )
    except SystemExit as e:
        if not e.code:
            print(printed.getvalue(), end="")
            raise
        text = printed.getvalue()
        refused = _refused_value(text, args, config)
        raise refused or ConfigError(_plain_message(text, args, prog)) from None
    except Exception as e:  # the checks in a config class refused the merged values
        raise ConfigError(
            f"{COMMAND_LINE}: {' '.join(args)}: refused: {e}. Change one of these flags."
        ) from e
    if unknown:
        raise _unknown_flag(unknown, config, prog)
    return parsed


def _texts(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[str, ...]] | None:
    """Write tuples of texts as torchtitan's rule writes lists: a,b,c."""
    if kind.type != tuple[str, ...]:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,C,...",
        instance_from_str=lambda words: tuple(words[0].split(",")),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(value)],
    )


def _unknown_flag(unknown: list[str], config: Any, prog: str) -> ConfigError:
    name, equals, value = next((u for u in unknown if u.startswith("-")), unknown[0]).partition("=")
    if not equals:  # the word that follows it, unless that is a flag
        following = unknown[unknown.index(name) + 1 :][:1]
        value = next((word for word in following if not word.startswith("--")), "")
    remedy = f"`{prog} --help` lists every flag."
    if not name.startswith("--"):
        return ConfigError(
            f"{COMMAND_LINE}: unexpected {show(name)}: every value follows its flag. {remedy}"
        )
    return _as_in_a_file(config, name, value) or ConfigError(
        f"{COMMAND_LINE}: {name} {value}: unknown flag. {remedy}"
    )


def _as_in_a_file(config: Any, name: str, value: str) -> ConfigError | None:
    """Return the error of a file with this text as the key's value; None where it has none."""
    table: Any = value
    for part in reversed(name[2:].replace("-", "_").split(".")):
        table = {part: table}
    try:
        apply_table(config, table, COMMAND_LINE)
    except ConfigError as error:
        return error
    return None


def _refused_value(text: str, args: list[str], config: Any) -> ConfigError | None:
    """Return our error for a value that tyro could not read; None where its message is another."""
    named = re.search(r"Error parsing\s+(--[\w.-]*\w):", text)
    if named is None:
        return None
    key = named[1].replace("-", "_")
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("-", "_") == key:
            value = value if equals else next(iter(args[i + 1 :]), "")
            return _as_in_a_file(config, named[1], value)
    return None


def _plain_message(text: str, args: list[str], prog: str) -> str:
    """Return the problem in tyro's message as one line, with underscores in flags."""
    # tyro writes a title, the problem and help, with a line of dashes in between.
    _, *parts = re.split(r"\n\s*-{3,}\s*\n", text)
    message = " ".join((parts[0] if parts else text).split()).rstrip(".")
    message = re.sub(r"--[\w.-]*\w", lambda m: "--" + m.group()[2:].replace("-", "_"), message)
    if section := re.match(r"Error parsing ([a-z_.-]+):", message):
        # The check of a section, whose message has no flag in it.
        prefix = f"--{section.group(1).replace('-', '_')}."
        given = [
            " ".join(args[i : i + 2])
            for i, a in enumerate(args)
            if a.replace("-", "_").startswith(prefix.replace("-", "_"))
        ]
        message += f" (given {', '.join(given)})" if given else ""
    return f"{COMMAND_LINE}: {message}. `{prog} --help` says what each flag takes."


_DESCRIPTION = """\
Train a model from one captured graph.

--module NAME  a package of configs (default graph_trainer.llama3)
--config NAME  one of its configs, or a path to a .toml file (default debugmodel)
{plan}
Flags override the file, the file overrides its base. Lists are written a,b,c. \
The sections below that can be one of several components take --SECTION.type:
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
