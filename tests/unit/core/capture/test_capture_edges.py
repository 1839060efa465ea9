"""Corners of "any nn.Module" in which a capture was silently wrong once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.core.graph.annotations import parameter_of
from graph_trainer.core.graph.joint_graph import InputKind, compute_nodes
from graph_trainer.core.torch_private import FakeTensor
from tests.unit.graphs import fake_mesh


class Shifted(nn.Module):
    """Two buffers, one of which takes over the other's value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("current", torch.zeros(3))
        self.register_buffer("previous", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.previous = self.current
        self.current = x.mean(0)
        return x * self.weight + self.previous


def test_buffers_that_hand_their_values_on() -> None:
    captured, eager = Shifted(), Shifted()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    step = gt.compile(gt.capture(captured, loss_fn, (torch.ones(2, 3),)))
    for value in (1.0, 2.0, 5.0):
        x = torch.full((2, 3), value)
        loss, _ = step(captured, x)
        assert torch.equal(loss, loss_fn(eager, x))
        assert torch.equal(captured.current, eager.current)
        assert torch.equal(captured.previous, eager.previous)


def test_reentrant_checkpointing_is_refused() -> None:
    """Behind frozen layers autograd.grad never reaches it, and its gradients would be lost."""
    frozen, block, head = (nn.Linear(4, 4) for _ in range(3))
    frozen.requires_grad_(False)
    model = nn.ModuleList([frozen, block, head])

    def loss_fn(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        h = model[0](x).requires_grad_()
        return model[2](checkpoint(model[1], h, use_reentrant=True)).sum()

    with pytest.raises(gt.CaptureError, match="use_reentrant=False"):
        gt.capture(model, loss_fn, (torch.ones(2, 4),))


class Cached(nn.Module):
    """Fills a dict, a list and a set while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.tables: dict[int, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []
        self.sizes: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x), device=x.device)[:, None] + 1.0
        self.seen.append(x)
        self.sizes.add(len(x))
        return x * self.weight * self.tables[len(x)]


def test_caches_keep_no_fake_tensors() -> None:
    model = Cached()
    gt.capture(model, lambda m, x: m(x).sum(), (torch.ones(2, 3),))
    assert model.tables == {} and model.seen == [] and model.sizes == set()
    assert not isinstance(model(torch.ones(2, 3)), FakeTensor)


@pytest.mark.parametrize("which", ["transposed", "channels_last"])
def test_gradients_are_laid_out_as_autograd_lays_them_out(which: str) -> None:
    torch.manual_seed(0)
    if which == "transposed":
        model: nn.Module = nn.Linear(5, 4, bias=False)
        x = torch.randn(5, 4)

        def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return (model.weight.t() * x).sum()
    else:
        model = nn.Conv2d(3, 4, 3)
        x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)

        def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).square().sum()

    _, gradients = gt.compile(gt.capture(model, loss_fn, (x,)))(model, x)
    loss_fn(model, x).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], parameter.grad)
        assert gradients[name].stride() == parameter.grad.stride()


def test_names_of_sharded_parameters_carry_no_wrapper() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
    gt.simple_fsdp(model, fake_mesh(2))
    joint = gt.capture(model, lambda m, x: m(x).sum(), (torch.ones(2, 4),))
    known = {spec.name for spec, _ in joint.inputs_of(InputKind.PARAMETER)}
    served = {parameter_of(n) for n in compute_nodes(joint.graph)} - {None}
    assert served == known == {"0.weight", "0.bias", "1.weight", "1.bias"}


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_a_step_refuses_another_mode_or_a_frozen_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    x = torch.ones(2, 4)
    step = gt.compile(gt.capture(model, mean_square, (x,)))
    step(model, x)
    model.eval()
    with pytest.raises(gt.CaptureError, match="eval"):
        step(model, x)
    model.train()
    model[0].bias.requires_grad_(False)
    with pytest.raises(gt.CaptureError, match="'0.bias' was trainable"):
        step(model, x)


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y if y.sum().item() > 0 else -y


@pytest.mark.parametrize(
    ("model", "place"),
    [(Peeking(), "the forward of the model itself"), (nn.Sequential(Peeking()), "module '0'")],
)
def test_reading_a_value_names_the_place_and_the_remedy(model: nn.Module, place: str) -> None:
    with pytest.raises(gt.CaptureError) as caught:
        gt.capture(model, mean_square, (torch.ones(2, 4),))
    assert place in str(caught.value) and ".item()" in str(caught.value)


def test_arguments_that_are_no_tuple_are_refused() -> None:
    with pytest.raises(gt.CaptureError, match=r"\(batch,\)"):
        gt.capture(nn.Linear(4, 4), mean_square, torch.ones(2, 4))


def test_complex_parameters_are_reduced_as_they_are() -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(x * self.turn)

    dtypes = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = gt.simple_fsdp(Rotation(), fake_mesh(1), mp_policy=dtypes)
    mean_square(model, torch.ones(2, 4)).backward()
    assert model.turn.dtype is torch.complex64
    gradient = next(model.parameters()).grad.to_local()
    assert gradient.dtype is torch.complex64 and gradient.imag.abs().sum() > 0
