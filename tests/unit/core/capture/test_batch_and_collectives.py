"""A batch with tensors of the model, and collectives that write in place, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn

import graph_trainer as gt
from graph_trainer.testing import fake_mesh, mean_square
from tests.unit.core.capture.side_effects import Model, batches, buffer_assigned


@pytest.mark.parametrize(
    ("of_batch", "message"),
    [
        (lambda m: m.linear.weight, r"'args\[0\]' of the batch is a parameter"),
        (lambda m: m.average.expand(3, 4), "shares the memory of 'average', which the step writes"),
        (lambda m: m.linear.weight * 2, "was computed with gradients"),
    ],
)
def test_a_batch_with_a_tensor_of_the_model_is_refused(of_batch: Any, message: str) -> None:
    model = Model(buffer_assigned)
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(model, mean_square, (of_batch(model),))


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return parts[0] + parts[1]


def reduced(x: torch.Tensor) -> torch.Tensor:
    total = x.detach().clone()
    dist.all_reduce(total)
    return x + total


def sent(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    dist.broadcast(x, 0)
    return x


@pytest.mark.parametrize(
    "collective",
    [gathered, reduced, sent, lambda x: torch.stack(torch.distributed.nn.all_gather(x)).sum(0)],
)
def test_a_collective_that_writes_in_place_is_refused(collective: Any) -> None:
    fake_mesh(2)
    with pytest.raises(gt.CaptureError, match=r"at .*py:\d+, .*_functional_collectives"):
        gt.capture(Model(lambda m, x: collective(x)), mean_square, (batches()[0],))
