"""The config files' JSON schema, from which editors complete and check them."""

import dataclasses
import inspect
import typing
from collections.abc import Iterable
from typing import Any, Literal

import docstring_parser

from graph_trainer.titan.config import kinds
from graph_trainer.titan.config.fields import (
    alternatives,
    bare,
    field_hints,
    is_nullable,
    is_suppressed,
    section_classes,
)
from graph_trainer.titan.config.merge import UNSET
from graph_trainer.titan.config.run_config import GraphCompileConfig, GraphTrainerConfig
from graph_trainer.titan.config.sources import (
    DEFAULT_MODULE,
    known_modules,
    registry_functions,
    registry_module,
)

_Schema = dict[str, Any]

_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}


def toml_schema() -> _Schema:
    """The JSON schema (draft 2020-12) of a config file, as plain dictionaries.

    It says what `load_config` takes from a file: sections, keys, types, choices, and our own
    keys `base`, `module`, `type` and `unset`, each with its documentation. Checks that need
    two keys or the number of ranks stay with the loader.
    """
    writer = _Writer()
    top = writer.table(GraphTrainerConfig)
    top["properties"] = {
        "base": {
            "type": "string",
            "description": "The registry entry that this file changes: the model and every value "
            "that is not written here.",
        },
        "module": {
            "type": "string",
            "description": "The package whose config_registry holds `base`. Left out: "
            f"{DEFAULT_MODULE}.",
            "examples": list(known_modules()),
        },
        **top["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "graph_trainer config",
        **top,
        "description": "A run's config. Flags override this file; what it leaves out comes from "
        "the registry entry that `base` names.",
        "required": ["base"],
        "allOf": [_entries(module) for module in known_modules()],
        "$defs": dict(sorted(writer.definitions.items())),
    }


def _entries(module: str) -> _Schema:
    """`base` is one of the module's entries, where `module` names this one."""
    named: _Schema = {
        "properties": {"module": {"enum": [module, module.removeprefix("graph_trainer.")]}}
    }
    if module != DEFAULT_MODULE:
        named["required"] = ["module"]
    entries = list(registry_functions(registry_module(module)))
    return {"if": named, "then": {"properties": {"base": {"enum": entries}}}}


class _Writer:
    """Schemas of config classes; those that sections share stand once, under $defs."""

    def __init__(self) -> None:
        self.definitions: dict[str, _Schema] = {}

    def table(self, cls: type) -> _Schema:
        """A section that configures `cls`, or the entry of a list of tables."""
        hints = {k: h for k, h in field_hints(cls).items() if not is_suppressed(h)}
        documented = _documentation(cls)
        properties: dict[str, _Schema] = {}
        for name, hint in hints.items():
            said: _Schema = {"description": documented[name]} if name in documented else {}
            properties[name] = said | self.value(hint)
        nullable = [name for name, hint in hints.items() if is_nullable(hint)]
        if nullable and UNSET not in hints:
            properties[UNSET] = {
                "description": "Keys of this section that shall have no value.",
                "type": "array",
                "items": {"enum": nullable},
            }
        if cls is GraphCompileConfig:
            _name_the_passes(properties)
        schema: _Schema = {"type": "object"}
        if text := _class_documentation(cls):
            schema["description"] = text
        schema |= {"properties": properties, "additionalProperties": False}
        return schema

    def value(self, hint: Any) -> _Schema:
        sections = section_classes(hint)
        if sections:
            return self.section(sections, is_nullable(hint))
        options = [self.plain(a) for a in alternatives(hint) if a is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def plain(self, option: Any) -> _Schema:
        option = bare(option)
        origin, args = typing.get_origin(option), typing.get_args(option)
        if option is Any:
            return {}
        if origin is Literal:
            return {"enum": list(args)}
        if origin is list:
            return {"type": "array", "items": self.entry(args[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.entry(args[1])}
        if origin is tuple:
            items = [self.entry(a) for a in args]
            return {
                "type": "array",
                "prefixItems": items,
                "minItems": len(items),
                "maxItems": len(items),
            }
        if option in _PLAIN:
            return {"type": _PLAIN[option]}
        raise TypeError(f"a config field of type {option} has no JSON schema")

    def entry(self, hint: Any) -> _Schema:
        """An entry of a list or of a free table; a dataclass there has to be complete."""
        if not section_classes(hint):
            return self.value(hint)
        (cls,) = section_classes(hint)
        needed = [
            f.name
            for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        return self.define(cls, self.table(cls) | ({"required": needed} if needed else {}))

    def section(self, members: list[type], nullable: bool) -> _Schema:
        """One of the components that the section can configure, chosen by its `type`.

        Without `type` the section goes on with the one that `base` chose, so the keys of
        each of them may stand there.
        """
        names = kinds.short_names(members)
        if not names:
            (cls,) = members
            return self.define(cls, self.table(cls))
        choices = []
        for name, path in names.items():
            cls = kinds.import_class(path)
            schema = self.table(cls)
            kind = {"const": name, "description": _class_documentation(cls) or f'"{name}"'}
            schema["properties"] = {"type": kind, **schema["properties"]}
            choices.append(self.define(cls, schema))
        own = {"type": "string", "pattern": ":", "description": "package.module:Class.Config"}
        choices.append({"type": "object", "required": ["type"], "properties": {"type": own}})
        if nullable:
            off = {"const": kinds.NONE, "description": "Switched off."}
            choices.append(
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": off},
                    "additionalProperties": False,
                }
            )
        return {"anyOf": choices}

    def define(self, cls: type, schema: _Schema) -> _Schema:
        name = kinds.class_path(cls).replace(":", ".")
        self.definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}


def _name_the_passes(properties: dict[str, _Schema]) -> None:
    """The entries of [compile]'s two lists are names that a type cannot say."""
    from graph_trainer.core.passes.catalogue import registered_passes

    known = list(registered_passes())
    properties["passes"]["items"] = {"enum": ["default", *known]}
    properties["disable_passes"]["items"] = {"enum": known}


def _documentation(cls: type) -> dict[str, str]:
    """Field name -> its documentation, those of base classes included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            params = docstring_parser.parse_from_object(base).params
            found |= {p.arg_name: _joined([p.description]) for p in params if p.description}
    return found


def _class_documentation(cls: type) -> str:
    doc = inspect.cleandoc(cls.__doc__ or "")
    # What @dataclass writes where nobody else did.
    return "" if doc.startswith(f"{cls.__name__}(") else _joined(doc.split("\n\n")[:1])


def _joined(paragraphs: Iterable[str | None]) -> str:
    return " ".join(" ".join(p.split()) for p in paragraphs if p)
