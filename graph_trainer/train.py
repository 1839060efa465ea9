"""python -m graph_trainer.train: one rank of a run, as torchrun starts it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from graph_trainer.core.text import error_text, width_of_ranks
from graph_trainer.errors import ConfigError, GraphTrainerError

if TYPE_CHECKING:
    from graph_trainer.titan.config.run_config import GraphTrainerConfig
    from graph_trainer.titan.observer import RunObserver

SHOWN_BY_LAUNCHER = "GRAPH_TRAINER_ERRORS_SHOWN_BY_LAUNCHER"
"""Set in a rank's environment where the launcher prints its error, after all other output."""


def main(argv: Sequence[str]) -> None:
    """Train with the flags given.

    Raises:
        GraphTrainerError: bad input, or a step that cannot be captured or agreed on.
    """
    from graph_trainer.titan.config.load import load_config

    if any(word.partition("=")[0] == "--plan" for word in argv):
        raise ConfigError(
            "--plan: graph_trainer.train compares a run with no plan. Start the ranks with "
            "`graph-trainer train --plan FILE`, or with torchrun -m "
            "graph_trainer.planner.train_planned."
        )
    train(load_config(argv, reads_checkpoint=True))


def train(config: GraphTrainerConfig, observer: RunObserver | None = None) -> None:
    """Train as one rank.

    Args:
        config: checked, for the ranks of this run.
        observer: watches the run; without one, rank 0 prints what the passes did.

    Raises:
        GraphTrainerError: the run cannot begin, or a step cannot be captured or agreed on.
    """
    import torch.distributed as dist
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger

    from graph_trainer.titan.console import set_up_console
    from graph_trainer.titan.observer import ReportedRun
    from graph_trainer.titan.output_folders import check_output_folders
    from graph_trainer.titan.trainer import GraphTrainer

    check_output_folders(config)

    init_logger()
    set_up_console(config)
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    trainer = GraphTrainer(config)
    trainer.observer = observer or ReportedRun()
    try:
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    finally:
        trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def run(argv: Sequence[str] | None = None, work: Callable[[Sequence[str]], None] = main) -> int:
    """Run a rank for a shell; return its exit code.

    An error of ours is one message and exit code 2, any other a traceback and 1; both are recorded
    for the launcher, and left to it where it shows them.

    SIGINT ends the process at once, as SIGTERM does. Python's KeyboardInterrupt would wait for
    a collective to return, and the other ranks are ending as well; a checkpoint is safe, since
    it gets its name only when it is complete.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    collect_rarely()
    try:
        work(sys.argv[1:] if argv is None else argv)
    except Exception as error:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        ours = isinstance(error, GraphTrainerError)
        if SHOWN_BY_LAUNCHER not in os.environ:
            # here, because `leave` skips what would print it
            shown = error_text(error, width_of_ranks()) if ours else traceback.format_exc().rstrip()
            print(shown, file=sys.stderr, flush=True)
        return 2 if ours else 1
    return 0


def collect_rarely() -> None:
    """Let garbage be collected after three million new objects, for a process that is to import
    torch and torchtitan: their million stays, and looking through it takes a fifth of the time."""
    gc.set_threshold(3_000_000, 10, 1000)


def leave(status: int) -> NoReturn:
    """End this process with `status`, everything flushed, without Python's finalization.

    gloo's threads outlive `destroy_process_group` and may drop the last reference to a tensor
    while the interpreter is torn down: the process then aborts ("terminate called without an
    active exception") and a run that did all its work counts as failed (pytorch/pytorch
    issue 190489, pull request 179291).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(run())
