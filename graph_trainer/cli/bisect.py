"""graph-trainer bisect-passes: launch the ranks of a config and show what they found."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graph_trainer.cli import launcher
from graph_trainer.cli.bisect_worker import VERDICT_FILE
from graph_trainer.core.bisect.search import Verdict
from graph_trainer.errors import ConfigError

if TYPE_CHECKING:
    from graph_trainer.titan.config.run_config import GraphTrainerConfig

HELP = """\
usage: graph-trainer bisect-passes [--module MODULE] [--config NAME_OR_FILE] [--section.key VALUE]

Which pass changed my numbers? Starts the CPU ranks that the config is for, builds the model and
one batch as training would, and runs the step

  1. eagerly, as the sharded model itself: the reference
  2. as captured, before any pass
  3. after the first pass of compile.passes, after the first two, and so on,

each time with the eager backend, from the same parameters, buffers and random numbers. Loss,
gradients and buffers are compared bit by bit on every rank. In the first pass after which
something differs it runs the graphs before and after that pass node by node and names the first
node that differs, and by how much. No step is taken and no checkpoint written.

All flags belong to the config, as those of `train` do; `graph-trainer train --help` lists them.
GPUs are not used. NGPU says how many ranks there are; without it, what the degrees of parallelism
multiply to, or 2. A small model finds as much as a large one:

  graph-trainer bisect-passes
      the small Llama 3 on two ranks, with the default passes
  graph-trainer bisect-passes --training.seq_len 32 --training.local_batch_size 1
      the same with less to compute
  graph-trainer bisect-passes --compile.passes default,overlap_fsdp
      one more pass in the list
  graph-trainer bisect-passes --config my.toml --debug.seed 1
      a config of your own; the seed fixes what is drawn at random

A pass of your own, which no config can name, is examined from Python, on every rank:
graph_trainer.bisect.bisect_passes(model, loss_fn, args, passes=gt.PassConfig(...)).

Exit code: 0 where everything is equal, 1 where capture or a pass differs, 2 for bad input or where
the ranks failed.
"""

WORKER = "graph_trainer.cli.bisect_worker"


def bisect_passes(argv: Sequence[str], *, worker: str = WORKER) -> int:
    """Run the command.

    Arguments:
        argv: the config's flags.
        worker: the module that each rank runs.

    Returns:
        the exit code, as HELP says.

    Raises:
        ConfigError: bad input, found before any rank is started.
    """
    from graph_trainer.cli.bisect_table import verdict_table
    from graph_trainer.planner.console import print_table
    from graph_trainer.titan.config.load import load_config

    if {"-h", "--help"} & set(argv):
        print(HELP, end="")
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    argv = launcher.with_names_of_environment(argv)
    _check_mode(load_config(argv))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdict.json"
        os.environ[VERDICT_FILE] = str(file)
        launcher.start(launcher.prepare(argv, module=worker))
        if not file.exists():  # the ranks have said why
            return 2
        verdict = Verdict.from_dict(json.loads(file.read_text()))
    print_table(verdict_table(verdict))
    return 0 if verdict.culprit is None else 1


def _check_mode(config: GraphTrainerConfig) -> None:
    if config.compile.mode != "aot_fx_trace":
        raise ConfigError(
            f"compile.mode is '{config.compile.mode}': there is no captured step whose passes "
            'could be examined. Set compile.mode = "aot_fx_trace".'
        )
