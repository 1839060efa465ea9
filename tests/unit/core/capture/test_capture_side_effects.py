"""gt.capture allocates no tensor storage and leaves the model and the random state as they were."""

import contextlib

import pytest
import torch
from torch import nn

import graph_trainer as gt
from tests.unit.core.capture.steps import allocated_during, mean


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_storage_is_allocated(device):
    """For a model of 100 MB, which any copy of a tensor of it would show."""
    with torch.device(device):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 4096))
        x = torch.empty(512, 1024)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert size > 80 << 20
    assert allocated_during(lambda: gt.capture(model, mean, (x,))) < 100_000
    assert allocated_during(lambda: torch.zeros(1 << 20)) >= 4 << 20, "the measure measures"


class Restless(nn.Module):
    """Assigns everything that a forward can assign."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        self.last = self.dropout(self.norm(self.linear(x)))
        self.average = 0.5 * self.average + self.last.detach().mean(0)
        self.cache = x
        return self.lstm(self.last)[0].mean()


def state(model):
    """All that a capture could change: objects by identity, tensors by value too."""
    tensors = model.state_dict(keep_vars=True)
    return {
        "tensors": {n: (id(t), t.tolist()) for n, t in tensors.items()},
        "gradients": {n: id(p.grad) for n, p in model.named_parameters()},
        "attributes": [(type(m), dict(vars(m))) for m in model.modules()],
        "hooks": [[list(v) for k, v in vars(m).items() if "hooks" in k] for m in model.modules()],
        "random": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("fails", [False, True])
@torch.backends.mkldnn.flags(enabled=False)
def test_the_model_and_the_random_state_are_left_as_they_were(fails):
    model, x = Restless(), torch.randn(3, 4)
    model.linear.weight.grad = torch.ones(4, 4)
    model.linear.register_forward_hook(lambda *_: None)
    before = state(model)

    def loss(model, x):
        result = model(x)
        if fails:
            raise RuntimeError("on purpose")
        return result

    refused = pytest.raises(gt.CaptureError, match="on purpose")
    with refused if fails else contextlib.nullcontext():
        gt.capture(model, loss, (x,))
    assert state(model) == before
    assert all(type(w) is nn.Parameter for w in model.lstm._flat_weights)
