"""gt.capture: the graph computes what eager does, bitwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import graph_trainer as gt
from graph_trainer.core.graph.annotations import parameter_of
from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.torch_private import FakeTensor
from graph_trainer.testing import fake_mesh
from tests.unit.core.capture.steps import (
    batch,
    check_against_eager,
    check_step,
    eager,
    mean,
    net,
    squares,
)


def test_capture_twice_gives_the_same_graph_whatever_the_users_gradient_mode():
    model, args = net(), batch()
    first = gt.capture(model, squares, args)
    assert [i.name for i in first.signature.inputs][-2:] == ["args[0]", "args[1]"]
    assert "flat_" not in first.graph_module.code, "names say what inputs are"
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            again = gt.capture(model, squares, args)
        assert again.graph_module.code == first.graph_module.code
        assert again.signature == first.signature


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.head_again = self.head

    def forward(self, x):
        return self.head_again(self.shared(torch.tanh(self.shared(x))))


def test_a_module_called_twice_and_one_under_two_names():
    joint = check_against_eager(Twice(), squares, *batch())
    (head,) = [i for i in joint.signature.inputs if i.name == "head.weight"]
    assert head.aliases == ("head_again.weight",)


def test_lstm_which_keeps_its_weights_in_a_list_too():
    # oneDNN's LSTM hands its backward a workspace that fake tensors do not have
    with torch.backends.mkldnn.flags(enabled=False):
        joint = check_against_eager(
            nn.LSTM(4, 3), lambda m, x: m(x)[0].mean(), torch.randn(5, 2, 4)
        )
    assert len(list(joint.gradients())) == 4


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("average", torch.ones(4))

    def forward(self, x):
        old = self.average
        self.average = 0.9 * old + x.mean(0)
        # backward reads the old buffer, so it must not be overwritten before
        return self.norm(x) * old * self.average


def test_batch_norm_statistics_and_a_replaced_buffer():
    joint = check_against_eager(Statistics(), mean, torch.randn(5, 4))
    mutated = {i.name for i in joint.signature.inputs if i.mutated}
    of_norm = {f"norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    assert mutated == {*of_norm, "average"}


class Shifted(nn.Module):
    """Two buffers, one of which takes over the other's value."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("current", torch.zeros(3))
        self.register_buffer("previous", torch.zeros(3))

    def forward(self, x):
        self.previous = self.current
        self.current = x.mean(0)
        return x * self.weight + self.previous


def test_buffers_that_hand_their_values_on():
    captured, model = Shifted(), Shifted()
    step = gt.compile(gt.capture(captured, mean, (torch.ones(2, 3),)))
    for value in (1.0, 2.0, 5.0):
        x = torch.full((2, 3), value)
        assert torch.equal(step(captured, x)[0], eager(model, mean, x)[0])
        assert torch.equal(captured.current, model.current)
        assert torch.equal(captured.previous, model.previous)


class Cached(nn.Module):
    """Fills a dict and a list while it runs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.tables, self.seen = {}, []

    def forward(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x), device=x.device)[:, None] + 1.0
        self.seen.append(x)
        return x * self.weight * self.tables[len(x)]


def test_caches_keep_no_fake_tensors():
    model = Cached()
    gt.capture(model, mean, (torch.ones(2, 3),))
    assert model.tables == {} and model.seen == []
    assert not isinstance(model(torch.ones(2, 3)), FakeTensor)


# --- gradients ----------------------------------------------------------------------------------


def test_hooks_on_a_parameters_gradient():
    model = net()
    model[0].weight.register_hook(lambda g: 2 * g)
    check_against_eager(model, squares, *batch())


class Sums(nn.Module):
    """Gradients that autograd hands out expanded, shared, or as the batch itself."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4))
        self.b = nn.Parameter(torch.randn(4))
        self.c = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (self.a + self.b).tanh().sum() + self.c.sum() + Product.apply(self.c, x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, x):
        ctx.save_for_backward(x)
        return a @ x

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


def test_every_gradient_has_memory_of_its_own():
    model, x = Sums(), torch.randn(4)
    check_against_eager(model, mean, x)
    model.c.requires_grad_(False)
    before = x.clone()
    for loss_fn in (mean, lambda m, x: Product.apply(m.a, x) + m.b.sum()):
        step = gt.compile(gt.capture(model, loss_fn, (x,)))
        for gradient in step(model, x)[1].values():
            gradient.mul_(2)  # as clipping does
        assert torch.equal(x, before)
        check_step(step, model, loss_fn, x)


def test_a_loss_that_is_a_parameter_has_memory_of_its_own():
    model = nn.Module()
    model.p = nn.Parameter(torch.tensor(2.0))
    loss, _ = gt.compile(gt.capture(model, lambda m: m.p.view(())))(model)
    with torch.no_grad():
        model.p.fill_(5)
    assert loss == 2


def test_gradients_are_laid_out_as_autograd_lays_them_out():
    weight = nn.Linear(5, 4, bias=False)
    check_against_eager(weight, lambda m, x: (m.weight.t() * x).sum(), torch.randn(5, 4))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    check_against_eager(nn.Conv2d(3, 4, 3), lambda m, x: m(x).square().sum(), x)


def test_frozen_and_unused_parameters():
    model = net()
    model[0].requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(2))
    joint = gt.capture(model, lambda m, x, y: F.mse_loss(m[2](m[1](m[0](x))), y), batch())
    assert [n for n, _ in joint.gradients()] == ["2.weight", "2.bias"]
    assert joint.signature.parameters_without_grad == ("unused",)


def test_a_model_with_nothing_to_train():
    check_against_eager(net().requires_grad_(False), squares, *batch())


def test_a_penalty_on_the_gradient_of_the_input():
    def penalty(model, x):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return g.square().sum()

    check_against_eager(net(), penalty, torch.randn(3, 4))


def test_a_batch_tensor_that_requires_a_gradient_is_refused_at_capture_and_later():
    x, y = batch()
    message = r"'args\[0\]' of the batch requires a gradient"
    step = gt.compile(gt.capture(net(), squares, (x, y)))
    for call in (lambda x: gt.capture(net(), squares, (x, y)), lambda x: step(net(), x, y)):
        with pytest.raises(gt.CaptureError, match=message):
            call(x.clone().requires_grad_())
    joint = check_against_eager(net(), squares, x.clone().requires_grad_(), y, backward=False)
    assert not list(joint.gradients())


# --- sharded ------------------------------------------------------------------------------------


def test_names_of_sharded_parameters_carry_no_wrapper():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
    gt.simple_fsdp(model, fake_mesh(2))
    joint = gt.capture(model, mean, (torch.ones(2, 4),))
    known = {spec.name for spec, _ in joint.inputs_of(InputKind.PARAMETER)}
    served = {parameter_of(n) for n in compute_nodes(joint.graph)} - {None}
    assert served == known == {"0.weight", "0.bias", "1.weight", "1.bias"}


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(x * self.turn).square()


def test_complex_parameters_are_reduced_as_they_are():
    dtypes = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = gt.simple_fsdp(Rotation(), fake_mesh(1), mp_policy=dtypes)
    mean(model, torch.ones(2, 4)).backward()
    assert model.turn.dtype is torch.complex64
    gradient = next(model.parameters()).grad.to_local()
    assert gradient.dtype is torch.complex64 and gradient.imag.abs().sum() > 0
