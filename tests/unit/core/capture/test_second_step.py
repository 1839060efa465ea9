"""A model that keeps something between steps: the same program in every step, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graph_trainer as gt
from graph_trainer.testing import mean_square
from tests.unit.core.capture import side_effects
from tests.unit.core.capture.side_effects import Forward, batches, check_steps


class Model(side_effects.Model):
    """Keeps things in attributes, made in its first step."""

    def __init__(self, what: Forward) -> None:
        super().__init__(what)
        self.kept: Any = None
        self.steps = 0
        self.register_buffer("frequencies", torch.arange(4.0))


def table(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.kept is None:
        model.kept = (torch.arange(12.0).view(3, 4) + 1)[:, None].expand(3, 2, 4)
    return x * model.kept[:, 1] + model.kept.sum()


def table_of_a_buffer(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.kept is None:
        angles = torch.outer(torch.arange(3.0), model.frequencies)
        model.kept = angles.cos(), angles.sin()
    return x * model.kept[0] + model.kept[1]


def growing_mask(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.kept is None or len(model.kept) < len(x):
        model.kept = torch.ones(len(x), 8).tril()
    return x * model.kept[: len(x), :4]


def average_for_logging(model: Model, x: torch.Tensor) -> torch.Tensor:
    mean = x.detach().mean()
    model.kept = mean if model.kept is None else 0.9 * model.kept + 0.1 * mean
    return x


def written_table_in_place(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.kept = torch.zeros(4)
    model.kept += 2
    return x * model.kept


SAME: list[Forward] = [
    table,
    table_of_a_buffer,
    growing_mask,
    average_for_logging,
    written_table_in_place,
]


@pytest.mark.parametrize("what", SAME)
def test_what_is_the_same_in_every_step_is_computed_in_every_step(what: Forward) -> None:
    model = Model(what)
    check_steps(model)
    assert model.kept is None


def full_of_a_count(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.steps += 1
    return x * torch.full((), 1 / model.steps)


def tensor_of_a_count(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.steps += 1
    return x * torch.tensor([float(model.steps)])


def counted_in_a_tensor(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.kept is None:
        model.kept = torch.zeros(())
    model.kept += 1
    return x * model.kept


def first_batch(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.kept is None:
        model.kept = x.detach().mean(0)
    return x + model.kept


def first_noise(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.kept is None:
        model.kept = torch.rand(4)
    return x + model.kept


def table_of_a_written_buffer(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.kept is None:
        model.kept = model.average * 2
    model.average += 1
    return x + model.kept


def table_of_a_view_that_is_written(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.kept is None:
        whole = torch.zeros(4)
        part = whole[:2]
        whole.copy_(x.detach()[0])
        model.kept = part * 2
    return x * model.kept.sum()


def one_step_more_random(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.steps += 1
    torch.rand(model.steps)
    return x * torch.rand(4)


def buffer_in_every_second_step(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.steps += 1
    if model.steps % 2:
        model.average += 1
    return x


OTHER: list[tuple[Forward, str]] = [
    (full_of_a_count, r"in the second step \(op aten.full.*'steps'"),
    (tensor_of_a_count, r"in the second step .*'steps'"),
    (counted_in_a_tensor, "the step before computed and kept .*'kept'"),
    (first_batch, "the step before computed and kept .*'kept'"),
    (first_noise, "the step before computed and kept .*'kept'"),
    (table_of_a_written_buffer, "the step before computed and kept .*'kept'"),
    (table_of_a_view_that_is_written, "the step before computed and kept .*'kept'"),
    (one_step_more_random, r"in the second step .*'steps'"),
    (buffer_in_every_second_step, r"in the second step .*'steps'"),
]


@pytest.mark.parametrize(("what", "message"), OTHER)
def test_what_differs_from_step_to_step_is_refused(what: Forward, message: str) -> None:
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(Model(what), mean_square, (batches()[0],))
