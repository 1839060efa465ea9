"""The one way from a command line to a checked config: sources -> merge -> build -> check.

The registry entry, the file and the flags are one nested table each. They are merged into one
table; of that the section classes are built, each value checked by its field's type and bounds;
then what spans sections is checked. Every mistake of a stage is a line of one error.
"""

import logging
from collections.abc import Iterable, Sequence

from graph_trainer.titan.config.build import build_config, merge, table_of
from graph_trainer.titan.config.check import check_config, world_size_from_environment
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.config.schema import help_text
from graph_trainer.titan.config.sources import (
    COMMAND_LINE,
    Origins,
    read_flags,
    read_source,
    refusal,
)


def load_config(
    argv: Sequence[str],
    *,
    world_size: int | None = None,
    prog: str = "graph-trainer train",
    command_flags: Iterable[str] = (),
    reads_checkpoint: bool = False,
    reads_text: bool = True,
) -> GraphTrainerConfig:
    """Load the checked config of a command line: flags over file over registry entry.

    Args:
        argv: the flags, without the program's name. --module and --config default to
            graph_trainer.llama3 and debugmodel; --help prints the help and exits.
        world_size: the number of ranks that the degrees of parallelism have to multiply to. None
            takes it from the environment (WORLD_SIZE); without that, this check is left out.
        prog: the command's name in help texts and messages.
        command_flags: names of the flags that only this command has, suggested for misspelt ones.
        reads_checkpoint: whether the run starts on this machine, where the checkpoint that it
            begins with has to be. A plan or a printed config is made without it.
        reads_text: whether its texts and its tokenizer have to be here too. A plan and an export
            are made without them.

    Raises:
        ConfigError: anything wrong with names, file, flags or values; a line for each wrong key.
    """
    flags = read_flags(argv)
    # torchtitan warns at every copy of a section; what is wrong is an error here
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        where, entry, in_file = read_source(flags.module, flags.config)
        origins = Origins(f"config {entry.base}")
        table = merge(table_of(entry), in_file, where, origins)
        table = merge(table, flags.table, COMMAND_LINE, origins)
        config, problems = build_config(entry, table, origins, command_flags)
        if flags.shown is not None:
            print(help_text(config or entry, flags.shown, prog))
            raise SystemExit(0)
        if config is None:
            raise refusal(problems, origins)
        ranks = world_size_from_environment() if world_size is None else world_size
        here = {"reads_checkpoint": reads_checkpoint, "reads_text": reads_text}
        check_config(config, ranks, origins=origins, **here)
    finally:
        logging.disable(disabled)
    return config
