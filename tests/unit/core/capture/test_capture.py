"""gt.capture: the graph computes what eager does, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from tests.unit.core.capture.steps import batch, check_against_eager, mean, net, squares


def test_a_plain_net() -> None:
    joint = check_against_eager(net(), squares, *batch())
    assert [i.name for i in joint.signature.inputs][-2:] == ["args[0]", "args[1]"]


def test_capture_twice_gives_the_same_graph() -> None:
    model = net()
    first, second = (gt.capture(model, squares, batch()) for _ in range(2))
    assert first.graph_module.code == second.graph_module.code
    assert first.signature == second.signature
    assert "flat_" not in first.graph_module.code, "names say what inputs are"


def test_under_the_users_no_grad_and_inference_mode() -> None:
    model, (x, y) = net(), batch()
    code = gt.capture(model, squares, (x, y)).graph_module.code
    with torch.no_grad():
        assert gt.capture(model, squares, (x, y)).graph_module.code == code
    with torch.inference_mode():
        assert gt.capture(model, squares, (x, y)).graph_module.code == code


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.head_again = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head_again(self.shared(torch.tanh(self.shared(x))))


def test_a_module_called_twice_and_one_under_two_names() -> None:
    joint = check_against_eager(Twice(), squares, *batch())
    (head,) = [i for i in joint.signature.inputs if i.name == "head.weight"]
    assert head.aliases == ("head_again.weight",)


def test_lstm_which_keeps_its_weights_in_a_list_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    # oneDNN's LSTM hands its backward a workspace that fake tensors do not have
    with torch.backends.mkldnn.flags(enabled=False):
        joint = check_against_eager(Model(), mean, torch.randn(5, 2, 4))
    assert len(list(joint.gradients())) == 4


def test_batch_norm_statistics_and_a_replaced_buffer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("average", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = self.average
            self.average = 0.9 * old + x.mean(0)
            # backward reads the old buffer, so it must not be overwritten before
            return self.norm(x) * old * self.average

    joint = check_against_eager(Model(), mean, torch.randn(5, 4))
    mutated = {i.name for i in joint.signature.inputs if i.mutated}
    assert mutated == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "average",
    }


class Recomputed(nn.Module):
    def __init__(self, dropout: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(
                lambda x, f=layer: torch.tanh(self.dropout(f(x))), x, use_reentrant=False
            )
            x = F.dropout(x, 0.1)
        return x


@pytest.mark.parametrize(
    "dropout",
    [
        lambda x: x,
        lambda x: F.dropout(x, 0.5),
        lambda x: x * torch.rand_like(x).add_(1),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: F.dropout(x, 0.5) * torch.randn(3, 4),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
    ],
    ids=["none", "dropout", "written after", "functional", "two draws", "mask"],
)
def test_checkpointed_blocks_draw_the_same_numbers_again(
    dropout: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    joint = check_against_eager(Recomputed(dropout), mean, torch.randn(3, 4))
    assert not any("random_draw" in (n.meta.get("custom") or {}) for n in joint.graph.nodes)


def test_checkpointed_blocks_read_their_parameters_from_the_graphs_inputs() -> None:
    joint = check_against_eager(Recomputed(torch.sin), mean, torch.randn(3, 4))
    assert not joint.graph.find_nodes(op="get_attr")


def test_hooks_on_a_parameters_gradient() -> None:
    model = net()
    model[0].weight.register_hook(lambda g: 2 * g)
    check_against_eager(model, squares, *batch())


def test_a_hook_after_accumulation_is_refused() -> None:
    model = net()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(gt.CaptureError, match=r"0\.weight.*accumulated into \.grad"):
        gt.capture(model, squares, batch())


class Sums(nn.Module):
    """Gradients that autograd hands out expanded, shared, or as the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4))
        self.b = nn.Parameter(torch.randn(4))
        self.c = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a + self.b).tanh().sum() + self.c.sum() + Product.apply(self.c, x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return a @ x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.saved_tensors[0], None


def test_every_gradient_has_memory_of_its_own() -> None:
    model, x = Sums(), torch.randn(4)
    check_against_eager(model, lambda m, x: m(x), x)
    model.c.requires_grad_(False)
    before = x.clone()
    for loss_fn in (lambda m, x: m(x), lambda m, x: Product.apply(m.a, x) + m.b.sum()):
        _, gradients = gt.compile(gt.capture(model, loss_fn, (x,)))(model, x)
        for gradient in gradients.values():
            gradient.mul_(2)  # as clipping does
        _, again = gt.compile(gt.capture(model, loss_fn, (x,)))(model, x)
        assert torch.equal(x, before)
        for name in gradients:
            assert torch.equal(gradients[name], 2 * again[name]), name


def test_a_loss_that_is_a_parameter_has_memory_of_its_own() -> None:
    model = nn.Module()
    model.p = nn.Parameter(torch.tensor(2.0))
    loss, _ = gt.compile(gt.capture(model, lambda m: m.p.view(())))(model)
    with torch.no_grad():
        model.p.fill_(5)
    assert loss == 2


def test_frozen_and_unused_parameters() -> None:
    model = net()
    model[0].requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(2))
    joint = gt.capture(model, lambda m, x, y: F.mse_loss(m[2](m[1](m[0](x))), y), batch())
    assert [n for n, _ in joint.gradients()] == ["2.weight", "2.bias"]
    assert joint.signature.parameters_without_grad == ("unused",)


def test_a_model_with_nothing_to_train() -> None:
    model = net().requires_grad_(False)
    joint = gt.capture(model, squares, batch())
    loss, gradients = gt.compile(joint)(model, *batch())
    assert torch.equal(loss, squares(model, *batch()))
    assert gradients == {}


def test_a_batch_tensor_that_requires_a_gradient() -> None:
    """For a penalty on the input's gradient; it is no output of the step."""

    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).tanh().sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return g.square().sum()

    check_against_eager(net(), penalty, torch.randn(3, 4, requires_grad=True))
