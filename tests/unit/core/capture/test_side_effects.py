"""What a step does beside computing its outputs: equal to eager in every step, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.torch_private import FakeTensor
from graph_trainer.testing import mean_square
from tests.unit.core.capture.side_effects import (
    AVERAGE,
    EQUAL,
    KEPT,
    REFUSED,
    TEACHER,
    Forward,
    Model,
    batches,
    cached_by_a_function,
    check_steps,
    table,
)


@pytest.mark.parametrize("what", EQUAL)
def test_equal_to_eager_in_every_step(what: Forward) -> None:
    check_steps(Model(what))


@pytest.mark.parametrize(("what", "message"), REFUSED)
def test_refused_and_nothing_has_changed(what: Forward, message: str) -> None:
    model = Model(what)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    attributes, drawn = dict(vars(model)), torch.get_rng_state()
    running = TEACHER.running_mean.clone()
    try:
        with pytest.raises(gt.CaptureError, match=message):
            gt.capture(model, mean_square, (batches()[0],))
    finally:
        table.cache_clear()
        KEPT.clear()
        AVERAGE.value = 0.0
    assert vars(model) == attributes and torch.equal(model.table, torch.zeros(4))
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn) and torch.equal(running, TEACHER.running_mean)


def test_a_fake_tensor_of_an_earlier_capture_is_not_a_constant() -> None:
    with pytest.raises(gt.CaptureError, match="the cache of the function table"):
        gt.capture(Model(cached_by_a_function), mean_square, (batches()[0],))
    assert isinstance(table(4), FakeTensor)
    with pytest.raises(gt.CaptureError, match="without data, which an earlier capture made"):
        gt.capture(Model(cached_by_a_function), mean_square, (batches()[0],))
    table.cache_clear()


def test_a_parameter_keeps_its_attributes_and_is_one() -> None:
    def what(model: Model, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(model.linear.weight, nn.Parameter)
        return x * model.linear.weight.scale * model.constant.scale

    model = Model(what)
    model.linear.weight.scale, model.constant.scale = 3.0, 5.0
    step = gt.compile(gt.capture(model, mean_square, (batches()[0],)))
    assert torch.equal(step(model, batches()[1])[0], mean_square(model, batches()[1]))
