"""What a config class accepts: its fields, their types, which of them are settable."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Union

import tyro


def field_hints(cls: type) -> dict[str, Any]:
    """Field name -> type, with Annotated kept, in the order of the fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def is_suppressed(hint: Any) -> bool:
    """Whether the field can be set from neither flags nor files."""
    return typing.get_origin(hint) is Annotated and tyro.conf.Suppress in hint.__metadata__


def bare(hint: Any) -> Any:
    """`hint` without Annotated."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def alternatives(hint: Any) -> list[Any]:
    """The members of a union, or the type itself, all without Annotated."""
    hint = bare(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [a for member in typing.get_args(hint) for a in alternatives(member)]
    return [hint]


def is_nullable(hint: Any) -> bool:
    """Whether None is a value of this type."""
    return any(a is type(None) for a in alternatives(hint))


def section_classes(hint: Any) -> list[type]:
    """The config classes that a field holds; empty for a plain value."""
    return [a for a in alternatives(hint) if isinstance(a, type) and dataclasses.is_dataclass(a)]


def settable_keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Every key that can be set on `config` as it stands, as `section.key`."""
    for name, hint in field_hints(type(config)).items():
        if is_suppressed(hint):
            continue
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from settable_keys(value, f"{prefix}{name}.")
        elif section_classes(hint):
            yield f"{prefix}{name}.type"
        else:
            yield f"{prefix}{name}"
