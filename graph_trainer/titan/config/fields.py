"""What a config class accepts: its fields, their types, and the components of its sections.

A section such as [dataloader] configures one of several components. Its key `type` chooses one by
a short name, or by "package.module:Class.Config" for a component of a user's own.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union

import tyro

NONE = "none"
"""The `type` of an optional section that is switched off."""

UNSET = "unset"
"""The key that lists a table's keys whose value is None, which TOML cannot write."""

# Declared class -> short name -> configured class, all as "module:qualified name", so that a
# module is imported when a section asks for it. torchtitan's memory budget policy of activation
# checkpointing has no short name: it acts inside torch.compile, and a captured step has none.
_COMPONENTS = {
    "torchtitan.components.dataloader:BaseDataLoader.Config": {
        "text": "graph_trainer.titan.data.loader:TextDataLoader.Config",
        "huggingface": "torchtitan.hf_datasets.text_datasets:HuggingFaceTextDataLoader.Config",
        "huggingface_interleaved": (
            "torchtitan.hf_datasets.text_datasets:InterleavedHuggingFaceTextDataLoader.Config"
        ),
    },
    "torchtitan.components.tokenizer:BaseTokenizer.Config": {
        "byte_bpe": "graph_trainer.titan.data.tokenizer:ByteBPETokenizer.Config",
        "huggingface": "torchtitan.components.tokenizer:HuggingFaceTokenizer.Config",
    },
    "torchtitan.components.checkpointer.base:BaseCheckpointManager.Config": {
        "dcp": "graph_trainer.titan.checkpointer:CheckedCheckpointManager.Config",
    },
    "torchtitan.components.loss:BaseLoss.Config": {
        "cross_entropy": "torchtitan.components.loss:CrossEntropyLoss.Config",
        "chunked_cross_entropy": "graph_trainer.titan.chunked_loss:ChunkedCrossEntropyLoss.Config",
    },
    "torchtitan.distributed.activation_checkpoint:ActivationCheckpointing.Config": {
        "selective": "torchtitan.distributed.activation_checkpoint:SelectiveAC.Config",
        "full": "torchtitan.distributed.activation_checkpoint:FullAC.Config",
        "layers": "graph_trainer.titan.activation_policies:LayersAC.Config",
        "budget": "graph_trainer.titan.activation_policies:BudgetAC.Config",
        "file": "graph_trainer.titan.activation_policies:FileAC.Config",
        "user": "graph_trainer.titan.activation_policies:UserAC.Config",
    },
}


def field_hints(cls: type) -> dict[str, Any]:
    """Return field name -> type, with Annotated kept, in the order of the fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def settable_hints(cls: type) -> dict[str, Any]:
    """Return the `field_hints` of those fields that flags and files can set."""
    return {name: hint for name, hint in field_hints(cls).items() if not is_suppressed(hint)}


def is_suppressed(hint: Any) -> bool:
    """Whether the field can be set from neither flags nor files."""
    return typing.get_origin(hint) is Annotated and tyro.conf.Suppress in hint.__metadata__


def alternatives(hint: Any) -> list[Any]:
    """Return the members of a union, or the type itself, all without Annotated."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [a for member in typing.get_args(hint) for a in alternatives(member)]
    return [hint]


def is_nullable(hint: Any) -> bool:
    """Whether None is a value of this type."""
    return any(a is type(None) for a in alternatives(hint))


def section_classes(hint: Any) -> list[type]:
    """Return the config classes that a field holds; an empty list for a plain value."""
    return [a for a in alternatives(hint) if isinstance(a, type) and dataclasses.is_dataclass(a)]


def table_class(hint: Any) -> type | None:
    """Return the dataclass of the entries where the type is a list of tables, otherwise None."""
    lists = [typing.get_args(a)[0] for a in alternatives(hint) if typing.get_origin(a) is list]
    return next((cls for entry in lists for cls in section_classes(entry)), None)


def required_fields(cls: type) -> list[str]:
    """Return the names of the fields without a default."""
    return [
        f.name
        for f in dataclasses.fields(cls)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


def settable_keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield every key that can be set on `config` as it is, as `section.key`."""
    for name, hint in settable_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from settable_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}.type" if section_classes(hint) else f"{prefix}{name}"


def canonical(value: Any, hint: Any = None) -> Any:
    """Give `value` the one form that survives TOML: tuples where its type has tuples or is free.

    Args:
        value: a config, or the value of a field.
        hint: the field's type; None for a config.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {name: getattr(value, name) for name in settable_hints(type(value))}
        new = {n: canonical(old[n], h) for n, h in settable_hints(type(value)).items()}
        changes = {name: new[name] for name in new if new[name] is not old[name]}
        return dataclasses.replace(value, **changes) if changes else value
    for option in alternatives(hint):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if option is Any or (origin is dict and args[1] is Any and isinstance(value, Mapping)):
            return _free_form(value)
        if origin is dict and isinstance(value, Mapping):
            return {k: canonical(v, args[1]) for k, v in value.items()}
        if origin is list and isinstance(value, list | tuple):
            return [canonical(v, args[0]) for v in value]
        if origin is tuple and args[1:] == (Ellipsis,) and isinstance(value, list | tuple):
            return tuple(canonical(v, args[0]) for v in value)
        if origin is tuple and isinstance(value, list | tuple) and len(args) == len(value):
            return tuple(canonical(v, a) for v, a in zip(value, args, strict=True))
    return value


def _free_form(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_free_form(v) for v in value)
    if isinstance(value, Mapping):
        unset = value.get(UNSET)
        if not isinstance(unset, list | tuple) or not all(isinstance(k, str) for k in unset):
            unset = ()
        kept = {k: _free_form(v) for k, v in value.items() if k != UNSET or not unset}
        return kept | dict.fromkeys(unset)
    return value


def class_path(cls: type) -> str:
    """Return the "module:qualified name" of a class, which `pkgutil.resolve_name` takes."""
    return f"{cls.__module__}:{cls.__qualname__}"


def short_names(members: list[type]) -> dict[str, str]:
    """Return short name -> class path for a section declared as any of `members`."""
    for declared, names in _COMPONENTS.items():
        # Every class whose path is a key is a subclass of that key's class, so the MRO tells it
        # and nothing has to be imported for issubclass.
        if any(declared == class_path(base) for m in members for base in m.__mro__):
            return names
    return {}


def type_of(config: Any, members: list[type]) -> str | None:
    """Return the `type` to write for `config` in a section declared as `members`.

    None where the declared class already tells it.
    """
    path = class_path(type(config))
    for name, candidate in short_names(members).items():
        if candidate == path:
            return name
    return None if [path] == [class_path(m) for m in members] else path
