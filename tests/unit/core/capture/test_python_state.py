"""State that forward and the loss keep in Python: named, restored, and never silently baked in."""

from __future__ import annotations

import functools
import inspect
import itertools
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.core.capture.python_state import PythonState
from graph_trainer.testing import mean_square
from tests.unit.core.capture import steps

COUNT = 0
COUNTS = Counter[str]()


class Settings:
    steps = 0


class Model(nn.Module):
    shared = 0

    def __init__(self, what: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.what = what
        self.nested: dict[str, Any] = {"per layer": {"steps": 0}}
        self.settings = Settings()
        self.record = SimpleNamespace(steps=0)
        self.recent: deque[int] = deque([0], maxlen=3)
        self.slots = Slots()
        self.numbers = itertools.count()
        self.random = np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, self.linear(x))


def in_a_nested_dict(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.nested["per layer"]["steps"] += 1
    return x * model.nested["per layer"]["steps"]


def in_a_namespace(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.record.steps += 1
    return x * model.record.steps


def in_an_object(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.settings.steps += 1
    return x * model.settings.steps


def in_a_deque(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.recent.append(model.recent[-1] + 1)
    return x * model.recent[-1]


def in_the_class(model: Model, x: torch.Tensor) -> torch.Tensor:
    Model.shared += 1
    return x * Model.shared


def in_a_global(model: Model, x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


def in_a_counter(model: Model, x: torch.Tensor) -> torch.Tensor:
    COUNTS["steps"] += 1
    return x * COUNTS["steps"]


def in_a_default(model: Model, x: torch.Tensor, kept: list[int] = [0]) -> torch.Tensor:  # noqa: B006
    kept[0] += 1
    return x * kept[0]


def in_the_function(model: Model, x: torch.Tensor) -> torch.Tensor:
    in_the_function.steps += 1  # type: ignore[attr-defined]
    return x * in_the_function.steps  # type: ignore[attr-defined]


in_the_function.steps = 0  # type: ignore[attr-defined]


def in_another_file(model: Model, x: torch.Tensor) -> torch.Tensor:
    steps.taken = getattr(steps, "taken", 0) + 1
    return x * steps.taken


@dataclass(slots=True)
class Slots:
    steps: int = 0


def in_slots(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.slots.steps += 1
    return x * model.slots.steps


def in_an_iterator(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * next(model.numbers)


def in_a_generator_of_numpy(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * float(model.random.random())


def of_a_weight(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.linear.weight.steps = getattr(model.linear.weight, "steps", 0) + 1
    return x


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (in_slots, "in the second step .*that forward keeps and capture does not see"),
        (in_an_iterator, "in the second step .*that forward keeps and capture does not see"),
        (in_a_generator_of_numpy, "in the second step .*that forward keeps and capture does not"),
        (of_a_weight, "sets attribute 'steps' of parameter 'linear.weight'"),
    ],
)
def test_what_cannot_be_named_is_refused_where_two_steps_differ(
    what: Callable[..., torch.Tensor], message: str
) -> None:
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(Model(what), mean_square, (torch.ones(2, 4),))


def test_a_hook_of_a_parameter_that_counts_is_named() -> None:
    model, count = Model(lambda m, x: x), 0

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return gradient * count

    model.linear.weight.register_hook(scaled)
    with pytest.raises(gt.CaptureError, match=r"in the second step .*scaled.count'"):
        gt.capture(model, mean_square, (torch.ones(2, 4),))
    assert count == 0


def closing_over() -> Callable[[Model, torch.Tensor], torch.Tensor]:
    count = 0

    @torch.enable_grad()
    def in_a_closure(model: Model, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    return in_a_closure


COUNTING: list[tuple[Callable[..., torch.Tensor], str]] = [
    (in_a_nested_dict, r"'nested\['per layer'\]\['steps'\]'"),
    (in_a_namespace, "'record.steps'"),
    (in_an_object, "'settings.steps'"),
    (in_a_deque, r"'recent\[1\]'"),
    (in_the_class, "'Model.shared'"),
    (in_a_global, r"test_python_state.COUNT'"),
    (in_a_counter, r"test_python_state.COUNTS\['steps'\]'"),
    (in_a_default, r"'in_a_default.defaults\[0\]\[0\]\[0\]'"),
    (in_the_function, "'in_the_function.steps'"),
    (in_another_file, r"tests.unit.core.capture.steps.taken'"),
    (closing_over(), "in_a_closure.count'"),
]


@pytest.mark.parametrize(("what", "name"), COUNTING)
def test_a_count_that_forward_computes_with_is_named_and_restored(
    what: Callable[..., torch.Tensor], name: str
) -> None:
    model = Model(what)
    x = torch.ones(2, 4)
    with PythonState(model, mean_square):
        first = mean_square(model, x)
    with pytest.raises(gt.CaptureError, match=f"in the second step .*{name}"):
        gt.capture(model, mean_square, (x,))
    assert torch.equal(mean_square(model, x), first), "the count was not restored"


class Loss(nn.Module):
    """A loss that is an object, with a count, an average and a buffer of its own."""

    def __init__(self, scaled: bool = False, average: bool = False, assigned: bool = False) -> None:
        super().__init__()
        self.scaled, self.average, self.assigned = scaled, average, assigned
        self.calls, self.mean = 0, torch.zeros(())
        self.register_buffer("total", torch.zeros(()))

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = model(x).square().mean()
        if self.average:
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        if self.assigned:
            self.total = self.total + loss.detach()
        return loss * self.calls if self.scaled else loss


@pytest.mark.parametrize("wrapped", [lambda f: f, functools.partial, lambda f: f.forward])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"scaled": True}, "in the second step .*'.*calls'"),
        ({"average": True}, r"keeps a tensor of \(\) .* in .*mean"),
        ({"assigned": True}, r"keeps a tensor of \(\) .* in .*_buffers\['total'\]"),
    ],
)
def test_state_of_a_loss_object_is_refused_and_restored(
    what: dict[str, bool], message: str, wrapped: Callable[[Any], Any]
) -> None:
    loss = Loss(**what)
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(nn.Linear(4, 4), wrapped(loss), (torch.ones(2, 4),))
    assert (loss.calls, loss.mean.item(), loss.total.item()) == (0, 0.0, 0.0)


def test_a_loss_that_only_counts_its_calls_is_captured() -> None:
    loss = Loss()
    joint = gt.capture(nn.Linear(4, 4), loss, (torch.ones(2, 4),))
    assert loss.calls == 0 and len(joint.signature.outputs) == 3


def test_all_kinds_of_holders_are_restored_after_an_error() -> None:
    holders: list[Any] = [{"a": [1]}, {1, 2}, deque([1]), Settings()]

    def change() -> None:
        holders[0]["a"].append(2)
        holders[0]["b"] = holders[1].pop()
        holders[2].appendleft(0)
        holders[3].new = 1
        Settings.other = 1  # type: ignore[attr-defined]
        del Settings.steps
        holders.pop()

    with pytest.raises(ZeroDivisionError), PythonState(nn.Identity(), change) as state:
        change()
        changed = state.changes()
        raise ZeroDivisionError
    assert {"Settings.other", "Settings.steps"} < set(changed)
    assert holders[:3] == [{"a": [1]}, {1, 2}, deque([1])]
    assert vars(holders[3]) == {} and Settings.steps == 0 and not hasattr(Settings, "other")


class Lazy(dict[str, int]):
    """A dict whose methods do something else."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError

    def __getitem__(self, key: str) -> int:
        raise AssertionError


@pytest.mark.parametrize(
    "kind",
    [dict, OrderedDict, lambda entries: defaultdict(int, entries), Counter, Lazy],
    ids=["dict", "ordered", "default", "counter", "lazy"],
)
def test_every_kind_of_dict_is_restored_with_its_order(kind: Any) -> None:
    held = kind({"a": 1, "b": 2, "c": 3})

    def change() -> None:
        held["d"] = 4
        held["a"] = dict.pop(held, "a") if type(held) is dict else 5
        del held["b"]

    with PythonState(nn.Identity(), change):
        change()
    assert list(dict.items(held)) == [("a", 1), ("b", 2), ("c", 3)]
    if not isinstance(held, Lazy):
        assert list(held) == list(held.keys()) == ["a", "b", "c"] and held.popitem() == ("c", 3)


def test_large_state_is_looked_at_in_part() -> None:
    held = [list(range(900)) for _ in range(900)]
    start = time.perf_counter()
    with PythonState(nn.Identity(), lambda: held):
        pass
    assert time.perf_counter() - start < 5


def test_what_torch_keeps_on_its_own_functions_is_no_state_of_a_step(monkeypatch):
    """torch.utils.checkpoint notes on itself that dynamo is off: such a step was traced twice."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.run = nn.Linear(2, 2), checkpoint

        def forward(self, x):
            return self.run(self.inner, x, use_reentrant=False)

    model = Checkpointed()
    function = inspect.unwrap(checkpoint)
    for name in list(vars(function)):
        monkeypatch.delattr(function, name)
    with PythonState(model) as state:
        model(torch.randn(1, 2))
        assert vars(function) and state.changes() == []
