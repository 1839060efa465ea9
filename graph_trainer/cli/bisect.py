"""graph-trainer bisect-passes: verify every pass on the real ranks of a config."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

HELP = """\
usage: graph-trainer bisect-passes [--module MODULE] [--config NAME_OR_FILE] [--section.key VALUE]

Which pass changed my numbers? Starts the CPU ranks that the config is for, builds the model and
one batch as training would, captures the step and runs compile.passes with verify_passes: before
and after each pass the ranks run the graph, with its collectives, on small values that are made up,
and compare loss, gradients and written inputs. The first pass that changes one is an error that
names the result, by how much it differs, and the first node that differs. No step is taken, and no
checkpoint is read or written; logs go to the folder bisect_passes in dump_folder.
`gt.check_capture` compares the captured step with the model itself.

All flags belong to the config, as those of `train` do; `graph-trainer train --help` lists them.
GPUs are not used. NGPU says how many ranks there are; without it, as many as the degrees of
parallelism multiply to, or 2. A small model finds as much as a large one:

  graph-trainer bisect-passes --training.seq_len 32 --training.local_batch_size 1
      the small Llama 3 on two ranks, with the default passes and little to compute
  graph-trainer bisect-passes --compile.passes default,my_package.passes:my_pass --debug.seed 1
      with a pass of your own, my_pass in my_package/passes.py, and fixed random numbers

Exit code: 0 where every pass keeps the numbers; 2 where one does not, or could not be compared, for
bad input, or where the ranks failed.
"""

WORKER = "graph_trainer.cli.bisect"


def bisect_passes(argv: Sequence[str], *, worker: str = WORKER) -> int:
    """Run the command.

    This process and its ranks see no GPU from here on.

    Returns:
        The exit code, as HELP says.

    Raises:
        ConfigError: bad input, found before any rank is started.
    """
    from graph_trainer.cli import launcher
    from graph_trainer.errors import ConfigError
    from graph_trainer.titan.config.load import load_config

    if {"-h", "--help"} & set(argv):
        print(HELP, end="")
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    argv = launcher.with_names_of_environment(argv)
    config = load_config(argv)
    mode = config.compile.mode
    if config.parallelism.pipeline_parallel_degree > 1:
        raise ConfigError(
            "parallelism.pipeline_parallel_degree is above 1: bisect-passes examines the graph of "
            "a whole step. Set it to 1."
        )
    if mode == "eager":
        raise ConfigError(
            f"compile.mode is '{mode}': there is no captured step whose passes could be "
            'examined. Set compile.mode = "aot_fx_trace".'
        )
    return launcher.start(launcher.prepare(argv, module=worker))


class _Verified(Exception):
    """Ends the step when its passes have run, before the optimizer changes a parameter."""


def verify(argv: Sequence[str]) -> None:
    """As one rank: build the trainer of these flags, as `train` does, and verify its passes.

    Raises:
        ConfigError: bad input.
        VerificationError: a pass that changes the numbers, or cannot be compared.
        GraphTrainerError: as `TrainStep.prepare` raises it.
    """
    from graph_trainer.titan.config.load import load_config
    from graph_trainer.titan.console import set_up_console
    from graph_trainer.titan.output_folders import check_output_folders
    from graph_trainer.titan.trainer import GraphTrainer

    config = load_config(argv)
    config.compile = replace(
        config.compile, verify_passes=True, mode="aot_fx_trace", backend="eager"
    )
    # a folder of its own: the config and the logs of the run stay as they are
    config.dump_folder = os.path.join(config.dump_folder, "bisect_passes")
    check_output_folders(config)
    import torch.distributed as dist
    from torchtitan.tools.logging import init_logger

    from graph_trainer.core.passes.report import Report
    from graph_trainer.core.passes.verify_numbers import NOT_COMPARED
    from graph_trainer.core.training.step_cache import TrainStep
    from graph_trainer.errors import VerificationError

    init_logger()
    set_up_console(config)
    trainer = GraphTrainer(config)
    captured = trainer.captured_step
    assert isinstance(captured, TrainStep)
    reports: list[Report] = []
    captured.on_report = lambda joint, report: reports.append(report)

    def prepare(model: Any, *args: Any, **kwargs: Any) -> NoReturn:
        captured.prepare(model, *args, **kwargs)
        raise _Verified

    trainer.captured_step = prepare
    try:
        trainer.step += 1
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
    except _Verified:
        pass
    finally:
        trainer.close()
    (report,) = reports
    rows = report.rows[1:]
    if dist.get_rank() == 0:
        print(report)
    for row in rows:
        if row.verified.startswith(NOT_COMPARED):
            raise VerificationError(f"after pass '{row.name}': {row.verified}")
    if dist.get_rank() == 0:
        print(f"{len(rows)} passes keep the numbers on {dist.get_world_size()} ranks", flush=True)


if __name__ == "__main__":
    from graph_trainer.train import leave, run

    leave(run(work=verify))
