"""The one way from a command line to a checked config."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from graph_trainer.core.toml_file import read_toml
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.flags import flag_keys, parse_flags, split_flags
from graph_trainer.titan.config.merge import apply_table, canonical
from graph_trainer.titan.config.messages import COMMAND_LINE, Origin, join_or, show
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.sources import (
    DEFAULT_CONFIG,
    DEFAULT_MODULE,
    find_config,
    registry_entry,
    registry_functions,
    registry_module,
)
from graph_trainer.titan.config.validate import check_config, world_size_from_environment


def load_config(
    argv: Sequence[str],
    *,
    world_size: int | None = None,
    prog: str = "graph-trainer train",
    default: tuple[str, Mapping[str, Any]] | None = None,
) -> GraphTrainerConfig:
    """The checked config of a command line.

    Arguments:
        argv: the flags, without the program's name. --module and --config default to
            graph_trainer.llama3 and debugmodel; --help prints the help and exits.
        world_size: the number of ranks that the degrees of parallelism have to multiply
            to; None takes it from the environment (WORLD_SIZE), and without it leaves
            that one check out.
        prog: the command's name in help texts and messages.
        default: what is read in place of debugmodel where the flags name no --config: what
            messages call it, and a parsed document.
    Returns:
        The config, flags over file over registry entry over defaults, checked.
    Raises:
        ConfigError: anything wrong with names, file, flags or values.
    """
    flags = split_flags(argv)
    with _quiet_torchtitan():
        config, where = _from_files(flags.module, flags.config, default)
        if flags.types:
            config = apply_table(config, flags.types, COMMAND_LINE)
        config = canonical(parse_flags(config, flags.rest, prog))
        check_config(
            config,
            world_size_from_environment() if world_size is None else world_size,
            origin=Origin(where, flag_keys(argv)),
        )
    return config


def _from_files(
    module: str | None, name: str | None, default: tuple[str, Mapping[str, Any]] | None
) -> tuple[Any, str]:
    """The config before flags, and what to call its origin in messages."""
    if module is not None:
        module = registry_module(module).__name__.removesuffix(".config_registry")
    if name is None and default is not None:
        where, document = default
        return _from_document(module, dict(document), where)
    path = find_config(module or DEFAULT_MODULE, name or DEFAULT_CONFIG)
    if path is None:
        assert name is not None  # only a registry function's name has no file
        return registry_entry(module or DEFAULT_MODULE, name, f"--config {name}"), f"config {name}"
    return _from_document(module, read_toml(path, "--config"), str(path))


def _from_document(module: str | None, table: dict[str, Any], where: str) -> tuple[Any, str]:
    """The config of a parsed document, which stands behind the module of a flag."""
    file_module = _name(table, "module", where) or DEFAULT_MODULE
    base = _name(table, "base", where)
    if module is None:
        registry_module(file_module, where)
        module = file_module
    if base is None:
        functions = registry_functions(registry_module(module))
        raise ConfigError(
            f"{where}: base is missing, so there is no model to train. Add a line "
            f"base = {join_or(show(f) for f in functions)} at the top."
        )
    config = registry_entry(module, base, where)
    return apply_table(config, table, where), where


def _name(table: dict[str, Any], key: str, where: str) -> str | None:
    """Take a top-level name that is not a config field for files out of the table."""
    value = table.pop(key, None)
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"{where}: {key} = {show(value)}: expected a string. Write {key} = "
            f'"{DEFAULT_MODULE if key == "module" else "llama3_debugmodel"}".'
        )
    return value


@contextmanager
def _quiet_torchtitan() -> Iterator[None]:
    """Hold back torchtitan's warnings, which come once for every copy of a section.

    It logs on the root logger, whose own filters see no other logger's records.
    """
    root = logging.getLogger()
    root.addFilter(_is_error)
    try:
        yield
    finally:
        root.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
