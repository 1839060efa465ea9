"""The one way from a command line to a checked config.

sources (registry entry, file, flags) -> the entry with the tables of file and flags laid over it,
every key and value checked -> check of the whole.
"""

import dataclasses
import logging
import pkgutil
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.config.check import check_config, world_size_from_environment
from graph_trainer.titan.config.fields import (
    NONE,
    UNSET,
    canonical,
    field_hints,
    is_nullable,
    is_suppressed,
    required_fields,
    section_classes,
    settable_keys,
    short_names,
    table_class,
)
from graph_trainer.titan.config.run_config import (
    NOT_TORCH_COMPILE,
    GraphCompileConfig,
    GraphTrainerConfig,
    with_passes,
)
from graph_trainer.titan.config.schema import show_help
from graph_trainer.titan.config.sources import (
    COMMAND_LINE,
    NO_VALUE,
    FlagText,
    Origin,
    bad_value,
    did_you_mean,
    did_you_mean_key,
    join_or,
    read_flags,
    read_source,
    registry_entry,
    show,
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
    with _quiet_torchtitan():
        source = read_source(flags.module, flags.config)
        tables = ((source.where, source.table), (COMMAND_LINE, flags.table))
        config = registry_entry(source.module, source.base, source.where)
        for where, table in tables:
            config.compile = _with_named_passes(config.compile, where, table)
        errors: list[ConfigError] = []
        for where, table in tables:
            config, wrong = apply_table(config, table, where)
            errors += wrong
        config = canonical(config)
        if flags.shown:
            show_help(config, flags.shown, prog)
        if errors:
            raise ConfigError("\n".join(map(str, errors))) from errors[0]
        check_config(
            config,
            world_size_from_environment() if world_size is None else world_size,
            origin=Origin(source.where, flags.keys()),
        )
    return config


@contextmanager
def _quiet_torchtitan() -> Iterator[None]:
    """Suppress torchtitan's warnings, which come once for every copy of a section.

    torchtitan logs on the root logger, whose filters do not see other loggers' records.
    """
    root = logging.getLogger()

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    root.addFilter(is_error)
    try:
        yield
    finally:
        root.removeFilter(is_error)


def _with_named_passes(
    config: GraphCompileConfig, where: str, table: Mapping[str, Any]
) -> GraphCompileConfig:
    """Give [compile] the sections of the passes that a table names."""
    section = table.get("compile")
    entries = section.get("passes") if isinstance(section, Mapping) else None
    if isinstance(entries, FlagText):
        entries = entries.read(list[str])
    try:
        return with_passes(config, entries if isinstance(entries, list) else ())
    except (ConfigError, PassError) as error:
        raise ConfigError(f"{where}: {error}") from error


def apply_table(
    config: GraphTrainerConfig, table: Mapping[str, Any], where: str
) -> tuple[GraphTrainerConfig, list[ConfigError]]:
    """Lay the values of `table` over a copy of `config`.

    Tables are merged key by key, lists are replaced. `type` in a section chooses its component:
    another one than before starts from that component's defaults. A table's `unset = ["key", ...]`
    sets keys to None.

    Args:
        config: the config; it stays as it is.
        table: a parsed TOML document, or the table of the flags.
        where: what error messages call the table, as a rule the file's name.

    Returns:
        The config without the wrong keys; and their errors: unknown keys, wrong types, values that
        a section refuses.
    """
    build = _Build(where, list(settable_keys(config)))
    try:
        return build.table(type(config), config, table, ""), build.errors
    except ConfigError as error:
        return config, [*build.errors, error]


_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)

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
class _Build:
    where: str
    all_keys: list[str]
    errors: list[ConfigError] = dataclasses.field(default_factory=list)

    def table(self, cls: type, current: Any, table: Mapping[str, Any], prefix: str) -> Any:
        """Return `current` with `table` laid over it, or a new `cls` where `current` is None.

        The error of a wrong key is kept, and the key left out.

        Raises:
            ConfigError: `cls` cannot be made of these keys.
        """
        hints = field_hints(cls)
        changes: dict[str, Any] = {}
        errors_before = len(self.errors)
        for key, value in table.items():
            try:
                if key == UNSET and key not in hints:
                    changes |= dict.fromkeys(self.unset_keys(table, hints, prefix))
                    continue
                self.check_key(cls, prefix, key, value, hints)
                before = _default(cls, key) if current is None else getattr(current, key)
                changes[key] = self.value(value, hints[key], before, prefix + key)
            except ConfigError as error:
                self.errors.append(error)
        missing = [k for k in required_fields(cls) if current is None and k not in table]
        if missing:
            has = "has" if len(missing) == 1 else "have"
            raise ConfigError(
                f"{self.where}: [{prefix[:-1]}] = {show(table)}: {', '.join(missing)} missing. "
                f"Add {' and '.join(prefix + k for k in missing)}, which {has} no default."
            )
        try:
            return cls(**changes) if current is None else dataclasses.replace(current, **changes)
        except Exception as error:  # whatever a config's own checks raise is about these values
            if len(self.errors) > errors_before:
                # Perhaps only because a wrong key is left out: raise that key's error instead.
                raise self.errors.pop() from error
            given = ", ".join(f"{prefix}{k} = {show(v)}" for k, v in changes.items())
            raise ConfigError(
                f"{self.where}: [{prefix[:-1] or 'top level'}] is refused: "
                f"{str(error).rstrip('.')}. It was given {given or 'no keys'}. Change one of them."
            ) from error

    def check_key(
        self, cls: type, prefix: str, key: str, value: Any, hints: Mapping[str, Any]
    ) -> None:
        """Refuse a key that is unknown or that no file can set."""
        path = prefix + key
        if key not in hints:
            here = [prefix + k for k, h in hints.items() if not is_suppressed(h)]
            guess = _other_components_with(key, cls) or did_you_mean_key(path, here, self.all_keys)
            if issubclass(cls, GraphCompileConfig) and isinstance(value, Mapping):
                guess += "A pass of your own has its section where compile.passes names it. "
            section = f"[{prefix[:-1]}]" if prefix else "the top level"
            listed = ", ".join(k[len(prefix) :] for k in here)
            problem, remedy = "unknown key", f"{guess}Keys of {section}: {listed}."
        elif not is_suppressed(hints[key]):
            return
        elif issubclass(cls, GraphCompileConfig):
            problem, remedy = NOT_TORCH_COMPILE
        else:
            problem = "not settable from a file"
            remedy = "Remove it; it comes from the registry entry that `base` names."
        raise bad_value(self.where, path, value, problem, remedy)

    def unset_keys(
        self, table: Mapping[str, Any], hints: Mapping[str, Any], prefix: str
    ) -> list[str]:
        """Return the keys that the table's `unset` lists, checked."""
        keys = table[UNSET]

        def refused(problem: str, remedy: str) -> ConfigError:
            return bad_value(self.where, prefix + UNSET, keys, problem, remedy)

        if not isinstance(keys, list | tuple) or not all(isinstance(k, str) for k in keys):
            raise refused(
                "expected a list of key names",
                'Write unset = ["key"] with the keys of this section that shall have no value.',
            )
        for key in keys:
            if key not in hints:
                guess = did_you_mean_key(prefix + key, [prefix + k for k in hints], self.all_keys)
                problem = f"{show(key)} is no key of this section"
                raise refused(problem, f"{guess}Remove it from the list.")
            if key in table:
                problem = "both set and listed in unset"
                raise bad_value(self.where, prefix + key, table[key], problem, "Keep one of both.")
            if not is_nullable(hints[key]) or is_suppressed(hints[key]):
                raise refused(
                    f"{key} always has a value",
                    f'Remove "{key}" from the list and set {prefix}{key} instead.',
                )
        return list(keys)

    def value(self, value: Any, hint: Any, current: Any, path: str) -> Any:
        """Return `value` as a value of type `hint`; a section's table is merged into `current`."""
        members, entries = section_classes(hint), table_class(hint)
        if isinstance(value, FlagText):
            value = value.read(hint)
        elif self.where == COMMAND_LINE and isinstance(value, Mapping) and not members:
            # --section.list.0.key and --section.table.key change what is there
            if entries and current:
                return self.changed_entries(value, entries, current, path)
            value = _laid_over(current, value)
        if members and isinstance(value, Mapping):
            return self.section(value, members, is_nullable(hint), current, path)
        if members:
            remedy = f"Write its keys under a [{path}] heading."
            if self.where == COMMAND_LINE:
                remedy = f"Set its keys, as --{path}.key value."
            raise bad_value(self.where, path, value, "expected a section", remedy)
        if entries and isinstance(value, list | tuple):
            return [self.value(v, entries, None, f"{path}[{i}]") for i, v in enumerate(value)]
        # strict: no text or boolean becomes a number
        adapter = TypeAdapter[Any](hint, config=_STRICT)
        try:
            return adapter.validate_python(canonical(value, hint))
        except ValidationError as error:
            raise self.wrong_type(error, value, hint, path) from None

    def changed_entries(
        self, table: Mapping[str, Any], cls: type, current: list[Any], path: str
    ) -> list[Any]:
        """Return a list of tables with the entries changed whose index is a key of `table`."""
        entries = list(current)
        for index, value in table.items():
            if index not in map(str, range(len(entries))) or not isinstance(value, Mapping):
                problem = f"the list has the entries 0 to {len(entries) - 1}"
                remedy = f"Write --{path}.0.key value, or the whole list as TOML."
                raise bad_value(self.where, f"{path}.{index}", value, problem, remedy)
            i = int(index)
            entries[i] = self.table(cls, entries[i], value, f"{path}[{i}].")
        return entries

    def wrong_type(self, error: ValidationError, value: Any, hint: Any, path: str) -> ConfigError:
        """Make our message of pydantic's findings, which are one for each member of a union."""
        findings = error.errors(include_url=False)
        # A place is field, then list index or key; the name of a union's member follows.
        for step in findings[0]["loc"]:
            if not (isinstance(value, list | tuple | Mapping) and isinstance(step, int | str)):
                break
            try:
                value = value[step]  # type: ignore[index]
            except (KeyError, TypeError, IndexError):
                break
            path += f"[{step}]" if isinstance(step, int) else f".{step}"
        choices = _choices(hint)
        if any(f["type"] == "literal_error" for f in findings):
            guess = did_you_mean(value, choices) if isinstance(value, str) else ""
            remedy = f"{guess}Write {join_or(show(c) for c in choices)}."
            return bad_value(self.where, path, value, "not one of the known values", remedy)
        kinds = [_EXPECTED.get(f["type"], (f["msg"], "...")) for f in findings]
        expected = join_or(dict.fromkeys(name for name, _ in kinds))
        if value is NO_VALUE:
            return ConfigError(
                f"{self.where}: --{path} has no value: expected {expected}. Write for example "
                f"--{path} {kinds[0][1]}."
            )
        unset = f', or list "{path.rpartition(".")[2]}" in this section\'s unset for no value'
        if self.where == COMMAND_LINE:
            unset = f", or --{path} None for no value"
        example = f"[{kinds[0][1]}]" if path.endswith("]") else kinds[0][1]
        remedy = f"Write {path.partition('[')[0]} = {example}"
        return bad_value(
            self.where,
            path,
            value,
            f"expected {expected}",
            remedy + (unset if is_nullable(hint) else "") + ".",
        )

    def section(
        self, table: Mapping[str, Any], members: list[type], nullable: bool, current: Any, path: str
    ) -> Any:
        """Merge a section's table into its config, or into another component's defaults."""
        rest = {k: v for k, v in table.items() if k != "type"}
        if "type" in table:
            cls = self.component(table["type"], members, nullable, path)
            if cls is None:
                for key, value in rest.items():
                    problem = f'{path}.type is "{NONE}", which has no keys'
                    remedy = "Choose another type or remove the key."
                    raise bad_value(self.where, f"{path}.{key}", value, problem, remedy)
                return None
            current = current if type(current) is cls else None
        elif current is not None:
            cls = type(current)
        elif len(members) == 1:
            (cls,) = members
        else:
            raise ConfigError(
                f"{self.where}: [{path}] is switched off, so its keys ({', '.join(rest)}) have no "
                f"effect. Add type = {join_or(show(n) for n in short_names(members))}."
            )
        return self.table(cls, current, rest, path + ".")

    def component(
        self, name: Any, members: list[type], nullable: bool, section: str
    ) -> type | None:
        """Return the config class that `type = name` means for a section, or None for "none"."""
        if nullable and name == NONE:
            return None
        names = short_names(members)
        known = [*names, *([NONE] if nullable else [])]
        choices = f"Write {join_or(show(n) for n in known)}" if known else "Leave it out"
        remedy = f'{choices}, or name a class of your own as "package.module:Class.Config".'

        def refused(problem: str, guess: str = "") -> ConfigError:
            return bad_value(self.where, f"{section}.type", name, problem, guess + remedy)

        if not isinstance(name, str) or (name not in names and ":" not in name):
            guess = did_you_mean(name, known) if isinstance(name, str) else ""
            raise refused("no such type", guess)
        try:
            cls = pkgutil.resolve_name(names.get(name, name))
        except (ImportError, AttributeError, ValueError) as error:
            raise refused(f"cannot be imported ({error})") from error
        is_config = isinstance(cls, type) and dataclasses.is_dataclass(cls)
        if not (is_config and issubclass(cls, tuple(members))):
            fitting = join_or(m.__qualname__ for m in members)
            raise refused(f"not a config class for this section, which takes {fitting}")
        return cls


def _laid_over(current: Any, flags: Any) -> Any:
    """Return the free-form table `current` with the keys that flags set."""
    if isinstance(flags, FlagText):
        return flags.read(Any)
    if not isinstance(flags, Mapping):
        return flags
    table = dict(current) if isinstance(current, Mapping) else {}
    return table | {key: _laid_over(table.get(key), value) for key, value in flags.items()}


def _choices(hint: Any) -> list[Any]:
    arguments = list(typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return arguments
    return [choice for argument in arguments for choice in _choices(argument)]


def _other_components_with(key: str, cls: type) -> str:
    """Format the types of a component's section that have the key: "It belongs to ... ", or ""."""
    names = short_names([cls])
    having = [n for n, path in names.items() if key in field_hints(pkgutil.resolve_name(path))]
    return f"It belongs to type = {join_or(show(n) for n in having)}. " if having else ""


def _default(cls: type, key: str) -> Any:
    field = next(f for f in dataclasses.fields(cls) if f.name == key)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
