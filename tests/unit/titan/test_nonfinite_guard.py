"""Losses and gradients that are not finite: no update, and the first step and its ranks by name."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from graph_trainer.errors import NotFiniteError
from graph_trainer.titan.nonfinite_guard import NonfiniteGuard, Row, described, local_norm

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # isort: skip

UNLABELLED = -1.0
"""Stands for the gradient of a step without labels."""
FINE = Row(*[math.inf] * 5)
BAD = [math.nan, math.inf, -math.inf]


@pytest.fixture
def one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def shown(*rows: Row) -> tuple[int, str]:
    step, reason, _ = described(dict(enumerate(rows)))
    return step, reason


def see(guard: NonfiniteGuard, step: int, *, loss: float = 2.0, norm: float = 1.0) -> None:
    num = torch.tensor(norm)
    tokens = torch.tensor(8)
    guard.see(step, loss=torch.tensor(loss), local_norm=num, norm=num, valid_tokens=tokens)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("number", ["loss", "norm"])
def test_the_first_bad_step_is_named_however_late_it_is_asked_for(
    one_rank: None, bad: float, number: str
) -> None:
    guard = NonfiniteGuard()
    for step, value in enumerate([2.5, 2.25, bad, 2.0, math.nan, 1.0], start=1):
        see(guard, step, **{number: value})
    said = rf"\(rank 0: {bad}\)" if number == "loss" else r"gradient is not \(ranks 0\)"
    for exchange in (True, False):
        with pytest.raises(NotFiniteError, match=rf"^step 3: .*{said}"):
            guard.check(exchange=exchange)


def test_finite_numbers_pass_as_often_as_asked(one_rank: None) -> None:
    guard = NonfiniteGuard()
    guard.check()
    for step in range(1, 5):
        see(guard, step, loss=torch.finfo(torch.float32).max, norm=torch.finfo(torch.float32).max)
        guard.check()


def test_the_graph_of_a_loss_is_not_kept_alive(one_rank: None) -> None:
    guard = NonfiniteGuard()
    loss, one = (torch.ones((), requires_grad=True) * 2).square(), torch.ones(())
    guard.see(1, loss=loss, local_norm=one, norm=one, valid_tokens=one)
    assert guard._first is not None and not guard._first.requires_grad


@pytest.mark.parametrize("bad", BAD)
def test_the_ranks_part_of_the_gradients_has_a_norm_that_shows_what_is_not_finite(
    one_rank: None, bad: float
) -> None:
    mesh = dist.init_device_mesh("cpu", (1,))
    layer = nn.Linear(2, 1)
    sharded = DTensor.from_local(torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16), mesh, [Shard(0)])
    layer.weight = nn.Parameter(torch.zeros_like(sharded))
    assert local_norm(layer.parameters()) == 0
    layer.weight.grad = sharded
    assert local_norm(layer.parameters()) == 5
    layer.bias.grad = torch.tensor([bad])
    assert not torch.isfinite(local_norm(layer.parameters()))


def test_only_the_ranks_that_were_first_are_named() -> None:
    rows = [Row(9, math.nan, 1, 1, 8), FINE, Row(4, math.inf, 1, 1, 8), Row(4, math.nan, 1, 1, 8)]
    assert shown(*rows) == (4, "the loss is not finite (rank 2: inf, rank 3: nan)")
    step, reason = shown(*[Row(1, math.nan, 1, 1, 8)] * 20)
    assert reason.endswith("rank 15: nan and 4 more ranks)")
    gradients = [Row(2, 1, 1, math.inf, 8), Row(2, 1, math.inf, math.inf, 8)]
    assert shown(*gradients)[1].endswith("a gradient is not (ranks 1)")
    assert shown(*[Row(2, 1, math.nan, math.inf, 8)] * 20)[1].endswith("14, 15 and 4 more)")


def test_labels_that_are_all_ignored_and_a_sum_that_overflows_are_the_reason() -> None:
    assert "ignored (-100)" in shown(*[Row(3, math.nan, math.nan, math.nan, 0)] * 2)[1]
    assert "overflows" in shown(*[Row(3, 2, 3e38, math.inf, 8)] * 2)[1]


class Synchronises(TorchDispatchMode):
    """Fails at what makes the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func is not torch.ops.aten._local_scalar_dense.default
        assert func is not torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


def optimizers_of(model: nn.Module, *fused: bool | None) -> OptimizersContainer:
    """torchtitan's AdamW for weight and bias: fused, foreach (None) or one by one."""
    groups = [
        ParamGroupConfig(
            pattern=name,
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": 0.1, "fused": bool(each), "foreach": each is None},
        )
        for name, each in zip(("weight", "bias"), fused, strict=True)
    ]
    config = OptimizersContainer.Config(param_groups=groups)
    return OptimizersContainer(config, model_parts=[model])


def train(
    model: nn.Module, optimizers: OptimizersContainer, gradients: Sequence[float], guard: Any = None
) -> list[bool]:
    """Step with each of these numbers as the first element of the weight's gradient."""
    counted = []
    for step, value in enumerate(gradients, start=1):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert model.weight.grad is not None
        model.weight.grad[0, 0] = value
        if guard is None:
            optimizers.step()
            continue
        norm = local_norm(model.parameters())
        one, tokens = torch.ones(()), torch.tensor(0 if value == UNLABELLED else 8)
        guard.see(step, loss=one, local_norm=norm, norm=norm, valid_tokens=tokens)
        counted.append(guard.update(optimizers))
    return counted


@pytest.mark.parametrize("fused", [(True, True), (None, None), (False, False), (True, False)])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan, UNLABELLED])
@pytest.mark.parametrize("at", [0, 1])
def test_a_step_that_is_not_finite_leaves_parameters_and_moments(
    one_rank: None, fused: tuple[bool | None, bool | None], skips: bool, bad: float, at: int
) -> None:
    """Bit by bit as if the step had not been, whatever the optimizers' implementation."""
    good = [0.5, 2.0]
    gradients = [*good[:at], bad, *good[at:]]
    model = nn.Linear(3, 2)
    other = copy.deepcopy(model)
    optimizers, others = optimizers_of(model, *fused), optimizers_of(other, *fused)
    guard = NonfiniteGuard(skips=skips)
    counted = train(model, optimizers, gradients, guard)
    train(other, others, good)
    for ours, plain in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, plain)
    ours, plain = optimizers.state_dict(), others.state_dict()
    assert ours.keys() == plain.keys() and any("exp_avg_sq" in name for name in ours)
    for name, value in plain.items():
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name
    # the host does not know what a fused kernel has left out
    told = skips or fused != (True, True)
    assert counted == [value in good or not told for value in gradients]
    assert guard.skipped == skips
    with pytest.raises(NotFiniteError) if not skips else contextlib.nullcontext():
        guard.check()


def test_with_fused_optimizers_the_host_waits_for_nothing(one_rank: None) -> None:
    model = nn.Linear(3, 2)
    optimizers = optimizers_of(model, True, True)
    guard = NonfiniteGuard()
    with Synchronises():
        train(model, optimizers, [0.5, math.nan, 1.0], guard)
    with pytest.raises(NotFiniteError, match="^step 2: "):
        guard.check()
