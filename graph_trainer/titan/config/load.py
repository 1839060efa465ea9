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
from types import UnionType
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
    Field,
    components,
    field_of,
    fields_of,
    out_of_bounds,
    required_fields,
    settable_fields,
    settable_keys,
    show,
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
        origins = Origins(source.where)
        table = merge(table_of(source.entry), source.table, source.where, origins)
        table = merge(table, flags.table, COMMAND_LINE, origins)
        config, problems = build_config(source.entry, table, origins)
        if flags.shown:
            show_help(config or source.entry, flags.shown, prog)
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
    for name, field in fields_of(type(value)).items():
        each = getattr(value, name)
        table[name] = table_of(each) if field.settable else each
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
        name = components([cls]).get(name, name)
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
    """Build a config of the merged table; if it has problems, return None and list them.

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
        self.problems.append(Problem(key, problem, remedy, value=value))

    def section(self, cls: type, table: Mapping[str, Any], path: str) -> Any:
        """Build a config class of its table; None if anything in it is wrong."""
        problems_before = len(self.problems)
        if issubclass(cls, GraphCompileConfig):
            # the sections below [compile] are those of the passes that it lists
            passes = _read(table.get("passes"), field_of(list[str]))
            try:
                cls = compile_class(passes if isinstance(passes, list) else [])
            except (ConfigError, PassError) as error:
                problem = str(error).removeprefix("compile.passes: ")
                return self.refuse("compile.passes", passes, problem, "Or leave the pass out.")
        known = fields_of(cls)
        prefix = f"{path}." if path else ""
        values: dict[str, Any] = {}
        for name, value in table.items():
            key, is_set = prefix + name, bool(self.origins.of(prefix + name))
            if name in known and known[name].settable:
                values[name] = self.value(value, known[name], key)
            elif name in known and not is_set:
                values[name] = value
            elif name in known and issubclass(cls, GraphCompileConfig):
                self.refuse(key, value, *NOT_TORCH_COMPILE)
            elif name in known:
                remedy = "Remove it; it comes from the registry entry that `base` names."
                self.refuse(key, value, "not settable from a file", remedy)
            elif name != "type" and is_set:
                # not set: options of a pass that the entry lists, and the file does not
                self.unknown(cls, key, value)
        missing = [prefix + name for name in required_fields(cls) if name not in table]
        if missing:
            self.refuse(path, table, "keys without a default missing", f"Add {', '.join(missing)}.")
        if len(self.problems) > problems_before:
            return None
        try:
            return cls(**values)
        except Exception as error:  # whatever a config's own checks raise is about these values
            given = {name: values[name] for name in values if self.origins.of(prefix + name)}
            if len(given) == 1:
                ((name, value),) = given.items()
                return self.refuse(prefix + name, value, f"refused: {error}", "Change it.")
            remedy = "Change one of these keys."
            return self.refuse(path or "top level", given, f"refused: {error}", remedy)

    def unknown(self, cls: type, key: str, value: Any) -> None:
        """Refuse an unknown key, with the place where it belongs or the nearest known keys."""
        path, _, name = key.rpartition(".")
        siblings = list(settable_fields(cls))
        having = [n for n, component in components([cls]).items() if name in fields_of(component)]
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

    def value(self, value: Any, field: Field, key: str) -> Any:
        """Return a value as one of its field's type and within its bounds."""
        value = _read(value, field)
        if field.sections and isinstance(value, Mapping):
            cls = self.component(value, field, key)
            return cls and self.section(cls, value, key)
        if field.sections and (value is not None or not field.nullable):
            remedy = f"Write its keys under a [{key}] heading, or as --{key}.key value."
            return self.refuse(key, value, "expected a section", remedy)
        if field.entry and isinstance(value, list):
            entry = field_of(field.entry)
            return [self.value(each, entry, f"{key}[{i}]") for i, each in enumerate(value)]
        try:
            value = _adapter(field.hint).validate_python(value)
        except ValidationError as error:
            return self.wrong_type(error, value, field, key)
        if wrong := out_of_bounds(key, value):
            self.refuse(key, value, *wrong)
        return value

    def wrong_type(self, error: ValidationError, value: Any, field: Field, key: str) -> None:
        """Refuse a value of the wrong type; pydantic finds one for each member of a union."""
        findings = error.errors(include_url=False)
        # A place is indices of lists, then names of a union's members.
        for index in takewhile(lambda step: isinstance(step, int), findings[0]["loc"]):
            value, key = value[index], f"{key}[{index}]"
        literals = [each for each in field.options if typing.get_origin(each) is Literal]
        if literals:
            choices = [choice for each in literals for choice in typing.get_args(each)]
            guess = did_you_mean(value, choices, GUESS) if isinstance(value, str) else ""
            remedy = f"{guess}Write {', '.join(map(show, choices))}."
            return self.refuse(key, value, "not one of the known values", remedy)
        kinds = [_EXPECTED.get(each["type"], (each["msg"], "...")) for each in findings]
        example = f"[{kinds[0][1]}]" if key.endswith("]") else kinds[0][1]
        remedy = f"Write {key.partition('[')[0]} = {example}"
        if field.entry:
            remedy += f", or --{key}.0.key value for an entry that there is"
        if field.nullable:
            name = key.rpartition(".")[2]
            remedy += f', or for no value unset = ["{name}"] in this section, or --{key} None'
        expected = " or ".join(dict.fromkeys(kind for kind, _ in kinds))
        return self.refuse(key, value, f"expected {expected}", f"{remedy}.")

    def component(self, table: Mapping[str, Any], field: Field, section: str) -> Any:
        """Return the config class that a section's `type` means, or None for "none"."""
        names, key = components(field.sections), f"{section}.type"
        name = _read(table.get("type"), field_of(str))
        if name is None and len(field.sections) == 1:
            return field.sections[0]
        if name is None or (name == NONE and field.nullable):
            given = {k: _read(v, field_of(Any)) for k, v in table.items() if k != "type"}
            if given:
                remedy = f"Take it out, or set {key} to {', '.join(map(show, names))}."
                self.refuse(section, given, "switched off, so this has no effect", remedy)
            return None
        cls = names.get(name) if isinstance(name, str) else name
        if isinstance(name, str) and ":" in name:
            try:
                cls = pkgutil.resolve_name(name)
            except (ImportError, AttributeError, ValueError) as error:
                return self.refuse(key, name, f"cannot be imported ({error})", _OWN_CLASS)
        if isinstance(cls, type) and issubclass(cls, tuple(field.sections)):
            return cls
        known = [*names, NONE] if field.nullable else list(names)
        guess = did_you_mean(name, known, GUESS) if isinstance(name, str) else ""
        choices = f"Write {', '.join(map(show, known))}" if known else "Leave it out"
        return self.refuse(key, name, "no such type", f"{guess}{choices}. {_OWN_CLASS}")


_OWN_CLASS = 'A class of your own is written "package.module:Class.Config".'


def _read(value: Any, field: Field) -> Any:
    """Read what flags have as text."""
    if isinstance(value, FlagText):
        return value.read(field)
    if isinstance(value, Mapping) and not field.sections:
        return {key: _read(each, field_of(Any)) for key, each in value.items()}
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
    if origin is Annotated:
        return _strict(arguments[0])
    arguments = tuple(map(_strict, arguments))
    return Union[arguments] if origin is UnionType else origin[arguments]  # noqa: UP007
