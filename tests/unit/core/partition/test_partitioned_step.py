"""gt.partition: loss and gradients are those of eager and of the joint step, bit by bit."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graph_trainer as gt
from graph_trainer.testing import become
from tests.integration.public_api_cases import Blocks, Cnn, Odd
from tests.unit.core.capture.steps import allocated_during, batch, squares


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


def partitioned(model, args, loss_fn=squares, **config):
    joint = gt.capture(model, loss_fn, args)
    gt.run_passes(joint, gt.PassConfig(**config))
    return gt.partition(joint, compare_ranks=False)


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


class Dropout(nn.Module):
    """Random numbers of forward are read in backward, and a buffer's old value too."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("average", torch.ones(8))

    def forward(self, x):
        hidden = F.dropout(torch.tanh(self.first(x)), 0.4) * self.average
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return self.second(hidden)


MODELS = {
    "plain": (net, squares, batch()),
    "odd": (Odd, squares, batch()),
    "batch_norm": (
        Cnn,
        lambda m, x, y: F.cross_entropy(m(x), y),
        (torch.randn(4, 3, 8, 8), torch.arange(4)),
    ),
    "dropout": (Dropout, squares, batch()),
    "checkpointed": (lambda: Blocks(dropout=0.4, recompute=True), squares, batch()),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_eagers_and_the_joint_steps(name):
    become(0, 1)
    build, loss_fn, args = MODELS[name]
    torch.manual_seed(0)
    models = [build() for _ in range(3)]
    for other in models[1:]:
        other.load_state_dict(models[0].state_dict())
    step = partitioned(models[0], args, loss_fn)
    joint = gt.compile(gt.capture(models[1], loss_fn, args))

    def by_joint(model):
        loss, found = joint(model, *args)
        for n, p in model.named_parameters():
            if n in found:
                p.grad = found[n] if p.grad is None else p.grad + found[n]
        return loss

    def by_autograd(call):
        loss = call()
        loss.backward()
        return loss.detach()

    calls = (
        lambda: by_autograd(lambda: step(*args)),
        lambda: by_joint(models[1]),
        lambda: by_autograd(lambda: loss_fn(models[2], *args)),
    )
    for number in range(3):
        found = []
        for model, call in zip(models, calls, strict=True):
            torch.manual_seed(number)
            loss = call()
            state = dict(model.named_buffers())
            found.append((loss, gradients(model), state, torch.get_rng_state()))
            if number == 1:  # gradients of the first two steps are added up
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.1 * p.grad if p.grad is not None else 0)
        for other in found[1:]:
            torch.testing.assert_close(found[0], other, rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_tensor_that_requires_a_gradient_is_refused_where_there_is_a_backward(compiled):
    become(0, 1)
    step = partitioned(net(), batch())
    step = torch.compile(step, backend=gt.backend("eager")) if compiled else step
    x, y = batch()
    loss = step(x, y).detach()
    x.requires_grad_()
    with pytest.raises(gt.CaptureError, match=r"'args\[0\]' of the batch requires a gradient"):
        step(x, y)
    with torch.no_grad():
        assert torch.equal(step(x, y), loss)


# --- as autograd --------------------------------------------------------------------------------


def test_a_scaled_loss_scales_the_gradients_as_in_eager():
    become(0, 1)
    model, args = net(), batch()
    step = partitioned(model, args)
    for number in (1, 3):
        (step(*args) * 1.7 / number).backward()
    found = gradients(model)
    model.zero_grad()
    for number in (1, 3):
        (squares(model, *args) * 1.7 / number).backward()
    torch.testing.assert_close(found, gradients(model), rtol=0, atol=0)
    asked = torch.autograd.grad(step(*args), list(model.parameters()))
    wanted = torch.autograd.grad(squares(model, *args), list(model.parameters()))
    torch.testing.assert_close(asked, wanted, rtol=0, atol=0)


def test_several_forwards_may_wait_for_their_backward():
    become(0, 1)
    model = net()
    step = partitioned(model, batch())
    other = tuple(t + 1 for t in batch())
    (step(*batch()) + 2 * step(*other)).backward()
    found = gradients(model)
    model.zero_grad()
    (squares(model, *batch()) + 2 * squares(model, *other)).backward()
    torch.testing.assert_close(found, gradients(model), rtol=0, atol=0)


def test_a_second_backward_is_autograds_error():
    become(0, 1)
    model, args = net(), batch()
    step = partitioned(model, args)
    loss = step(*args)
    loss.backward(retain_graph=True)
    once = {n: g.clone() for n, g in gradients(model).items()}
    loss.backward()
    torch.testing.assert_close(gradients(model), {n: 2 * g for n, g in once.items()})
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_derivative_is_an_error():
    become(0, 1)
    model, args = net(), batch()
    loss = partitioned(model, args)(*args) * torch.ones((), requires_grad=True)
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[0].sum().backward()


def test_a_parameter_that_changes_before_backward_is_an_error():
    become(0, 1)
    model, args = net(), batch()
    loss = partitioned(model, args)(*args)
    with torch.no_grad():
        model[3].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_a_sharded_model_are_dtensors_in_grad():
    become(1, 3)
    model, args = net(), batch()
    gt.simple_fsdp(model, init_device_mesh("cpu", (3,)))
    step = partitioned(model, args)
    for _ in range(2):
        step(*args).backward()
    for parameter in model.parameters():
        assert type(parameter.grad) is DTensor
        assert parameter.grad.placements == parameter.placements


def test_the_captured_models_parameters_are_those_of_the_module():
    become(0, 1)
    model, args = net(), batch()
    joint = gt.capture(model, squares, args)
    assert dict(gt.partition(joint).named_parameters()).keys() == {
        f"model.{n}" for n, _ in model.named_parameters()
    }
    other = copy.deepcopy(model)
    gt.partition(joint, other)(*args).backward()
    assert gradients(other) and not gradients(model)
    del model
    gc.collect()
    with pytest.raises(gt.CaptureError, match="captured model does not exist any more"):
        gt.partition(joint)


def test_a_gradient_hook_would_run_twice():
    become(0, 1)
    model, args = net(), batch()
    model[0].weight.register_hook(lambda g: 2 * g)
    step = partitioned(model, args)
    with pytest.raises(gt.CaptureError, match="'0.weight' has a gradient hook"):
        step(*args)


def test_a_graph_without_backward_is_refused():
    become(0, 1)
    model = net()
    joint = gt.capture(model, squares, batch(), backward=False)
    with pytest.raises(gt.PassError, match="captured without backward"):
        gt.partition(joint)


def test_a_buffer_is_written_where_nobody_asks_for_gradients():
    become(0, 1)
    model, other = Dropout(), Dropout()
    other.load_state_dict(model.state_dict())
    step = partitioned(model, batch())
    for each in (step, lambda *args: squares(other, *args)):
        torch.manual_seed(0)
        with torch.no_grad():
            each(*batch())
        each(*batch())
    assert torch.equal(model.average, other.average)
    assert not torch.equal(model.average, torch.ones(8))


# --- memory -------------------------------------------------------------------------------------


def deep():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    wide = (nn.Linear(4, 6 * 64), nn.Tanh(), nn.Linear(6 * 64, 64))
    return nn.Sequential(*wide, *layers, nn.Linear(64, 1))


def test_saved_values_are_freed_as_backward_goes_and_without_backward_are_not_made():
    become(0, 1)
    model, args = deep(), batch(4096)
    step = partitioned(model, args)
    saved = step.halves.saved_bytes()
    activation = 4096 * 64 * 4
    assert saved >= 12 * activation
    step(*args).backward()
    losses = []
    kept = allocated_during(lambda: losses.append(step(*args)))
    assert kept == pytest.approx(saved, rel=0.3)
    # when two gradients of the wide layer are alive, each of six, the six below are freed
    assert allocated_during(lambda: losses.pop().backward()) < 9 * activation
    with torch.no_grad():
        step(*args)
        assert allocated_during(lambda: step(*args)) < 14 * activation < saved + activation
        assert not step(*args).requires_grad
