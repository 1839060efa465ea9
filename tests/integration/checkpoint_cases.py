"""Checkpoints across meshes and programs, for test_checkpoints.py.

All of them train with the schedule of four steps and save after the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graph_trainer as gt
from graph_trainer.titan.checkpoint_files import ManifestWriter, damage
from graph_trainer.titan.checkpoint_reader import DataLoadPlanner, DataReader
from graph_trainer.titan.checkpointer import CheckedCheckpointManager, _tied
from tests import odd_weights
from tests.integration.matrix import FP32, FSDP2_TP2, FSDP4, MODELS, Flags
from tests.integration.matrix import rows as rows_of
from tests.integration.recorded import EAGER, Recorded, differing

from torchtitan.models.llama3.model import Llama3TransformerBlock  # isort: skip; graph_trainer comes first

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
    """Four steps on fsdp 4; two of them again from the checkpoint on another mesh.

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
    result: dict[str, Any] = {"losses": whole.global_losses(), "seed": torch.initial_seed()}
    whole.close()
    other = resumed(_FLAGS | FSDP2_TP2 | EAGER, folder / "ours")
    result["seed_on_fsdp2_tp2"] = torch.initial_seed()
    for _ in range(2):
        other.step()
    result["fsdp2_tp2"] = other.global_losses()
    other.close()
    return result


def dropout_resumed(folder: Path, _: str) -> dict[str, Any]:
    """Four eager steps with dropout; two of them again from the checkpoint, captured.

    Ranks draw different numbers, as where they have drawn initial values of uneven shards.
    """
    forward = Llama3TransformerBlock.forward

    def forward_and_drop(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return nn.functional.dropout(forward(self, *args, **kwargs), 0.2, self.training)

    with patch.object(Llama3TransformerBlock, "forward", forward_and_drop):
        whole = Recorded(_FLAGS | FSDP4 | EAGER, folder / "dropout")
        torch.manual_seed(dist.get_rank())
        for _ in range(SAVED):
            whole.step()
        whole.trainer.checkpointer.save(whole.trainer.step)
        for _ in range(2):
            whole.step()
        again = resumed(_FLAGS | FSDP4, folder / "dropout")
        result: dict[str, Any] = {"resumed_at": again.trainer.step}
        for _ in range(2):
            again.step()
        result["differing"] = differing(whole, again, last=2)
        again.close()
        whole.close()
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


def through_hugging_face(folder: Path, which: str) -> dict[str, Any]:
    """Export a model of fsdp 4 to Hugging Face's layout, and load that on fsdp 2 x tp 2.

    Args:
        which: the place of the model in MODELS.
    """
    model, home = MODELS[int(which)], folder / f"hugging_face_{which}"
    flags: Flags = model.flags | FP32 | EAGER | {"checkpoint.enable": True}
    export = {
        "checkpoint.last_save_model_only": True,
        "checkpoint.last_save_in_hf": True,
        "checkpoint.export_dtype": "float32",
    }
    saving = Recorded(flags | FSDP4 | export, home / "saved")
    saving.trainer.checkpointer.save(1, last_step=True)
    exported = home / "saved" / "checkpoint" / "step-1"
    given = {
        "checkpoint.initial_load_path": exported,
        "checkpoint.initial_load_in_hf": True,
        "debug.seed": 43,
    }
    loading = Recorded(flags | FSDP2_TP2 | given, home / "loaded")
    before = {name: parameter.full_tensor() for name, parameter in loading.parameters()}
    loading.trainer.checkpointer.load()
    result: dict[str, Any] = {"unchanged": [], "differing": []}
    for (name, saved), (_, loaded) in zip(saving.parameters(), loading.parameters(), strict=True):
        whole = loaded.full_tensor()
        if not torch.equal(saved.full_tensor(), whole):
            result["differing"].append(name)
        if torch.equal(before[name], whole):
            result["unchanged"].append(name)
    with safe_open(next(exported.glob("*.safetensors")), "pt") as file:
        result["names"] = sorted(file.keys())
    result["damage"] = damage(exported)
    result["files"] = sorted(path.name for path in exported.iterdir())
    saving.close()
    loading.close()
    return result


def odd_weights_to_hugging_face(folder: Path, _: str) -> dict[str, Any]:
    """Export scalars, integers, booleans and tied weights of fsdp 4, and load that on hsdp 2 x 2.

    In two files, which two ranks write.
    """
    device = "cuda" if torch.accelerator.is_available() else "cpu"

    def made(sizes: tuple[int, ...], home: Path, **options: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(len(sizes))
        mode = "hybrid_shard" if len(sizes) > 1 else "fully_shard"
        model = odd_weights.OddModel(odd_weights.OddModel.Config()).to(device)
        model = gt.simple_fsdp(model, init_device_mesh(device, sizes), mode=mode)
        adapter = odd_weights.OddAdapter(odd_weights.OddModel.Config(), None)
        adapter.fqn_to_index_mapping = {"model.scale": 1, "model.seen": 2, "model.gate.weight": 2}
        config = CheckedCheckpointManager.Config(enable=True, keep_latest_k=0, **options)
        none = dict.fromkeys(("dataloader", "optimizers", "lr_schedulers"))
        given = {"states": {}, "sd_adapter": adapter, "base_folder": str(home)}
        return model, config.build(model_parts=[model], **given, **none)

    def whole(model: nn.Module) -> dict[str, torch.Tensor]:
        state = model.state_dict()
        return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}

    model, saving = made((4,), folder / "odd", last_save_in_hf=True)
    saving.save(1, last_step=True)
    exported = folder / "odd/checkpoint/step-1"
    given = {"initial_load_path": str(exported), "initial_load_in_hf": True}
    other, loading = made((2, 2), folder / "odd_loaded", **given)
    before = {name: value.clone() for name, value in whole(other).items()}
    loading.load()
    files = sorted(exported.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file, device=device)
    saved, one = whole(model), torch.ones(1)
    looks_tied = {"one": one, "other": one if dist.get_rank() == 3 else one.clone()}
    return {
        "tied_on_one_rank": _tied(looks_tied),
        "files": [file.name for file in files],
        "damage": damage(exported),
        "differing": odd_weights.differing(found, odd_weights.expected(saved, torch.float32)),
        "loaded": odd_weights.differing(whole(other), saved),
        "unlike_before": odd_weights.differing(before, saved),
    }


class Tied(nn.Module):
    """Embedding and head of one weight, whose 13 rows no mesh divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).tanh())


def tied_across_meshes(folder: Path, _: str) -> dict[str, Any]:
    """Losses of four steps on fsdp 4, and of the last two again on hsdp 2 x 2 from a checkpoint."""
    tokens = torch.arange(26).view(2, 13) % 13
    device = "cuda" if torch.accelerator.is_available() else "cpu"

    def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() * 3 % 13)

    def made(seed: int, *sizes: int) -> nn.Module:
        torch.manual_seed(seed)
        mode = "hybrid_shard" if len(sizes) > 1 else "fully_shard"
        return gt.simple_fsdp(Tied().to(device), init_device_mesh(device, sizes), mode=mode)

    def losses(model: nn.Module) -> list[float]:
        step = gt.compile(gt.capture(model, loss_fn, (tokens.to(device),)))
        values = []
        for _ in range(2):
            loss, gradients = step(model, tokens.to(device))
            values.append(loss.item())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter -= 0.1 * gradients[name]
        return values

    whole, other, step = made(7, 4), made(99, 2, 2), folder / "tied" / "step-2"
    before = losses(whole)
    dcp.save(whole.state_dict(), storage_writer=ManifestWriter(step))
    state = other.state_dict()
    dcp.load(state, storage_reader=DataReader(str(step)), planner=DataLoadPlanner())
    other.load_state_dict(state)
    return {"before": before, "after": losses(whole), "other": losses(other)}


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
