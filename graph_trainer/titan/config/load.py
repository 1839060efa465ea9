"""The one way from a command line to a checked config: sources -> merge -> build -> check.

The registry entry, the file and the flags are one nested table each. They are merged into one
table; of that the section classes are built, each value checked by its field's type and bounds;
then what spans sections is checked. Every mistake of a stage is a line of one error.
"""

import dataclasses
import functools
import logging
import pkgutil
import typing
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, Union

from pydantic import (
    AfterValidator,
    ConfigDict,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from graph_trainer.core.suggest import did_you_mean, nearest
from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.config.check import check_config, world_size_from_environment
from graph_trainer.titan.config.fields import (
    NONE,
    alternatives,
    class_path,
    field_hints,
    is_nullable,
    is_suppressed,
    out_of_bounds,
    required_fields,
    section_classes,
    settable_hints,
    settable_keys,
    short_names,
    show,
    table_class,
)
from graph_trainer.titan.config.run_config import (
    NOT_TORCH_COMPILE,
    GraphCompileConfig,
    GraphTrainerConfig,
    compile_class,
)
from graph_trainer.titan.config.schema import show_help
from graph_trainer.titan.config.sources import (
    COMMAND_LINE,
    GUESS,
    FlagText,
    Origins,
    Problem,
    read_flags,
    read_source,
    refusal,
    registry_entry,
)


def load_config(
    argv: Sequence[str],
    *,
    world_size: int | None = None,
    prog: str = "graph-trainer train",
) -> GraphTrainerConfig:
    """Load the checked config of a command line: flags over file over registry entry.

    Args:
        argv: the flags, without the program's name. --module and --config default to
            graph_trainer.llama3 and debugmodel; --help prints the help and exits.
        world_size: the number of ranks that the degrees of parallelism have to multiply to. None
            takes it from the environment (WORLD_SIZE); without that, this check is left out.
        prog: the command's name in help texts and messages.

    Raises:
        ConfigError: anything wrong with names, file, flags or values; a line for each wrong key.
    """
    flags = read_flags(argv)
    # torchtitan warns at every copy of a section; what is wrong is an error here
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        source = read_source(flags.module, flags.config)
        entry = registry_entry(source.module, source.base, source.where)
        origins = Origins(source.where)
        table = merge(table_of(entry), source.table, source.where, origins)
        table = merge(table, flags.table, COMMAND_LINE, origins)
        config, problems = build_config(entry, table, origins)
        if flags.shown:
            show_help(config or entry, flags.shown, prog)
        if config is None:
            raise refusal(problems, origins)
        ranks = world_size_from_environment() if world_size is None else world_size
        check_config(config, ranks, origins=origins)
    finally:
        logging.disable(disabled)
    return config


def table_of(value: Any) -> Any:
    """Return a config as nested tables, in which `type` is a section's class."""
    if isinstance(value, list):
        return [table_of(each) for each in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    table: dict[str, Any] = {"type": type(value)}
    for name, hint in field_hints(type(value)).items():
        each = getattr(value, name)
        table[name] = each if is_suppressed(hint) else table_of(each)
    return table


def merge(
    lower: Mapping[str, Any],
    upper: Mapping[str, Any],
    where: str,
    origins: Origins,
    prefix: str = "",
) -> dict[str, Any]:
    """Lay a table over another one, and note where the keys come from.

    Sections are merged key by key, and start empty where `type` names another component. Any other
    table of a file replaces the one before; flags change keys in it, and entries of lists.
    """
    cls, name = lower.get("type"), upper.get("type")
    if isinstance(cls, type) and isinstance(name, str):
        name = cls if short_names([cls]).get(name, name) == class_path(cls) else name
    merged = dict(lower) if name in (None, cls) else {}
    for key, value in upper.items():
        path, before = prefix + key, merged.get(key)
        is_section = isinstance(before, Mapping) and isinstance(before.get("type"), type)
        if isinstance(value, Mapping) and (is_section or where == COMMAND_LINE):
            if isinstance(before, Mapping):
                merged[key] = merge(before, value, where, origins, f"{path}.")
                continue
            if isinstance(before, list):  # --section.list.0.key
                entries = {str(i): entry for i, entry in enumerate(before)}
                if value.keys() <= entries.keys():
                    merged[key] = list(merge(entries, value, where, origins, f"{path}.").values())
                    continue
        merged[key] = name if key == "type" else value
        origins.where[path] = where
    return merged


def build_config(
    entry: GraphTrainerConfig, table: Mapping[str, Any], origins: Origins
) -> tuple[GraphTrainerConfig | None, list[Problem]]:
    """Build a config of the merged table; None if anything in it is wrong, which is returned too.

    Args:
        entry: the registry entry, whose keys are suggested for misspelt ones.
        origins: which keys file and flags set.
    """
    builder = _Builder(origins, list(settable_keys(entry)))
    config = builder.section(type(entry), table, "")
    return config, builder.problems


# What pydantic finds wrong -> what was expected, and an example of it.
_EXPECTED = {
    "bool_type": ("true or false", "true"),
    "int_type": ("an integer", "1"),
    "float_type": ("a number", "0.5"),
    "string_type": ("a string", '"text"'),
    "list_type": ("a list", "[...]"),
    "tuple_type": ("a list", "[...]"),
    "dict_type": ("a table", "{ key = value }"),
}


@dataclasses.dataclass
class _Builder:
    origins: Origins
    known_keys: list[str]
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def refuse(self, key: str, value: Any, problem: str, remedy: str) -> Any:
        """Keep a problem for the one error of them all; return None, in place of the value."""
        self.problems.append(Problem(key, value, problem, remedy))

    def section(self, cls: type, table: Mapping[str, Any], path: str) -> Any:
        """Build a config class of its table; None if anything in it is wrong."""
        problems_before = len(self.problems)
        if issubclass(cls, GraphCompileConfig):
            # the sections below [compile] are those of the passes that it lists
            names = _read(table.get("passes"), list[str])
            try:
                cls = compile_class(names if isinstance(names, list) else [])
            except (ConfigError, PassError) as error:
                problem = str(error).removeprefix("compile.passes: ").rstrip(".")
                self.refuse("compile.passes", names, problem, "Or leave the pass out.")
                return None
        hints = field_hints(cls)
        prefix = f"{path}." if path else ""
        values: dict[str, Any] = {}
        for name, value in table.items():
            key = prefix + name
            if name == "type":
                continue
            if name not in hints:
                # a pass that the entry lists and the file does not has left its section behind
                if self.origins.of(key):
                    self.unknown(cls, key, value)
            elif not is_suppressed(hints[name]):
                values[name] = self.value(value, hints[name], key)
            elif not self.origins.of(key):
                values[name] = value
            elif issubclass(cls, GraphCompileConfig):
                self.refuse(key, value, *NOT_TORCH_COMPILE)
            else:
                remedy = "Remove it; it comes from the registry entry that `base` names."
                self.refuse(key, value, "not settable from a file", remedy)
        missing = [name for name in required_fields(cls) if name not in table]
        if missing:
            remedy = f"Add {' and '.join(prefix + name for name in missing)}: there is no default."
            self.refuse(path, table, f"{', '.join(missing)} missing", remedy)
        if len(self.problems) > problems_before:
            return None
        try:
            return cls(**values)
        except Exception as error:  # whatever a config's own checks raise is about these values
            given = {k: v for k, v in values.items() if self.origins.of(prefix + k)}
            problem = f"refused: {str(error).rstrip('.')}"
            if len(given) == 1:
                ((name, value),) = given.items()
                self.refuse(prefix + name, value, problem, "Change it.")
            else:
                self.refuse(path or "top level", given, problem, "Change one of these keys.")
            return None

    def unknown(self, cls: type, key: str, value: Any) -> None:
        """Refuse an unknown key, with the place where it belongs or the nearest known keys."""
        siblings = list(settable_hints(cls))
        path, _, name = key.rpartition(".")
        components = {
            n: field_hints(pkgutil.resolve_name(p)) for n, p in short_names([cls]).items()
        }
        having = [n for n, hints in components.items() if name in hints]
        # The right key in the wrong section is as common as a typo.
        near = [key.removesuffix(name) + each for each in nearest(name, siblings)]
        near += [k for k in self.known_keys if k.rpartition(".")[2] == name and k not in near]
        near = near or nearest(key, self.known_keys)
        guess = f"Did you mean {' or '.join(near[:3])}? " if near else ""
        if having:
            guess = f"It belongs to type = {' or '.join(map(show, having))}. "
        if issubclass(cls, GraphCompileConfig) and isinstance(value, Mapping):
            guess += "A pass of your own has its section where compile.passes names it. "
        place = f"[{path}]" if path else "the top level"
        self.refuse(key, value, "unknown key", f"{guess}Keys of {place}: {', '.join(siblings)}.")

    def value(self, value: Any, hint: Any, key: str) -> Any:
        """Return a value as one of its field's type and within its bounds."""
        value, members, entry = _read(value, hint), section_classes(hint), table_class(hint)
        if members and isinstance(value, Mapping):
            cls = self.component(value, members, is_nullable(hint), key)
            return cls and self.section(cls, value, key)
        if members and (value is not None or not is_nullable(hint)):
            remedy = f"Write its keys under a [{key}] heading, or as --{key}.key value."
            return self.refuse(key, value, "expected a section", remedy)
        if entry and isinstance(value, list):
            return [self.value(each, entry, f"{key}[{i}]") for i, each in enumerate(value)]
        try:
            valid = _adapter(hint).validate_python(value)
        except ValidationError as error:
            return self.wrong_type(error, value, hint, key)
        if wrong := out_of_bounds(key, valid):
            self.refuse(key, value, *wrong)
        return valid

    def wrong_type(self, error: ValidationError, value: Any, hint: Any, key: str) -> None:
        """Refuse a value of the wrong type; pydantic finds one for each member of a union."""
        findings = error.errors(include_url=False)
        # A place is indices of lists, then names of a union's members.
        for index in takewhile(lambda step: isinstance(step, int), findings[0]["loc"]):
            value, key = value[index], f"{key}[{index}]"
        choices = _choices(hint)
        if any(each["type"] == "literal_error" for each in findings):
            guess = did_you_mean(value, choices, GUESS) if isinstance(value, str) else ""
            problem = "not one of the known values"
            remedy = f"{guess}Write {', '.join(map(show, choices[:-1]))} or {show(choices[-1])}."
            return self.refuse(key, value, problem, remedy)
        kinds = [_EXPECTED.get(each["type"], (each["msg"], "...")) for each in findings]
        example = f"[{kinds[0][1]}]" if key.endswith("]") else kinds[0][1]
        remedy = f"Write {key.partition('[')[0]} = {example}"
        if table_class(hint):
            remedy += f", or --{key}.0.key value for an entry that there is"
        if is_nullable(hint):
            name = key.rpartition(".")[2]
            remedy += f', or for no value unset = ["{name}"] in this section, or --{key} None'
        expected = " or ".join(dict.fromkeys(kind for kind, _ in kinds))
        return self.refuse(key, value, f"expected {expected}", f"{remedy}.")

    def component(
        self, table: Mapping[str, Any], members: list[type], nullable: bool, section: str
    ) -> type | None:
        """Return the config class that a section's `type` means, or None for "none"."""
        names = short_names(members)
        known = [*names, *([NONE] if nullable else [])]
        key, name = f"{section}.type", table.get("type")
        if isinstance(name, type):
            return name
        name = _read(name, str)
        choices = f"Write {', '.join(map(show, known))}" if known else "Leave it out"
        remedy = f'{choices}, or name a class of your own as "package.module:Class.Config".'
        others = {key: value for key, value in table.items() if key != "type"}
        if name is None and len(members) == 1:
            return members[0]
        if name is None or (name == NONE and nullable and others):
            types = ", ".join(map(show, names))
            remedy = f"Take it out, or set {key} to {types}."
            return self.refuse(
                section, _read(others, Any), "switched off, so this has no effect", remedy
            )
        if name == NONE and nullable:
            return None
        if not isinstance(name, str) or (name not in names and ":" not in name):
            guess = did_you_mean(name, known, GUESS) if isinstance(name, str) else ""
            return self.refuse(key, name, "no such type", guess + remedy)
        try:
            cls: Any = pkgutil.resolve_name(names.get(name, name))
        except (ImportError, AttributeError, ValueError) as error:
            return self.refuse(key, name, f"cannot be imported ({error})", remedy)
        if not isinstance(cls, type) or not issubclass(cls, tuple(members)):
            fitting = " or ".join(each.__qualname__ for each in members)
            return self.refuse(key, name, f"not a {fitting}, which this section takes", remedy)
        return cls


def _read(value: Any, hint: Any) -> Any:
    """Read what flags have as text, for a field of this type."""
    if isinstance(value, FlagText):
        return value.read(hint)
    if isinstance(value, Mapping) and not section_classes(hint):
        return {key: _read(each, Any) for key, each in value.items()}
    return value


def _as_tuples(value: Any) -> Any:
    """Return a value of any type in the one form that survives TOML."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_tuples, value))
    if isinstance(value, Mapping):
        return {key: _as_tuples(each) for key, each in value.items()}
    return value


# strict: neither text nor a boolean becomes a number
_STRICT = {
    bool: StrictBool,
    int: StrictInt,
    float: StrictFloat,
    str: StrictStr,
    Any: Annotated[Any, AfterValidator(_as_tuples)],
}


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    """Make the check of a type, strict but that a tuple may be written as a list."""
    return TypeAdapter(_strict(hint), config=ConfigDict(arbitrary_types_allowed=True))


def _strict(hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None or origin is Literal:
        return _STRICT.get(hint, hint)
    options = alternatives(hint)
    if options != [hint]:
        return Union[tuple(map(_strict, options))]  # noqa: UP007
    return origin[tuple(map(_strict, arguments))]


def _choices(hint: Any) -> list[Any]:
    arguments = list(typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return arguments
    return [choice for argument in arguments for choice in _choices(argument)]
