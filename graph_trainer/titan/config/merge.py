"""Apply one TOML table to a config, checking every key and type on the way."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config import kinds
from graph_trainer.titan.config.fields import (
    alternatives,
    bare,
    field_hints,
    is_nullable,
    is_suppressed,
    section_classes,
    settable_keys,
)
from graph_trainer.titan.config.messages import (
    bad_value,
    did_you_mean,
    did_you_mean_key,
    join_or,
    show,
)
from graph_trainer.titan.config.run_config import NOT_TORCH_COMPILE, GraphCompileConfig

UNSET = "unset"
"""The key that lists a table's keys whose value is None, which TOML cannot write."""

_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def apply_table(config: Any, table: Mapping[str, Any], where: str) -> Any:
    """A copy of `config` with the values of `table`.

    Tables are merged key by key, lists are replaced. `type` in a section picks its
    component: another one than before starts from that component's defaults. A
    table's `unset = ["key", ...]` sets keys to None.

    Arguments:
        config: a config dataclass instance; it stays as it is.
        table: a parsed TOML document.
        where: what error messages call the table, as a rule the file's name.
    Raises:
        ConfigError: an unknown key, a wrong type, or values that the config refuses.
    """
    return _Applier(where, list(settable_keys(config))).merge(type(config), config, table, "")


def canonical(value: Any, hint: Any = None) -> Any:
    """`value` in the one form that survives TOML: free-form arrays are tuples."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for name, field_hint in field_hints(type(value)).items():
            if not is_suppressed(field_hint):
                old = getattr(value, name)
                new = canonical(old, field_hint)
                if new is not old:
                    changes[name] = new
        return dataclasses.replace(value, **changes) if changes else value
    if hint is None or isinstance(value, str | int | float | None):
        return value
    for option in alternatives(hint):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if option is Any:
            return _free_form(value)
        if origin is list and isinstance(value, list):
            new = [canonical(v, args[0]) for v in value]
            return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
        if origin is dict and isinstance(value, dict) and args[1] is Any:
            return _free_form(value)
        if origin is dict and isinstance(value, dict):
            return {k: canonical(v, args[1]) for k, v in value.items()}
        if origin is tuple and isinstance(value, tuple) and len(args) == len(value):
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


class _Applier:
    def __init__(self, where: str, all_keys: list[str]):
        self.where = where
        self.all_keys = all_keys

    def merge(self, cls: type, current: Any, table: Mapping[str, Any], prefix: str) -> Any:
        """`current`, or without one a new `cls`, with `table` applied."""
        hints = field_hints(cls)
        changes: dict[str, Any] = {}
        for key, value in table.items():
            path = prefix + key
            if key == UNSET and key not in hints:
                continue
            if key not in hints:
                raise self.unknown_key(path, key, value, hints, prefix)
            self.refuse_suppressed(cls, path, value, hints[key])
            before = getattr(current, key) if current is not None else _default(cls, key)
            changes[key] = self.value(value, hints[key], before, path)
        for key in self.unset_keys(table, hints, prefix):
            changes[key] = None
        if current is None:
            self.require_all(cls, changes, prefix)
        try:
            if current is None:
                return cls(**changes)
            return dataclasses.replace(current, **changes)
        except Exception as e:  # whatever a config's own checks raise is about these values
            raise self.refused(e, prefix, changes) from e

    def unset_keys(self, table: Mapping[str, Any], hints: dict[str, Any], prefix: str) -> list[str]:
        if UNSET in hints or UNSET not in table:
            return []
        keys = table[UNSET]
        if not isinstance(keys, list | tuple) or not all(isinstance(k, str) for k in keys):
            raise bad_value(
                self.where,
                prefix + UNSET,
                keys,
                "expected a list of key names",
                'Write unset = ["key"] with the keys of this section that shall have no value.',
            )
        for key in keys:
            if key not in hints:
                guess = did_you_mean_key(prefix + key, [prefix + k for k in hints], self.all_keys)
                raise bad_value(
                    self.where,
                    prefix + UNSET,
                    keys,
                    f"{show(key)} is no key of this section",
                    f"{guess}Remove it from the list.",
                )
            if key in table:
                raise bad_value(
                    self.where,
                    prefix + key,
                    table[key],
                    "both set and listed in unset",
                    "Keep one of the two.",
                )
            if not is_nullable(hints[key]) or is_suppressed(hints[key]):
                raise bad_value(
                    self.where,
                    prefix + UNSET,
                    keys,
                    f"{key} always has a value",
                    f'Remove "{key}" from the list and set {prefix}{key} instead.',
                )
        return list(keys)

    def unknown_key(
        self, path: str, key: str, value: Any, hints: dict[str, Any], prefix: str
    ) -> ConfigError:
        here = [prefix + k for k, h in hints.items() if not is_suppressed(h)]
        guess = did_you_mean_key(path, here, self.all_keys)
        section = f"[{prefix[:-1]}]" if prefix else "the top level"
        listed = ", ".join(k[len(prefix) :] for k in here)
        return ConfigError(
            f"{self.where}: {path} = {show(value)}: unknown key. {guess}"
            f"Keys of {section}: {listed}."
        )

    def refuse_suppressed(self, cls: type, path: str, value: Any, hint: Any) -> None:
        if not is_suppressed(hint):
            return
        if issubclass(cls, GraphCompileConfig):
            raise ConfigError(f"{self.where}: {path} = {show(value)}: {NOT_TORCH_COMPILE}.")
        raise bad_value(
            self.where,
            path,
            value,
            "not settable from a file",
            "Remove it; it comes from the registry entry that `base` names.",
        )

    def require_all(self, cls: type, changes: dict[str, Any], prefix: str) -> None:
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.init
            and f.name not in changes
            and f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            keys = " and ".join(prefix + m for m in missing)
            has = "has" if len(missing) == 1 else "have"
            raise ConfigError(
                f"{self.where}: [{prefix[:-1]}] = {show(changes)}: {', '.join(missing)} missing. "
                f"Add {keys}, which {has} no default."
            )

    def refused(self, error: Exception, prefix: str, changes: dict[str, Any]) -> ConfigError:
        given = ", ".join(f"{prefix}{k} = {show(v)}" for k, v in changes.items())
        return ConfigError(
            f"{self.where}: [{prefix[:-1] or 'top level'}] is refused: {str(error).rstrip('.')}. "
            f"It was given {given or 'no keys'}. Change one of them."
        )

    def value(self, value: Any, hint: Any, current: Any, path: str) -> Any:
        """`value` as a value of type `hint`; ConfigError where it is none."""
        sections = section_classes(hint)
        if sections and isinstance(value, Mapping):
            return self.section(value, sections, is_nullable(hint), current, path)
        if sections:
            raise bad_value(
                self.where,
                path,
                value,
                "expected a section",
                f"Write its keys under a [{path}] heading.",
            )
        options = [a for a in alternatives(hint) if a is not type(None)]
        for exact in (True, False):  # 1 for `float | int` is the int, for `float` a float
            for option in options:
                fits, converted = self.plain(value, option, exact, path)
                if fits:
                    return converted
        raise self.wrong_type(value, hint, path)

    def plain(self, value: Any, option: Any, exact: bool, path: str) -> tuple[bool, Any]:
        """Whether `value` is an `option`, and the value to keep."""
        option = bare(option)
        origin, args = typing.get_origin(option), typing.get_args(option)
        if option is Any:
            return True, _free_form(value)
        if origin is Literal:
            return any(type(a) is type(value) and a == value for a in args), value
        if origin is list and isinstance(value, list | tuple):
            return True, [self.value(v, args[0], None, f"{path}[{i}]") for i, v in enumerate(value)]
        if origin is dict and isinstance(value, Mapping) and args[1] is Any:
            return True, _free_form(value)
        if origin is dict and isinstance(value, Mapping):
            return True, {k: self.value(v, args[1], None, f"{path}.{k}") for k, v in value.items()}
        if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
            items = enumerate(zip(value, args, strict=True))
            return True, tuple(self.value(v, a, None, f"{path}[{i}]") for i, (v, a) in items)
        if option is float and not exact and type(value) is int:
            try:
                return True, float(value)
            except OverflowError:
                return False, value
        return isinstance(option, type) and type(value) is option, value

    def wrong_type(self, value: Any, hint: Any, path: str) -> ConfigError:
        choices = [
            c
            for a in alternatives(hint)
            if typing.get_origin(a) is Literal
            for c in typing.get_args(a)
        ]
        if choices:
            guess = did_you_mean(value, choices) if isinstance(value, str) else ""
            return bad_value(
                self.where,
                path,
                value,
                "not one of the known values",
                f"{guess}Write {join_or(show(c) for c in choices)}.",
            )
        expected = join_or(describe(a) for a in alternatives(hint) if a is not type(None))
        remedy = f"Write {path.partition('[')[0]} = {_example(hint)}" + (
            f', or list "{path.rpartition(".")[2]}" in this section\'s unset for no value.'
            if is_nullable(hint)
            else "."
        )
        return bad_value(self.where, path, value, f"expected {expected}", remedy)

    def section(
        self, table: Mapping[str, Any], members: list[type], nullable: bool, current: Any, path: str
    ) -> Any:
        rest = {k: v for k, v in table.items() if k != "type"}
        cls: type | None
        if "type" in table:
            cls = kinds.class_for(table["type"], members, nullable, self.where, path)
            if cls is None:
                if rest:
                    key, value = next(iter(rest.items()))
                    raise bad_value(
                        self.where,
                        f"{path}.{key}",
                        value,
                        f'{path}.type is "{kinds.NONE}", which has no keys',
                        "Choose another type or remove the key.",
                    )
                return None
            if type(current) is not cls:
                current = None
        elif current is not None:
            cls = type(current)
        elif len(members) == 1:
            cls = members[0]
        else:
            raise ConfigError(
                f"{self.where}: [{path}] is switched off, so its keys ({', '.join(rest)}) have no "
                f"effect. Add type = {join_or(show(n) for n in kinds.short_names(members))}."
            )
        return self.merge(cls, current, rest, path + ".")


def describe(hint: Any) -> str:
    """What a value of this type is, in a TOML author's words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        entries = join_or(describe(a) for a in alternatives(args[0]))
        return f"a list whose entries are each {entries}"
    if origin is tuple:
        return f"a list of {len(args)} entries"
    if origin is dict:
        return "a table"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def _example(hint: Any) -> str:
    for option in alternatives(hint):
        if option in (bool, int, float, str):
            return {bool: "true", int: "1", float: "0.5", str: '"text"'}[option]
        if typing.get_origin(option) in (list, tuple):
            return "[...]"
        if typing.get_origin(option) is dict:
            return "{ key = value }"
    return "..."


def _default(cls: type, key: str) -> Any:
    field = next(f for f in dataclasses.fields(cls) if f.name == key)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
