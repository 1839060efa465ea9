"""The chunked cross-entropy and the losses that are logged, on two gloo ranks, for test_loss.py.

The loss alone, on a vocabulary that is split over the ranks, against the unsharded computation. The
model with this loss is a case of matrix.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss
from graph_trainer.titan.trainer import losses_over_ranks

from torchtitan.components.loss import IGNORE_INDEX  # isort: skip
from torchtitan.distributed import ParallelDims  # isort: skip

BATCH, SEQUENCE, DIM = 2, 10, 8
VOCABULARIES = (8, 7, 1)  # even, uneven, and a rank without a row
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LABELS = ((8, 8), (8, 2), (4, 0))
INPUTS = ("replicated", "plain", "by_sequence")


class Head(nn.Module):
    """A model of nothing but an output head."""

    _skip_lm_head = False

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.lm_head.weight = nn.Parameter(weight)


def loss_on(weight: torch.Tensor) -> tuple[ChunkedCrossEntropyLoss, nn.Parameter]:
    model = Head(weight)
    loss = ChunkedCrossEntropyLoss.Config(num_chunks=4).build()
    loss.attach(model)
    return loss, model.lm_head.weight


def inputs(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The same on every rank: hidden states, weight, labels and the number of valid tokens."""
    g = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(BATCH, SEQUENCE, DIM, generator=g).to(dtype)
    weight = torch.randn(vocabulary, DIM, generator=g).to(dtype)
    labels = torch.randint(0, vocabulary, (BATCH, SEQUENCE), generator=g)
    labels[0, :4] = IGNORE_INDEX
    return hidden, weight, labels, (labels != IGNORE_INDEX).sum()


def sharded(
    whole: torch.Tensor, mesh: DeviceMesh, placement: Shard | Replicate, parts: list[torch.Tensor]
) -> DTensor:
    local = parts[dist.get_rank()].clone()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def rows(weight: torch.Tensor) -> list[torch.Tensor]:
    """Each rank's rows; the last rank's may be none."""
    parts = list(weight.chunk(dist.get_world_size()))
    return parts + [weight[:0]] * (dist.get_world_size() - len(parts))


def split_vocabulary(vocabulary: int, dtype: torch.dtype, given: str) -> dict[str, Any]:
    """Loss and gradients of a head that two ranks share, beside those of one rank alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, labels, tokens = inputs(vocabulary, dtype)
    whole, whole_weight = loss_on(weight)
    whole_hidden = hidden.clone().requires_grad_()
    expected, _ = whole(whole_hidden, labels, tokens)
    expected.backward()

    split, split_weight = loss_on(sharded(weight, mesh, Shard(0), rows(weight)))
    if given == "plain":
        split_hidden = hidden.clone()
    elif given == "replicated":
        split_hidden = sharded(hidden, mesh, Replicate(), [hidden] * 2)
    else:
        split_hidden = sharded(hidden, mesh, Shard(1), list(hidden.chunk(2, dim=1)))
    split_hidden.requires_grad_()
    found, _ = split(split_hidden, labels, tokens)
    found.backward()
    gradient = split_hidden.grad
    placements = str(getattr(gradient, "placements", None))
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    losses = [torch.zeros_like(found.detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, found.detach())
    with torch.no_grad():
        validated, _ = split(split_hidden, labels, tokens)
    return {
        "loss": error(found, expected),
        "same_loss": torch.equal(losses[0], losses[1]),
        "validation_same": torch.equal(found, validated),
        "hidden": error(gradient, whole_hidden.grad),
        "hidden_placements": placements,
        "weight": error(split_weight.grad.full_tensor(), whole_weight.grad),
        "weight_placements": str(split_weight.grad.placements),
        "local_rows": split_weight.grad.to_local().shape[0],
    }


def whole_vocabulary() -> dict[str, Any]:
    """A head that tensor parallelism leaves alone: every rank computes the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, labels, tokens = inputs(7, torch.float32)
    whole, whole_weight = loss_on(weight)
    whole_hidden = hidden.clone().requires_grad_()
    whole(whole_hidden, labels, tokens)[0].backward()
    copied, copied_weight = loss_on(sharded(weight, mesh, Replicate(), [weight] * 2))
    copied_hidden = sharded(hidden, mesh, Replicate(), [hidden] * 2).requires_grad_()
    copied(copied_hidden, labels, tokens)[0].backward()
    return {
        "hidden": torch.equal(copied_hidden.grad.full_tensor(), whole_hidden.grad),
        "weight": torch.equal(copied_weight.grad.full_tensor(), whole_weight.grad),
    }


def bad_labels() -> list[str]:
    """What each label that is no token is told; a rank that waited for the other would hang."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    messages = []
    for label in (-1, 7, 8, 100):
        hidden, weight, labels, tokens = inputs(7, torch.float32)
        labels[1, 3] = label
        split, _ = loss_on(sharded(weight, mesh, Shard(0), rows(weight)))
        try:
            split(sharded(hidden, mesh, Replicate(), [hidden] * 2), labels, tokens)
            messages.append("")
        except RuntimeError as found:
            messages.append(str(found))
    return messages


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 norm of the difference; absolute where everything should be zero."""
    found, expected = found.detach().double(), expected.detach().double()
    norm = float(expected.norm())
    return float((found - expected).norm()) / (norm or 1.0)


def logged_losses(axis: str, labels: tuple[int, int]) -> dict[str, Any]:
    """What two ranks log of a step, and what one rank computes of their tokens.

    Args:
        axis: what splits the batch, "dp_shard" or "cp".
        labels: of each rank, how many of its 8 tokens count.
    """
    degrees = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1} | {axis: 2}
    dims = ParallelDims(**degrees, world_size=2)
    tokens = torch.randint(1, 16, (2, 8), generator=torch.Generator().manual_seed(1)).float()
    sums = [part[:num].sum() for part, num in zip(tokens, labels, strict=True)]
    rank, valid = dist.get_rank(), sum(labels)
    # labels are counted before context parallelism splits the sequences
    counted = torch.tensor(valid if axis == "cp" else labels[rank])
    loss = sums[rank] / valid
    found = losses_over_ranks(loss, counted, torch.tensor(valid), dims)
    mean = float(sum(sums) / valid)
    means = [float(each / num) for each, num in zip(sums, labels, strict=True) if num]
    return {"found": found, "expected": (mean, mean if axis == "cp" else max(means))}


def run(folder: Path, _: str) -> dict[str, Any]:
    """Everything about the loss on two ranks."""
    split = {
        f"{vocabulary}-{dtype}-{given}": split_vocabulary(vocabulary, DTYPES[dtype], given)
        for vocabulary in VOCABULARIES
        for dtype in DTYPES
        for given in INPUTS
    }
    logged = {
        f"{axis}-{labels}": logged_losses(axis, labels)
        for axis in ("dp_shard", "cp")
        for labels in LABELS
    }
    return {
        "split": split,
        "whole": whole_vocabulary(),
        "bad_labels": bad_labels(),
        "logged": logged,
    }
