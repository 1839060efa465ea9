"""A loss that is not finite: the first step of each rank, kept without asking the device."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from graph_trainer.errors import NotFiniteError
from graph_trainer.titan.nonfinite_guard import LossGuard, refuse, refuse_gradients

FINE = [math.inf, math.inf]


@pytest.fixture
def one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_bad_step_is_named_however_late_it_is_asked_for(
    one_rank: None, bad: float, dtype: torch.dtype
) -> None:
    guard = LossGuard()
    for step, loss in enumerate([2.5, 2.25, bad, 2.0, math.nan, 1.0], start=1):
        guard.see(step, torch.tensor(loss, dtype=dtype))
    with pytest.raises(NotFiniteError, match=rf"step 3: .* \(rank 0: {bad}\)"):
        guard.check(9)


def test_finite_losses_pass_as_often_as_asked(one_rank: None) -> None:
    guard = LossGuard()
    for step in range(1, 5):
        guard.see(step, torch.tensor(torch.finfo(torch.float32).max))
        guard.check(step, [torch.full((3,), torch.finfo(torch.bfloat16).max), torch.empty(0)])


def test_the_graph_of_a_loss_is_not_kept_alive(one_rank: None) -> None:
    guard = LossGuard()
    guard.see(1, (torch.ones((), requires_grad=True) * 2).square())
    assert guard._first is not None and not guard._first.requires_grad


class Synchronises(TorchDispatchMode):
    """Fails at what makes the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func is not torch.ops.aten._local_scalar_dense.default
        assert func is not torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


def test_to_see_a_loss_waits_for_nothing() -> None:
    guard = LossGuard()
    with Synchronises():
        for step in (1, 2):
            guard.see(step, torch.tensor(math.nan))


def test_only_the_ranks_that_were_first_are_named() -> None:
    refuse([FINE, FINE])
    with pytest.raises(NotFiniteError) as caught:
        refuse([[9.0, math.nan], FINE, [4.0, math.inf], [4.0, math.nan]])
    assert str(caught.value).startswith(
        "step 4: the loss is not finite (rank 2: inf, rank 3: nan)."
    )
    with pytest.raises(NotFiniteError, match=r"rank 15: nan and 4 more ranks\)"):
        refuse([[1.0, math.nan]] * 20)
    refuse_gradients(1, [])
    with pytest.raises(NotFiniteError, match=r"14, 15 and 4 more\)"):
        refuse_gradients(1, list(range(20)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_of_a_finite_loss_is_found(one_rank: None, bad: float) -> None:
    guard = LossGuard()
    guard.see(4, torch.tensor(2.0))
    mesh = dist.init_device_mesh("cpu", (1,))
    sharded = DTensor.from_local(torch.tensor([[0.0, bad]], dtype=torch.bfloat16), mesh, [Shard(0)])
    gradients = [torch.zeros(3), sharded]
    with pytest.raises(NotFiniteError, match=r"step 4: .* gradient is not \(ranks 0\)"):
        guard.check(4, gradients)
