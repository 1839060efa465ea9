"""Drives torchtitan's whole loop on the captured step, for test_loop.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.trainer import GraphTrainer

FLAGS = [
    *("--training.seq_len", "64", "--training.local_batch_size", "1", "--debug.seed", "42"),
    # two microbatches a step on two ranks
    *("--training.global_batch_size", "4"),
    *("--metrics.log_freq", "1", "--metrics.enable_tensorboard"),
    *("--validator.enable", "--validator.freq", "2", "--validator.steps", "2"),
    *("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "0"),
]


def train(folder: Path, *flags: str) -> dict[str, Any]:
    """Train to the end and tell what came of it."""
    config = load_config([*FLAGS, "--dump_folder", str(folder), *flags])
    trainer: GraphTrainer = GraphTrainer(config)
    validated: list[float] = []
    log_validation = trainer.metrics_processor.log_validation

    def keep(*, loss: float, step: int) -> None:
        validated.append(loss)
        log_validation(loss=loss, step=step)

    trainer.metrics_processor.log_validation = keep
    trainer.train()
    trainer.close()
    parameters = trainer.model_parts[0].named_parameters()
    return {
        "step": trainer.step,
        "validated": validated,
        "parameters": {name: p.to_local().clone() for name, p in parameters},
        "rates": trainer.lr_schedulers.schedulers[0].get_last_lr(),
        "folder": folder,
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of the parameters that are not equal bit by bit."""
    return [n for n, p in a["parameters"].items() if not torch.equal(p, b["parameters"][n])]


def run(folder: Path, _: str) -> dict[str, Any]:
    """A run of four steps captured, the same eagerly, and one resumed after step 2."""
    folder /= "loop"
    whole = train(folder / "whole", "--training.steps", "4")
    eager = train(folder / "eager", "--training.steps", "4", "--compile.mode", "eager")
    # as if the run had been ended after step 2: the schedule is that of four steps
    stopped = folder / "stopped"
    if dist.get_rank() == 0:
        (stopped / "checkpoint").mkdir(parents=True)
        (folder / "whole" / "checkpoint" / "step-2").rename(stopped / "checkpoint" / "step-2")
    dist.barrier()
    resumed = train(stopped, "--training.steps", "4")
    written = folder / "whole"
    return {
        "steps": [whole["step"], eager["step"], resumed["step"]],
        "validated": [whole["validated"], eager["validated"], resumed["validated"]],
        "rates": [whole["rates"], resumed["rates"]],
        "eager_differs": differing(whole, eager),
        "resumed_differs": differing(whole, resumed),
        "tensorboard": len(list(written.rglob("events.out.tfevents.*"))),
        "checkpoints": sorted(p.name for p in (written / "checkpoint").iterdir()),
        "config": (written / "config.toml").read_text(),
    }
