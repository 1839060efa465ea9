"""Runs of the whole trainer in which something goes wrong; test_faults.py reads what they say.

Two ranks. The last case leaves the ranks unable to talk, so the worker ends there.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.tools.logging import init_logger, logger

from graph_trainer.core.torch_private_groups import default_store
from graph_trainer.core.units import GIB, MIB
from graph_trainer.errors import GraphTrainerError
from graph_trainer.titan import device_memory
from graph_trainer.titan.checkpoint_files import damage
from graph_trainer.titan.config.load import load_config
from graph_trainer.titan.trainer import GraphTrainer
from graph_trainer.train import leave
from tests.integration.launch import report

from torchtitan.components.loss import IGNORE_INDEX  # isort: skip

FLAGS = [
    *("--training.seq_len", "64", "--training.local_batch_size", "1", "--debug.seed", "42"),
    *("--metrics.log_freq", "100", "--checkpoint.enable", "--checkpoint.interval", "2"),
    *("--checkpoint.keep_latest_k", "2"),
]
EIGHT = [
    *("--training.steps", "8", "--checkpoint.no-last_save_model_only"),
    # two microbatches a step on two ranks
    *("--training.global_batch_size", "4"),
]
"""With FLAGS, the run whose last checkpoint every run with faults must reach bit by bit."""
VALIDATING = ("--validator.enable", "--validator.freq", "4", "--validator.steps", "2")
Change = Callable[[GraphTrainer], None]


def run(folder: Path, *flags: str, change: Change = lambda trainer: None) -> dict[str, Any]:
    """Train, and tell what came of it on this rank."""
    said = BufferingHandler(capacity=10_000)
    logger.addHandler(said)
    config = load_config([*FLAGS, "--dump_folder", str(folder), *flags])
    trainer: GraphTrainer = GraphTrainer(config)
    change(trainer)
    validated: list[float] = []
    trainer.metrics_processor.log_validation = lambda *, loss, step: validated.append(loss)
    start = time.monotonic()
    error = ""
    try:
        trainer.train()
    except GraphTrainerError as e:
        error = f"{type(e).__name__}: {e}"
    seconds = time.monotonic() - start
    still_saving = trainer.checkpointer.save_future is not None
    trainer.close()
    logger.removeHandler(said)
    return {
        "step": trainer.step,
        "error": error,
        "seconds": seconds,
        "lines": [record.getMessage() for record in said.buffer],
        "still_saving": still_saving,
        "validated": validated,
        "rates": trainer.lr_schedulers.schedulers[0].get_last_lr(),
        "parameters": {
            name: p.to_local().clone() for name, p in trainer.model_parts[0].named_parameters()
        },
    }


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """What can go to the test as JSON."""
    return {k: v for k, v in result.items() if k != "parameters"}


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [n for n, p in a["parameters"].items() if not torch.equal(p, b["parameters"][n])]


def names(folder: Path) -> list[str]:
    dist.barrier()
    return sorted(p.name for p in (folder / "checkpoint").iterdir())


def on_rank_0(work: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def at_step(
    step: int,
    rank: int,
    act: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    *,
    before: Callable[[], None] = lambda: None,
) -> Change:
    """Do something before one step on one rank, or with its loss."""

    def change(trainer: GraphTrainer) -> None:
        captured = trainer.captured_step

        def run_step(*args: Any, **kwargs: Any) -> Any:
            here = trainer.step == step and dist.get_rank() == rank
            if here:
                before()
            loss, gradients = captured(*args, **kwargs)
            return act(loss) if here else loss, gradients

        trainer.captured_step = run_step  # type: ignore[assignment]

    return change


def bad_gradient(trainer: GraphTrainer) -> None:
    """In step 3 one element of a gradient of rank 1 is infinite; all losses are finite."""
    run_microbatch = trainer.forward_backward_step

    def ruined(**microbatch: Any) -> torch.Tensor:
        loss = run_microbatch(**microbatch)
        if trainer.step == 3 and dist.get_rank() == 1:
            gradient = dict(trainer.model_parts[0].named_parameters())["norm.weight"].grad
            gradient.to_local()[0] = torch.inf
        return loss

    trainer.forward_backward_step = ruined  # type: ignore[method-assign]


def ignoring_labels(*left_out: int) -> Change:
    """Ignore the labels of rank 1 in batch 2 and all in batch 4, and leave batches out."""

    def change(trainer: GraphTrainer) -> None:
        batches = trainer.batch_generator

        def changed(data: Any) -> Iterator[Any]:
            for number, (inputs, labels) in enumerate(batches(data), start=1):
                if number == 4 or (number == 2 and dist.get_rank() == 1):
                    labels = torch.full_like(labels, IGNORE_INDEX)
                if number not in left_out:
                    yield inputs, labels

        trainer.batch_generator = changed  # type: ignore[assignment]

    return change


def together(*changes: Change) -> Change:
    def change(trainer: GraphTrainer) -> None:
        for one in changes:
            one(trainer)

    return change


def out_of_data(trainer: GraphTrainer) -> None:
    """Three batches and no more."""
    batches = trainer.batch_generator

    def few(data: Any) -> Iterator[Any]:
        yield from itertools.islice(batches(data), 3)
        raise DataloaderExhaustedError

    trainer.batch_generator = few


def full_disk(trainer: GraphTrainer) -> None:
    """From step 4 on rank 1 can write no file beyond 1 MB."""
    earlier = Path(trainer.config.dump_folder) / "checkpoint" / "step-2" / ".metadata"

    def fill() -> None:
        while not earlier.exists():  # an asynchronous save may still be at it
            time.sleep(0.01)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))

    at_step(4, 1, before=fill)(trainer)


def little_on_rank_1() -> tuple[int, str]:
    return (64 * MIB if dist.get_rank() == 1 else 64 * GIB), "in a test"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cases(folder: Path) -> Iterator[tuple[str, Any]]:
    four = ("--training.steps", "4")
    eight = (*EIGHT, *VALIDATING, "--checkpoint.keep_latest_k")
    whole = run(folder / "whole", *eight, "0", "--metrics.enable_tensorboard")
    yield (
        "whole",
        shown(whole)
        | {
            "names": names(folder / "whole"),
            "tensorboard": len(list((folder / "whole").rglob("events.out.tfevents.*"))),
            "config": (folder / "whole" / "config.toml").read_text(),
        },
    )
    eager = run(folder / "eager", *eight, "0", "--compile.mode", "eager")
    yield "eager", shown(eager) | {"differs": differing(whole, eager)}

    for name in ("damaged", "hopeless", "chosen"):
        copy = folder / name / "checkpoint"
        on_rank_0(lambda to=copy: shutil.copytree(folder / "whole/checkpoint", to))
    # the newest has a wrong bit, the one before is short, the one before that is good
    damaged = folder / "damaged/checkpoint"
    on_rank_0(lambda: flip_a_bit(damaged / "step-8/__1_0.distcp"))
    on_rank_0(lambda: os.truncate(damaged / "step-6/__0_0.distcp", 1000))
    # a killed run left this one, and another will not come to it
    on_rank_0(lambda: (damaged / "step-9").mkdir())
    on_rank_0(lambda: (damaged / "step-3").mkdir())
    resumed = run(folder / "damaged", *eight, "2")
    yield (
        "damaged",
        shown(resumed)
        | {
            "differs": differing(whole, resumed),
            "names": names(folder / "damaged"),
            "damage": [damage(damaged / f"step-{step}") for step in (4, 6, 8)],
        },
    )
    # asked for by name it is refused
    on_rank_0(lambda: (folder / "chosen/checkpoint/step-8/__0_0.distcp").unlink())
    chosen = run(folder / "chosen", *eight, "0", "--checkpoint.load_step", "8")
    yield "chosen", shown(chosen)
    for path in sorted(p for p in (folder / "hopeless/checkpoint").iterdir()):
        on_rank_0(lambda path=path: flip_a_bit(path / ".metadata"))
    yield "hopeless", shown(run(folder / "hopeless", *eight, "0"))

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for mode in ("disabled", "async"):
        full_folder = folder / f"full-{mode}"
        stopped = run(full_folder, *eight, "2", "--checkpoint.async_mode", mode, change=full_disk)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        lines = damage(full_folder / "checkpoint/step-2")
        yield f"full {mode}", shown(stopped) | {"names": names(full_folder), "damage": lines}

    def poison(loss: torch.Tensor) -> torch.Tensor:
        return loss * torch.inf

    nan = run(folder / "nan", *four, change=at_step(3, 1, poison))
    yield "not finite", shown(nan) | {"names": names(folder / "nan")}

    before: dict[str, torch.Tensor] = {}

    def keep(trainer: GraphTrainer) -> None:
        named = trainer.model_parts[0].named_parameters

        def take() -> None:
            before.update((name, p.to_local().clone()) for name, p in named())

        at_step(3, dist.get_rank(), before=take)(trainer)

    ruin = run(folder / "ruin", *four, change=together(keep, bad_gradient))
    differs = differing({"parameters": before}, ruin)
    yield "bad gradient", shown(ruin) | {"names": names(folder / "ruin"), "differs": differs}

    # every step changes the learning rate
    rates = ("--lr_scheduler.warmup_steps", "5", "--lr_scheduler.total_steps", "5")
    skipping = (*rates, "--compile.mode", "eager", "--training.nonfinite", "skip")
    logged: list[Any] = []

    def log(trainer: GraphTrainer) -> None:
        trainer.metrics_processor.log = lambda *numbers, extra_metrics: logged.append(
            [*numbers, extra_metrics["graph_trainer/skipped_steps"]]
        )

    skip = run(
        *(folder / "skip", "--training.steps", "5", *skipping, "--metrics.log_freq", "1"),
        change=together(bad_gradient, ignoring_labels(), log),
    )
    good = ignoring_labels(3, 4)
    without = run(folder / "without", "--training.steps", "3", *skipping, change=good)
    yield "skip", shown(skip) | {"differs": differing(without, skip), "logged": logged}
    yield "without", shown(without)

    with patch.object(device_memory, "available_on_cpu", little_on_rank_1):
        yield "no room", shown(run(folder / "no room", *four))

    risk = ("--compile.memory_limit_gib", "0")
    ended = run(
        folder / "ended", *four, *risk, "--checkpoint.async_mode", "async", change=out_of_data
    )
    yield "out of data", shown(ended) | {"names": names(folder / "ended")}

    export = ("--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf")
    exported = run(folder / "export", "--training.steps", "1", *export)
    yield (
        "export",
        shown(exported)
        | {
            "names": names(folder / "export"),
            "files": sorted(p.name for p in (folder / "export/checkpoint/step-1").iterdir()),
        },
    )

    def stall() -> None:
        default_store().wait(["the other rank has reported"])
        leave(0)

    soon = ("--comm.train_timeout_seconds", "5")
    stalled = run(folder / "stall", *four, *soon, change=at_step(3, 1, before=stall))
    yield "stall", shown(stalled)


def main() -> None:
    torch.set_num_threads(1)
    init_logger()
    results: dict[str, Any] = {}
    # rank 1 does not come back from its last case
    for name, result in cases(Path(sys.argv[1])):
        results[name] = result
        report(results)
    default_store().set("the other rank has reported", os.environ["RANK"])
    leave(0)


if __name__ == "__main__":
    main()
