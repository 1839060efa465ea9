"""The one way from a command line to a checked config.

sources (flags, file, registry entry) -> merge (each value checked) -> flags -> check of the whole.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from graph_trainer.errors import ConfigError, PassError
from graph_trainer.titan.config.fields import canonical
from graph_trainer.titan.config.flags import Flags, FlagText, read_flags, show_help
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
    flags = read_flags(argv)
    with _quiet_torchtitan():
        source = read_source(flags.module, flags.config)
        config = registry_entry(source.module, source.base, source.where)
        config.compile = _with_named_passes(config.compile, source, flags)
        config = apply_table(config, source.table, source.where)
        config = canonical(apply_table(config, flags.table, COMMAND_LINE))
        if flags.shown:
            show_help(config, flags.shown, prog)
        check_config(
            config,
            world_size_from_environment() if world_size is None else world_size,
            origin=Origin(source.where, flags.keys()),
        )
    return config


def _with_named_passes(
    config: GraphCompileConfig, source: Source, flags: Flags
) -> GraphCompileConfig:
    """Give [compile] the sections of the passes that file and flags name."""
    for where, table in ((source.where, source.table), (COMMAND_LINE, flags.table)):
        section = table.get("compile")
        entries = section.get("passes") if isinstance(section, Mapping) else None
        if isinstance(entries, FlagText):
            entries = entries.read(list[str])
        try:
            config = with_passes(config, entries if isinstance(entries, list) else ())
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
