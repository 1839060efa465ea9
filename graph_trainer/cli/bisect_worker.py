"""One rank of graph-trainer bisect-passes: the trainer, whose first step is examined instead."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from graph_trainer.core.bisect.search import Verdict

VERDICT_FILE = "GRAPH_TRAINER_VERDICT_FILE"
"""The variable that names the file to which the first rank of each machine writes."""


class _Examined(Exception):
    """Ends the step with its verdict, before the optimizer changes a parameter."""


def examine(argv: Sequence[str]) -> Verdict:
    """Build the trainer of these flags, as `train` does, and bisect its first step.

    Raises:
        ConfigError: bad input.
        GraphTrainerError: as `bisect_passes` raises them.
    """
    from graph_trainer.core.bisect.search import bisect_passes
    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.console import set_up_console
    from graph_trainer.titan.step_inputs import loss_of_batch, passes_of
    from graph_trainer.titan.trainer import GraphTrainer

    config = load_config(argv)
    import torch.distributed as dist
    from torchtitan.tools.logging import init_logger, logger

    init_logger()
    set_up_console(config)
    trainer = GraphTrainer(config)

    loss, passes = loss_of_batch(trainer.loss_fn), passes_of(config, trainer.parallel_dims)
    on_event = logger.info if dist.get_rank() == 0 else lambda line: None

    def step(model: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Examined(bisect_passes(model, loss, args, kwargs, passes=passes, on_event=on_event))

    trainer.captured_step = step
    try:
        trainer.checkpointer.load(step=config.checkpoint.load_step)
        trainer.step += 1
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
    except _Examined as end:
        return end.args[0]
    finally:
        trainer.close()
    raise AssertionError("a train step has run without its captured step")


def main(argv: Sequence[str]) -> None:
    """Examine, and write the verdict to the file of VERDICT_FILE on the first rank of a machine.

    Raises:
        GraphTrainerError: as `examine` raises it.
    """
    verdict = examine(argv)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        Path(os.environ[VERDICT_FILE]).write_text(json.dumps(asdict(verdict)))


if __name__ == "__main__":
    from graph_trainer.train import leave, run

    leave(run(work=main))
