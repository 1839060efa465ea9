"""A model that keeps something between steps: the same program in every step, or refused."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import graph_trainer as gt
from graph_trainer.testing import mean_square
from tests.unit.core.capture import side_effects
from tests.unit.core.capture import steps as steps_file
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


class Settings:
    steps = 0


@dataclass(slots=True)
class Slots:
    steps: int = 0


COUNT = 0
COUNTS = Counter[str]()


class Counting(Model):
    """Has places of all kinds to count in."""

    shared = 0

    def __init__(self, what: Forward) -> None:
        super().__init__(what)
        self.nested: dict[str, Any] = {"per layer": {"steps": 0}}
        self.settings, self.record, self.slots = Settings(), SimpleNamespace(steps=0), Slots()
        self.recent: deque[int] = deque([0], maxlen=3)
        self.numbers = itertools.count()
        self.random = np.random.default_rng(0)


def in_a_nested_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.nested["per layer"]["steps"] += 1
    return x * model.nested["per layer"]["steps"]


def in_a_namespace(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.record.steps += 1
    return x * model.record.steps


def in_an_object(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.settings.steps += 1
    return x * model.settings.steps


def in_a_deque(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.recent.append(model.recent[-1] + 1)
    return x * model.recent[-1]


def in_the_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    Counting.shared += 1
    return x * Counting.shared


def in_a_global(model: Any, x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


def in_a_counter(model: Any, x: torch.Tensor) -> torch.Tensor:
    COUNTS["steps"] += 1
    return x * COUNTS["steps"]


def in_a_default(model: Any, x: torch.Tensor, kept: list[int] = [0]) -> torch.Tensor:  # noqa: B006
    kept[0] += 1
    return x * kept[0]


def in_the_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    in_the_function.steps += 1  # type: ignore[attr-defined]
    return x * in_the_function.steps  # type: ignore[attr-defined]


in_the_function.steps = 0  # type: ignore[attr-defined]


def in_another_file(model: Any, x: torch.Tensor) -> torch.Tensor:
    steps_file.taken = getattr(steps_file, "taken", 0) + 1
    return x * steps_file.taken


def in_slots(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.slots.steps += 1
    return x * model.slots.steps


def in_an_iterator(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * next(model.numbers)


def in_a_generator_of_numpy(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(model.random.random())


def closing_over() -> Callable[[Any, torch.Tensor], torch.Tensor]:
    count = 0

    @torch.enable_grad()
    def in_a_closure(model: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    return in_a_closure


@pytest.mark.parametrize(
    "what",
    [
        in_a_nested_dict, in_a_namespace, in_an_object, in_a_deque, in_the_class, in_a_global,
        in_a_counter, in_a_default, in_the_function, in_another_file, in_slots, in_an_iterator,
        in_a_generator_of_numpy, closing_over(),
    ],
)  # fmt: skip
def test_what_counts_elsewhere_in_python_is_refused(what: Forward) -> None:
    with pytest.raises(gt.CaptureError, match="in the second step"):
        gt.capture(Counting(what), mean_square, (batches()[0],))


def test_attributes_and_entries_of_their_dicts_and_lists_are_restored() -> None:
    def what(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.order.popitem(last=False)
        model.cache["x"] = x
        model.items[0], model.added = x, x
        return x

    model = Model(what)
    model.order = OrderedDict(dict.fromkeys("abcd", 1))
    model.items = [1, 2]
    order, items = model.order, model.items
    gt.capture(model, mean_square, (batches()[0],))
    assert list(order.items()) == [(key, 1) for key in "abcd"] and model.order is order
    assert items == [1, 2] and not model.cache and not hasattr(model, "added")
