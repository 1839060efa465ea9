"""What users read of the keys: --help, and the JSON schema for editors."""

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Union, get_type_hints

import docstring_parser
from pydantic import TypeAdapter

from graph_trainer.core.passes.catalogue import load_pass, registered_passes
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.build import (
    NONE,
    Field,
    class_path,
    components,
    required_fields,
    settable_fields,
    type_of,
)
from graph_trainer.titan.config.config_names import DEFAULT_MODULE, known_modules
from graph_trainer.titan.config.remedies import GUESS, show
from graph_trainer.titan.config.run_config import (
    GraphCompileConfig,
    GraphTrainerConfig,
    compile_class,
)
from graph_trainer.titan.config.sources import UNSET, registry_functions, registry_module

_Schema = dict[str, Any]


def toml_schema(passes: Iterable[str] = ()) -> _Schema:
    """Make the JSON schema (draft 2020-12) of a config file, as plain dictionaries.

    It describes what `load_config` takes from a file: sections, keys, types, choices, and our keys
    `base`, `module`, `type` and `unset`, each with its documentation. Checks that need two keys
    or the number of ranks stay with the loader.

    Args:
        passes: passes of a user's own that the file may name, as "package.module:name".

    Raises:
        PassError: an entry of `passes` names no pass.
    """
    of_user = [entry for entry in passes if ":" in entry]
    writer = _Writer(compile_class(of_user), of_user)
    top = writer.table(GraphTrainerConfig)
    top["properties"] = {
        "base": {
            "type": "string",
            "description": "The registry entry that this file changes: the model and every value "
            "that is not written here.",
        },
        "module": {
            "type": "string",
            "description": "The package whose config_registry holds `base`.",
            "default": DEFAULT_MODULE,
            "examples": known_modules(),
        },
        **top["properties"],
    }
    bases: list[_Schema] = []
    for module in known_modules():
        entries = registry_functions(registry_module(module))
        for entry in entries.values():
            # sections that the entries of one module alone have
            known = settable_fields(get_type_hints(entry)["return"])
            for name in known.keys() - settable_fields(GraphTrainerConfig).keys():
                top["properties"][name] = writer.value(known[name])
        # where `module` is this one, `base` is one of its entries
        names = {"enum": [module, module.removeprefix("graph_trainer.")]}
        named: _Schema = {"properties": {"module": names}}
        if module != DEFAULT_MODULE:
            named["required"] = ["module"]
        bases.append({"if": named, "then": {"properties": {"base": {"enum": [*entries]}}}})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "graph_trainer config",
        **top,
        "description": "A run's config. Flags override this file; what it leaves out comes from "
        "the registry entry that `base` names.",
        "required": ["base"],
        "allOf": bases,
        "$defs": dict(sorted(writer.definitions.items())),
    }


class _Writer:
    """Write schemas of config classes; a class that sections share has one, under $defs."""

    def __init__(self, compile_type: type, own_passes: list[str]) -> None:
        self.definitions: dict[str, _Schema] = {}
        self.compile_type = compile_type
        self.own_passes = own_passes

    def table(self, cls: type) -> _Schema:
        """Describe a section that configures `cls`, or the entry of a list of tables."""
        documented = _documentation(cls)
        properties: dict[str, _Schema] = {}
        nullable: list[str] = []
        for name, field in settable_fields(cls).items():
            text = {"description": documented[name]} if name in documented else {}
            properties[name] = text | self.value(field)
            nullable += [name] if field.nullable else []
        if nullable:
            properties[UNSET] = {
                "description": "Keys of this section that shall have no value.",
                "type": "array",
                "items": {"enum": nullable},
            }
        if cls is self.compile_type:
            # The entries of these two lists are names that a type cannot list.
            known = list(registered_passes())
            names = {"enum": ["default", *known]}
            of_user = {"type": "string", "pattern": ":", "description": "package.module:name"}
            properties["passes"]["items"] = {"anyOf": [names, of_user]}
            disabled = [*known, *(load_pass(entry).name for entry in self.own_passes)]
            properties["disable_passes"]["items"] = {"enum": disabled}
        schema: _Schema = {"type": "object"}
        if about := _class_documentation(cls):
            schema["description"] = about
        schema |= {"properties": properties, "additionalProperties": False}
        return schema

    def value(self, field: Field) -> _Schema:
        """Describe the values of a field."""
        if field.sections:
            return self.section(field)
        if field.entry:
            needed = required_fields(field.entry)
            table = self.table(field.entry) | ({"required": needed} if needed else {})
            return {"type": "array", "items": self.define(field.entry, table)}
        # TOML cannot write None; `unset` stands for it.
        union: Any = Union[tuple(field.options)]  # noqa: UP007
        return TypeAdapter(union).json_schema()

    def section(self, field: Field) -> _Schema:
        """Describe the components that a section can configure, one of which `type` chooses.

        Without `type` the section keeps the component that `base` chose, so the keys of each
        component are allowed.
        """
        names = components(field.sections)
        if not names:
            (cls,) = field.sections
            cls = self.compile_type if cls is GraphCompileConfig else cls
            return self.define(cls, self.table(cls))
        choices = []
        for name, cls in names.items():
            schema = self.table(cls)
            kind = {"const": name, "description": _class_documentation(cls) or f'"{name}"'}
            schema["properties"] = {"type": kind, **schema["properties"]}
            choices.append(self.define(cls, schema))
        of_user = {"type": "string", "pattern": ":", "description": "package.module:Class.Config"}
        choices.append({"type": "object", "required": ["type"], "properties": {"type": of_user}})
        if field.nullable:
            off = {"const": NONE, "description": "Switched off."}
            switched_off = {"type": "object", "required": ["type"], "properties": {"type": off}}
            choices.append(switched_off | {"additionalProperties": False})
        return {"anyOf": choices}

    def define(self, cls: type, schema: _Schema) -> _Schema:
        name = class_path(cls).replace(":", ".")
        self.definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}


def _documentation(cls: type) -> dict[str, str]:
    """Return field name -> its documentation, with the fields of base classes."""
    documentation: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            params = docstring_parser.parse_from_object(base).params
            documentation |= {
                p.arg_name: " ".join(p.description.split()) for p in params if p.description
            }
    return documentation


def _class_documentation(cls: type) -> str:
    doc = inspect.cleandoc(cls.__doc__ or "")
    # @dataclass writes the signature where a class has no docstring.
    first = " ".join(doc.partition("\n\n")[0].split())
    return "" if doc.startswith(f"{cls.__name__}(") else first


def help_text(config: Any, words: Sequence[str], prog: str) -> str:
    """Format the keys of a config, each with what it takes, its value and its documentation.

    Args:
        words: what to look for in keys and documentation; without any, all is shown.
        prog: the command's name in the text.

    Raises:
        ConfigError: no key has all of the words.
    """
    asked = [word.lower().replace("-", "_") for word in words]
    keys = []
    for key, takes, value, text in _keys(config, ""):
        if all(word in f"{key} {text}".lower() for word in asked):
            filled = textwrap.fill(text, 94, initial_indent="      ", subsequent_indent="      ")
            keys.append(f"  --{key} {takes} = {show(value)}\n{filled}".rstrip())
    if not keys:
        sections = settable_fields(type(config))
        guess = did_you_mean(words[0], sections, GUESS)
        raise ConfigError(
            f"--help {' '.join(words)}: no key has that in its name or documentation. {guess}"
            f"Sections: {', '.join(sections)}."
        )
    if words:
        return "\n".join(keys)
    of_command = _OWN.get(prog.rpartition(" ")[2], "")
    return "\n".join([_DESCRIPTION.format(own=of_command, prog=prog), *keys])


def _keys(config: Any, prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    """Yield key, what it takes, value and documentation."""
    documented = _documentation(type(config))
    for name, field in settable_fields(type(config)).items():
        key, value, text = prefix + name, getattr(config, name), documented.get(name, "")
        if names := components(field.sections):
            known = [*names, NONE] if field.nullable else [*names]
            of = NONE if value is None else type_of(value, field.sections)
            yield f"{key}.type", f"{{{','.join(known)}}}", of, text
        entries = value if field.entry and value else ()
        for i, entry in enumerate(entries):
            yield from _keys(entry, f"{key}.{i}.")
        if dataclasses.is_dataclass(value):
            yield from _keys(value, f"{key}.")
        elif not field.sections and not entries:
            takes = [
                f"{{{','.join(map(str, typing.get_args(option)))}}}"
                if typing.get_origin(option) is typing.Literal
                else str(getattr(typing.get_origin(option) or option, "__name__", option)).upper()
                for option in field.options
            ]
            yield key, "|".join(takes), value, text


_DESCRIPTION = """\
usage: {prog} [--module NAME] [--config NAME] [--section.key VALUE]

--module NAME  a package of configs (default graph_trainer.llama3)
--config NAME  one of its configs, or a path to a .toml file (default debugmodel)
--quiet        show steps, warnings and errors alone; --verbose all that torchtitan logs
--help WORD    only the keys that have the word in name or documentation, such as training or lr
{own}
Flags override the file, the file overrides its base. Values are written as in TOML; text needs no
quotes, a list of texts is a,b,c, and None means no value. The keys, and their values here:
"""

_OWN = {
    "train": """\
--dry-run      check the config, print it, the ranks and what the run will need, and end
--plan FILE    train only what `graph-trainer plan --save FILE` planned, and at the end
               show predicted beside measured; give its --config and flags again
""",
    "config": """\
--schema       print the JSON schema of config files, from which an editor completes them
""",
}
