"""Command line flags on top of a config, with torchtitan's own flag rules."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tyro
from torchtitan.config import ConfigManager
from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.fields import (
    NONE,
    field_hints,
    is_nullable,
    is_suppressed,
    section_classes,
    settable_hints,
    settable_keys,
    short_names,
)
from graph_trainer.titan.config.messages import COMMAND_LINE, did_you_mean_key, show
from graph_trainer.titan.config.run_config import NOT_TORCH_COMPILE

# torchtitan chooses the component of a section with a word such as activation-checkpoint:full.
_SUBCOMMAND = re.compile(r"(activation[-_]checkpoint):([a-z-]+)")


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
    named: dict[str, str] = {}
    types: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if match := _SUBCOMMAND.fullmatch(word):
            section, kind = (part.replace("-", "_") for part in match.groups())
            types.setdefault(section, {})["type"] = kind
            continue
        is_type = flag.startswith("--") and flag.endswith(".type")
        if flag not in ("--module", "--config") and not is_type:
            rest.append(word)
            continue
        if not equals:
            value = next(words, "")
        if not value or (not equals and value.startswith("--")):
            example = {"--module": "graph_trainer.llama3", "--config": "debugmodel"}
            raise ConfigError(
                f"{COMMAND_LINE}: {flag} has no value. Write for example "
                f"{flag} {example.get(flag, 'none')}."
            )
        if is_type:
            table = types
            for part in flag[2:].replace("-", "_").split(".")[:-1]:
                table = table.setdefault(part, {})
            table["type"] = value
        else:
            named[flag[2:]] = value
    return Flags(named.get("module"), named.get("config"), types, pass_entries(rest), rest)


def pass_entries(argv: Sequence[str]) -> list[str]:
    """Return the entries of the flag --compile.passes, which is written a,b,c."""
    entries: list[str] = []
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag == "--compile.passes":
            entries += (value if equals else following).split(",")
    return entries


def only_passes(argv: Sequence[str], command: str) -> list[str]:
    """Return the entries of --compile.passes, for a command that takes no other flag.

    Raises:
        ConfigError: the command line has anything else.
    """
    words = 1 if argv and "=" in argv[0] else 2
    if argv and (argv[0].partition("=")[0] != "--compile.passes" or len(argv) != words):
        raise ConfigError(
            f"{COMMAND_LINE}: {command} takes no flag but --compile.passes NAMES, found "
            f"{' '.join(argv)}. Leave the others out."
        )
    return pass_entries(argv)


def parse_flags(config: Any, args: list[str], prog: str) -> Any:
    """Return a copy of `config` with the flags applied.

    Args:
        config: the config that the flags override.
        args: the flags.
        prog: the command's name in the help text.

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
                description=_description(config, prog),
                config=(tyro.conf.AvoidSubcommands,),
                return_unknown_args=True,
            )
    except SystemExit as e:
        if not e.code:
            print(printed.getvalue(), end="")
            raise
        raise ConfigError(_plain_message(printed.getvalue(), args, prog)) from None
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
        value = next((word for word in following if not word.startswith("-")), "")
    given = f" {value}" if value else ""
    remedy = f"`{prog} --help` lists every flag."
    if not name.startswith("--"):
        return ConfigError(
            f"{COMMAND_LINE}: unexpected {show(name)}: every value follows its flag. {remedy}"
        )
    key = name[2:].replace("-", "_")
    known = list(settable_keys(config))
    siblings = [k for k in known if k.rpartition(".")[0] == key.rpartition(".")[0]]
    guess = did_you_mean_key(key, siblings, known)
    for name in known:  # in the spelling of flags
        guess = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.])", f"--{name}", guess)
    section, _, leaf = key.partition(".")
    holder = getattr(config, section, None)
    if section == "compile" and is_suppressed(field_hints(type(holder)).get(leaf)):
        return ConfigError(f"{COMMAND_LINE}: --{key}: {'. '.join(NOT_TORCH_COMPILE)} {remedy}")
    if "." in key and getattr(config, section, 0) is None:
        guess = f"[{section}] is switched off; --{section}.type chooses its component. "
    return ConfigError(f"{COMMAND_LINE}: --{key}{given}: unknown flag. {guess}{remedy}")


def _plain_message(text: str, args: list[str], prog: str) -> str:
    """Return the problem in tyro's framed message as one line, with underscores in flags."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip("│| \t") for line in text.splitlines()]
    # Without UTF-8 the frame is spaces and dashes, and the title a separate paragraph.
    framed = any(line.startswith("╭") for line in lines)
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("╭"):
            continue
        if line and not line.strip("─╰╯-"):
            paragraphs.append([])
        elif line:
            paragraphs[-1].append(line)
    parts = [" ".join(p) for p in (paragraphs if framed else paragraphs[1:]) if p]
    message = parts[0] if parts else " ".join(lines)
    message = re.sub(
        r"--[\w.-]*\w", lambda m: "--" + m.group()[2:].replace("-", "_"), message
    ).rstrip(".")
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
               show predicted beside measured; without --config, with its config
"""


def _description(config: Any, prog: str) -> str:
    sections = "\n".join(_typed_sections(config))
    return _DESCRIPTION.format(plan=_PLAN if prog.endswith("train") else "", sections=sections)


def _typed_sections(config: Any, prefix: str = "") -> Iterator[str]:
    for name, hint in settable_hints(type(config)).items():
        if names := short_names(section_classes(hint)):
            off = [NONE] if is_nullable(hint) else []
            yield f"  --{prefix}{name}.type {{{','.join([*names, *off])}}}"
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from _typed_sections(value, f"{prefix}{name}.")
