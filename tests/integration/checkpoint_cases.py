"""Checkpoints across meshes and programs, for test_checkpoints.py.

All of them train with the schedule of four steps and save after the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integration.matrix import FP32, FSDP2_TP2, FSDP4, Flags
from tests.integration.matrix import rows as rows_of
from tests.integration.recorded import Recorded, differing

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

SAVED = 2
_FLAGS: Flags = FP32 | {
    "checkpoint.enable": True,
    "checkpoint.interval": SAVED,
    "checkpoint.keep_latest_k": 0,
    "training.steps": SAVED + 2,
}
# What another program saved says nothing of a place in our data.
_OTHER_DATA: Flags = {"checkpoint.exclude_from_loading": "dataloader"}


def saved(folder: Path, _: str) -> dict[str, Any]:
    """Four steps on fsdp 4; two of them again from the checkpoint, on the same mesh and another.

    Leaves the checkpoint, and the batches of the last two steps in `batches_after.pt`.
    """
    whole = Recorded(_FLAGS | FSDP4, folder / "ours")
    for _ in range(SAVED):
        whole.step()
    whole.trainer.checkpointer.save(whole.trainer.step)
    seen: list[Batch] = []
    whole.batches = _keeping(whole.batches, seen)
    for _ in range(2):
        whole.step()
    _save_global_batches(seen, folder / "batches_after.pt")
    result = {"losses": whole.global_losses()}
    again = resumed(_FLAGS | FSDP4, folder / "ours")
    result["resumed_at"] = again.trainer.step
    for _ in range(2):
        again.step()
    result["differing"] = differing(whole, again, last=2)
    again.close()
    whole.close()
    other = resumed(_FLAGS | FSDP2_TP2, folder / "ours")
    for _ in range(2):
        other.step()
    result["fsdp2_tp2"] = other.global_losses()
    other.close()
    return result


def resumed_on_one_rank(folder: Path, _: str) -> list[float]:
    """Losses of the two steps after the checkpoint that four ranks left."""
    one = resumed(_FLAGS | rows_of(8), folder / "ours")
    for _ in range(2):
        one.step()
    losses = one.global_losses()
    one.close()
    return losses


def resumed_from_plain_torchtitan(folder: Path, _: str) -> list[float]:
    """Losses on four ranks after the checkpoint that plain torchtitan left, on its batches."""
    recorded = resumed(_FLAGS | FSDP4 | _OTHER_DATA, folder / "plain")
    mine = _rows_of_rank(torch.load(folder / "batches.pt")[SAVED:])
    recorded.batches = recorded.trainer.batch_generator(mine)
    for _ in range(2):
        recorded.step()
    losses = recorded.global_losses()
    recorded.close()
    return losses


def resumed(flags: Flags, folder: Path) -> Recorded:
    recorded = Recorded(flags, folder)
    assert recorded.trainer.checkpointer.load(SAVED), "there is no such checkpoint"
    return recorded


def _keeping(batches: Iterator[Batch], seen: list[Batch]) -> Iterator[Batch]:
    for inputs, labels in batches:
        seen.append(({name: value.clone() for name, value in inputs.items()}, labels.clone()))
        yield inputs, labels


def _save_global_batches(mine: list[Batch], path: Path) -> None:
    """Every rank's rows one below the other, as one rank would be given them."""
    every: list[list[Batch]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    whole = [
        (
            {name: torch.cat([inputs[name] for inputs, _ in parts]) for name in parts[0][0]},
            torch.cat([labels for _, labels in parts]),
        )
        for parts in zip(*every, strict=True)
    ]
    if dist.get_rank() == 0:
        torch.save(whole, path)


def _rows_of_rank(batches: list[Batch]) -> Iterator[Batch]:
    """As many of eight rows for each rank."""
    count = 8 // dist.get_world_size()
    rows = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    for inputs, labels in batches:
        yield {name: value[rows].clone() for name, value in inputs.items()}, labels[rows].clone()
