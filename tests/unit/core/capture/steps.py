"""Small models and losses, and a captured step compared with eager."""

import gc

import torch
import torch.nn.functional as F
from torch import nn

import graph_trainer as gt
from graph_trainer.core.capture.tracing.trace import without_fused_layers


def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


def squares(model, x, y):
    return F.mse_loss(model(x), y)


def batch(rows=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)


def mean(model, x):
    return model(x).mean()


def eager(model, loss_fn, *args, backward=True, **kwargs):
    """Loss and gradients of the model itself, which is left without gradients."""
    model.zero_grad()
    with torch.set_grad_enabled(backward), without_fused_layers():
        loss = loss_fn(model, *args, **kwargs)
    if loss.requires_grad:
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def check_step(step, model, loss_fn, *args, backward=True, **kwargs):
    """Loss, gradients, buffers and random state of a step are those of eager, bit and stride."""
    before = {n: b.clone() for n, b in model.named_buffers()}

    def outcome(call):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        torch.manual_seed(3)
        loss, gradients = call()
        assert not loss.requires_grad
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        return loss, gradients, buffers, torch.get_rng_state()

    found = outcome(lambda: step(model, *args, **kwargs))
    assert all(p.grad is None for p in model.parameters())
    wanted = outcome(lambda: eager(model, loss_fn, *args, backward=backward, **kwargs))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, check_stride=True)


def check_against_eager(model, loss_fn, *args, backward=True, **kwargs):
    """Capture a step and check it; returns the joint graph."""
    joint = gt.capture(model, loss_fn, args, kwargs, backward=backward)
    check_step(gt.compile(joint), model, loss_fn, *args, backward=backward, **kwargs)
    return joint


def allocated_during(action):
    """The most bytes of CPU memory that torch allocated above where it began."""
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        marker = torch.empty(1)  # so that there is an event to begin with
        action()
        del marker
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = current = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak
