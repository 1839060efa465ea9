"""The one way from a command line to a checked config.

sources (flags, file, registry entry) -> merge (each value checked) -> flags -> check of the whole.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.config.fields import canonical
from graph_trainer.titan.config.flags import Flags, flag_keys, parse_flags, split_flags
from graph_trainer.titan.config.merge import apply_table
from graph_trainer.titan.config.messages import COMMAND_LINE, Origin
from graph_trainer.titan.config.run_config import (
    GraphCompileConfig,
    GraphTrainerConfig,
    with_passes,
)
from graph_trainer.titan.config.sources import Source, read_source, registry_entry
from graph_trainer.titan.config.validate import check_config, world_size_from_environment


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
        ConfigError: anything wrong with names, file, flags or values.
    """
    flags = split_flags(argv)
    with _quiet_torchtitan():
        source = read_source(flags.module, flags.config)
        config = registry_entry(source.module, source.base, source.where)
        config.compile = _with_named_passes(config.compile, source, flags)
        config = apply_table(config, source.table, source.where)
        if flags.types:
            config = apply_table(config, flags.types, COMMAND_LINE)
        if flags.rest:
            config = parse_flags(config, flags.rest, prog)
        config = canonical(config)
        check_config(
            config,
            world_size_from_environment() if world_size is None else world_size,
            origin=Origin(source.where, flag_keys(argv)),
        )
    return config


def _with_named_passes(
    config: GraphCompileConfig, source: Source, flags: Flags
) -> GraphCompileConfig:
    """Give [compile] the sections of the passes that file and flags name."""
    section = source.table.get("compile")
    in_file = section.get("passes") if isinstance(section, Mapping) else None
    for where, entries in (
        (source.where, in_file if isinstance(in_file, list | tuple) else ()),
        (COMMAND_LINE, flags.passes),
    ):
        try:
            config = with_passes(config, entries)
        except (ConfigError, PassError) as error:
            raise ConfigError(f"{where}: {error}") from error
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
