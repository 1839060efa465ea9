"""Small models and losses, and a captured step compared with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import graph_trainer as gt
from graph_trainer.core.graph.joint_graph import JointGraph


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def check_against_eager(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
) -> JointGraph:
    """Loss, gradients, buffers and random state of the graph are bitwise those of eager."""
    before = {n: b.clone() for n, b in model.named_buffers()}
    joint = gt.capture(model, loss_fn, args, kwargs)
    torch.manual_seed(3)
    loss, gradients = gt.compile(joint)(model, *args, **kwargs)
    random = torch.get_rng_state()
    after = {n: b.clone() for n, b in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    model.zero_grad()
    torch.manual_seed(3)
    expected = loss_fn(model, *args, **kwargs)
    expected.backward()
    assert torch.equal(loss, expected)
    assert gradients.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(gradients[name], parameter.grad), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, after[name]), name
    assert torch.equal(random, torch.get_rng_state())
    model.zero_grad()
    return joint
