"""What cannot be captured is refused with an error that names the place and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import graph_trainer as gt
from tests.unit.core.capture.steps import batch, check_against_eager, mean, net, squares


class Inner(nn.Module):
    def __init__(self, what: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, self.linear(x))


def reads_item(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def model_of(what: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), Inner(what)), nn.Linear(4, 1))


def test_data_dependent_code_is_an_error_that_names_op_and_module() -> None:
    with pytest.raises(gt.CaptureError, match=r"module '0\.1'.*_local_scalar_dense"):
        gt.capture(model_of(reads_item), mean, (batch()[0],))


def test_an_error_that_the_model_catches_itself_is_not_blamed() -> None:
    def falls_back(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        try:
            module.linear(x[:, :1])
        except RuntimeError:
            x = module.linear(x)
        return x

    model = model_of(falls_back)
    model[1] = Inner(reads_item)
    with pytest.raises(gt.CaptureError, match=r"module '1'"):
        gt.capture(model, mean, (batch()[0],))


def test_an_error_in_backward_names_the_module() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("bad backward")

    model = model_of(lambda m, x: Bad.apply(x))
    with pytest.raises(gt.CaptureError, match=r"module '0\.1'.*bad backward"):
        gt.capture(model, mean, (batch()[0],))


def test_losses_that_cannot_be_captured() -> None:
    model, (x, _) = net(), batch()
    for loss_fn, message in [
        (lambda m, x: m(x), r"scalar tensor and returned \(3, 1\)"),
        (lambda m, x: 3.0, "returned float"),
        (lambda m, x: m(x).detach().mean(), "does not depend on any parameter"),
        (lambda m, x: m(x).mean().backward(), "returned NoneType"),
    ]:
        with pytest.raises(gt.CaptureError, match=message):
            gt.capture(model, loss_fn, (x,))


@pytest.mark.parametrize("detach", [False, True])
def test_backward_inside_the_loss_is_refused(detach: bool) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result = model(x).mean()
        result.backward(retain_graph=True)
        return result.detach() if detach else result

    model = net()
    with pytest.raises(gt.CaptureError, match=r"'0\.weight': it calls backward\(\) itself"):
        gt.capture(model, loss, (batch()[0],))
    assert model[0].weight.grad is None


class Buffers(nn.Module):
    def __init__(self, forward: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", torch.zeros(2))
        self.c = self.b
        self.change = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return self.linear(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "a", torch.zeros(3)), r"buffer 'a' of \(2,\).*one of \(3,\)"),
        (lambda m: setattr(m, "a", torch.zeros(2).long()), "'a'.*int64"),
        (lambda m: setattr(m, "a", None), r"adds or removes buffers: \['a'\]"),
        (lambda m: m.register_buffer("d", torch.ones(1)), r"adds or removes buffers: \['d'\]"),
    ],
)
def test_a_step_leaves_the_buffers_it_found(change: Any, message: str) -> None:
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(Buffers(change), mean, (batch()[0],))


def test_replacing_one_of_two_names_of_a_buffer_is_refused() -> None:
    model = Buffers(lambda m: setattr(m, "c", m.c + 1))
    model.register_buffer("a", model.b)
    with pytest.raises(gt.CaptureError, match=r"one tensor under the names \['a', 'b'\]"):
        model.change = lambda m: setattr(m, "b", m.b + 1)
        gt.capture(model, mean, (batch()[0],))


def test_a_parameter_read_past_its_attribute_is_refused() -> None:
    """It would be a constant: right once, and never trained."""
    model = net()
    hidden = [model[0].weight]
    with pytest.raises(gt.CaptureError, match=r"'0\.weight' is read through something else"):
        gt.capture(model, lambda m, x: m(x).mean() + hidden[0].sum(), (batch()[0],))


def test_a_trainable_tensor_outside_the_model_is_refused() -> None:
    temperature = torch.ones(3, 1, requires_grad=True)
    with pytest.raises(gt.CaptureError, match="its gradient would be lost"):
        gt.capture(net(), lambda m, x: (m(x) * temperature).mean(), (batch()[0],))


def test_a_table_outside_the_model_is_a_constant() -> None:
    table = torch.randn(3, 1)
    check_against_eager(net(), lambda m, x: (m(x) * table).mean(), batch()[0])


def test_a_subclass_inside_a_subclass_is_refused_by_name() -> None:
    model = net()
    inner = TwoTensor(torch.ones(4), torch.ones(4))
    model.register_buffer("nested", TwoTensor(inner, inner))
    with pytest.raises(
        gt.CaptureError, match="'nested' is a TwoTensor that holds a TwoTensor in 'a'"
    ):
        gt.capture(model, squares, batch())


def test_a_failed_capture_does_not_spoil_the_next() -> None:
    model = net()
    code = gt.capture(model, squares, batch()).graph_module.code
    with pytest.raises(gt.CaptureError):
        gt.capture(model, lambda m, *_: m(torch.ones(1)), batch())
    assert gt.capture(model, squares, batch()).graph_module.code == code
