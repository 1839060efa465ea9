"""Random models of modules with side effects: equal to eager in every step, or refused."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.core.capture.python_state import PythonState
from tests.examples import examples
from tests.unit.core.capture import side_effects, test_python_state, test_second_step
from tests.unit.core.capture.side_effects import Forward, batches, table

SEEN: list[Forward] = [*side_effects.EQUAL, *test_second_step.SAME]
REFUSED: list[Forward] = [
    *(what for what, _ in side_effects.REFUSED),
    *(what for what, _ in test_second_step.OTHER),
    *(what for what, _ in test_python_state.COUNTING),
]


def twice(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(layer(x))


def checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def checkpointed_in_part(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: layer(x.sin()).cos(), x, use_reentrant=False)


def without_gradient(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = layer(x)
    return x * scale


def in_low_precision(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


def unused(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer(x)
    return x


WRAPPERS = [
    nn.Module.__call__, twice, checkpointed, checkpointed_in_part, without_gradient,
    in_low_precision, unused,
]  # fmt: skip


OPERATORS = [
    lambda y: F.batch_norm(y, None, None, training=True),
    lambda y: F.layer_norm(y, y.shape[-1:]),
    lambda y: F.layer_norm(y, y.shape[-2:], y[0].detach()),
    lambda y: F.group_norm(y, 1),
    lambda y: F.log_softmax(y, -1),
    lambda y: F.log_softmax(y, 0),
    lambda y: F.rrelu(y, training=True),
    lambda y: F.dropout(y, 0.3),
    lambda y: F.mse_loss(y, y.detach().contiguous().sin(), reduction="none"),
    lambda y: y * y[:1].expand_as(y),
    lambda y: torch.cat([y, y])[::2],
    lambda y: F.prelu(y, y.detach().mean()),
    F.logsigmoid, F.hardswish, F.elu, F.softplus, F.hardtanh, F.gelu, torch.sin,
]  # fmt: skip
BEHIND = [
    torch.flatten,
    lambda y: y.mT.flatten(),
    lambda y: y.movedim(0, -1).reshape(-1),
    lambda y: y.movedim(-1, 0).contiguous().view(-1),
    lambda y: y.flatten(1).t().flatten(),
    lambda y: y.transpose(0, 1).flatten(1).flatten(),
]
ORDERS = list(itertools.permutations(range(3)))


@dataclass
class Permuted:
    """A layer, and an operator on permuted tensors with views before and behind."""

    before: tuple[int, ...]
    order: tuple[int, ...]
    operator: Callable[[torch.Tensor], torch.Tensor]
    behind: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = torch.stack([layer(x), x]).permute(self.before).contiguous().permute(self.order)
        return self.behind(self.operator(y)).view(2, 3, 4).sum(0)


ORDER = st.sampled_from(ORDERS)
PERMUTED = st.builds(Permuted, ORDER, ORDER, st.sampled_from(OPERATORS), st.sampled_from(BEHIND))
EACH = st.tuples(
    st.sampled_from(3 * SEEN + REFUSED), st.one_of(st.sampled_from(WRAPPERS), PERMUTED)
)


class Layer(side_effects.Model):
    """A layer that can do any of it."""

    def __init__(self, what: Forward) -> None:
        super().__init__(what)
        self.kept: Any = None
        self.steps = 0
        self.register_buffer("frequencies", torch.arange(4.0))
        self.nested: dict[str, Any] = {"per layer": {"steps": 0}}
        self.settings = test_python_state.Settings()
        self.record = SimpleNamespace(steps=0)
        self.recent: deque[int] = deque([0], maxlen=3)


class Model(nn.Module):
    """Layers, each called in a way of its own; the last one by the loss."""

    def __init__(self, plan: list[tuple[Forward, Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(what) for what, _ in plan)
        self.ways = [way for _, way in plan]

    def run(self, first: int, last: int | None, x: torch.Tensor) -> torch.Tensor:
        for layer, way in list(zip(self.layers, self.ways, strict=True))[first:last]:
            x = way(layer, x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(0, -1, x)


def loss_fn(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model.run(-1, None, model(x)).square().mean()


Seen = dict[str, torch.Tensor | None]


def eagerly(model: Model, batch: list[torch.Tensor]) -> list[Seen]:
    """What each step of the model itself leaves behind."""
    seen = []
    for number, x in enumerate(batch):
        torch.manual_seed(number)
        model.zero_grad()
        loss = loss_fn(model, x)
        loss.backward()
        grads = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        seen.append(left_behind(model, loss, grads))
    return seen


def captured(step: gt.Step, model: Model, batch: list[torch.Tensor]) -> list[Seen]:
    seen = []
    for number, x in enumerate(batch):
        torch.manual_seed(number)
        loss, gradients = step(model, x)
        grads = {f"gradient of {n}": gradients.get(n) for n, _ in model.named_parameters()}
        seen.append(left_behind(model, loss, grads))
    return seen


def left_behind(model: Model, loss: torch.Tensor, gradients: Seen) -> Seen:
    state = {n: t.clone() for n, t in model.state_dict().items()}
    seen = {"loss": loss.detach(), **gradients, **state, "random": torch.get_rng_state()}
    return {n: t if t is None else t.detach().clone() for n, t in seen.items()}


def unlike(a: Seen, b: Seen) -> list[str]:
    def bits(t: torch.Tensor | None) -> Any:
        return t if t is None or t.dtype != torch.float32 else t.contiguous().view(torch.int32)

    return [n for n in a if str(bits(a[n])) != str(bits(b[n])) or n not in b]


@examples(100)
@given(st.lists(EACH, min_size=1, max_size=4))
def test_random_models_are_equal_to_eager_or_refused(plan: list[tuple[Forward, Any]]) -> None:
    model, batch = Model(plan), batches()
    eager = copy.deepcopy(model)
    try:
        with PythonState(eager, loss_fn):
            wanted = eagerly(eager, batch)
    except RuntimeError:
        assume(False)
    finally:
        table.cache_clear()
    before, attributes = copy.deepcopy(model.state_dict()), [dict(vars(m)) for m in model.modules()]
    try:
        joints = [gt.capture(model, loss_fn, (batch[0],)) for _ in range(2)]
    except gt.CaptureError as error:
        event(f"refused: {str(error)[:40]}")
        joints = []
    finally:
        table.cache_clear()
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    for joint in joints:
        gt.run_passes(joint)
        found = captured(gt.compile(joint), copy.deepcopy(model), batch)
        for number, pair in enumerate(zip(wanted, found, strict=True)):
            assert unlike(*pair) == [], f"step {number + 1}"
