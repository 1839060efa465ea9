"""Models that do something beside computing: `EQUAL` to eager in every step, or `REFUSED`."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import graph_trainer as gt
from graph_trainer.testing import mean_square

Forward = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A linear layer, and a function that does something to the module and the activation."""

    def __init__(self, what: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.what = what
        self.table: Any = torch.zeros(4)
        self.calls = 0
        self.cache: dict[str, torch.Tensor] = {}
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("constant", torch.full((4,), 3.0))
        self.original = self.constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, self.linear(x))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(3)]


def check_steps(captured: nn.Module) -> None:
    """Three captured steps after the default passes: loss, gradients and buffers are eager's."""
    eager = copy.deepcopy(captured)
    joint = gt.capture(captured, mean_square, (batches()[0],))
    gt.run_passes(joint)
    step = gt.compile(joint)
    for number, x in enumerate(batches()):
        torch.manual_seed(number)
        loss, gradients = step(captured, x)
        torch.manual_seed(number)
        eager.zero_grad()
        expected = mean_square(eager, x)
        expected.backward()
        assert torch.equal(loss, expected)
        for name, parameter in eager.named_parameters():
            assert torch.equal(gradients[name], parameter.grad), name
        for name, tensor in eager.state_dict().items():
            assert torch.equal(captured.state_dict()[name], tensor), name


def assigned(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.last = x
    model.calls += 1
    return x


def cached(model: Model, x: torch.Tensor) -> torch.Tensor:
    if "scale" not in model.cache:
        model.cache["scale"] = torch.arange(4) + 1.0
    return x * model.cache["scale"]


def buffer_assigned(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.average = 0.5 * model.average + x.detach().mean(0)
    return x + model.average


def buffer_by_another_name(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x + model.original


def data_scaled(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.linear.weight.data.mul_(0.9)
    return x


def transposed_beside_an_alias(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    alias = x.detach()
    alias.transpose_(0, 1)
    total = x.sum(1, keepdim=True)
    total.squeeze_(1)
    return x + total[:, None] + alias.t()


def parts_of_empty(model: Model, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(3, 4)
    out[:, :2] = x[:, :2]
    out[:, 2:] = 2 * x[:, 2:]
    return out


def resized(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x + x.detach().clone().resize_(6).sum()


def drawn_again(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        first = torch.rand(3, 4)
    return x * first * torch.rand(3, 4)


def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rrelu(x, 0.1, 0.3, training=True)


def cast_twice(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.linear(model.linear(x)).float()


def filled_copy_of_empty(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty(4).to(torch.float64).fill_(2.0).float() + torch.empty(4).new_zeros(4)


def noise_in_a_checkpoint(model: Model, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: noise(x).sin().cos(), x, use_reentrant=False)


def noise_at_the_end_of_a_checkpoint(model: Model, x: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(noise, x, use_reentrant=False)


def data_assigned(model: Model, x: torch.Tensor) -> torch.Tensor:
    x.data = 2 * x
    return x


def attribute_written(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.table.add_(1)
    return x + model.table


def attribute_replaced(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.table = model.table + 1
    return x + model.table


def state_in_an_attribute(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x + getattr(model, "hidden", 0)
    model.hidden = x.detach().mean(0)
    return x


def state_in_a_dict(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x + model.cache.get("hidden", 0)
    model.cache["hidden"] = x.detach().mean(0)
    return x


def every_other_step(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x * 2 if model.calls % 2 else x.sin()


def counted(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x * model.calls


def parameter_assigned(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.linear.weight = nn.Parameter(model.linear.weight * 0.5)
    return x


def weight_transposed(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.linear.weight.t_()
    return x


def never_written(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x + torch.empty(4)


def noise_not_drawn_again(model: Model, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(noise, x, use_reentrant=False)


def seeded(model: Model, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x * torch.rand(4)


def seeded_last(model: Model, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x


def drawn_by_python(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def drawn_by_numpy(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())


def generator_made(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(4, generator=torch.Generator().manual_seed(3))


def other_shape_drawn_again(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        first = torch.rand(3, 4)
    return x * first * torch.rand(4)


def one_op_drawn_again(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        first = torch.native_dropout(x, 0.5, True)[0]
    return first + torch.native_dropout(2 * x, 0.5, True)[0]


def dropout_drawn_again(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        first = torch.dropout(x, 0.5, True)
    return first + torch.dropout(2 * x, 0.5, True)


class DropsGradient(torch.autograd.Function):
    """Dropout that keeps the generator's state in place of its mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dropout: Any) -> torch.Tensor:
        ctx.random, ctx.dropout = torch.get_rng_state(), dropout
        return dropout(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.random.fork_rng():
            torch.set_rng_state(ctx.random)
            return ctx.dropout(gradient), None


def dropout_of_a_gradient(model: Model, x: torch.Tensor) -> torch.Tensor:
    return DropsGradient.apply(x, lambda x: torch.dropout(x, 0.5, True))


def one_op_of_a_gradient(model: Model, x: torch.Tensor) -> torch.Tensor:
    return DropsGradient.apply(x, lambda x: torch.native_dropout(x, 0.5, True)[0])


GENERATOR = torch.Generator().manual_seed(3)


def generator_restored(model: Model, x: torch.Tensor) -> torch.Tensor:
    before = GENERATOR.get_state()
    first = torch.rand(4, generator=GENERATOR)
    GENERATOR.set_state(before)
    return x * first + torch.rand(4, generator=GENERATOR)


class MaskDrawnAgain(torch.autograd.Function):
    """A random mask of the gradient's shape, drawn once more in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.random = torch.get_rng_state()
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.set_rng_state(ctx.random)
            return gradient * torch.rand_like(gradient)


def mask_drawn_again(model: Model, x: torch.Tensor) -> torch.Tensor:
    return MaskDrawnAgain.apply(x)


def same_dropout_again(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        first = torch.dropout(x, 0.5, True)
    return first.sin() + torch.dropout(x, 0.5, True)


class Accumulates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            ctx.weight.sum().backward()
        return gradient, None


def backward_within_backward(model: Model, x: torch.Tensor) -> torch.Tensor:
    return Accumulates.apply(x, model.linear.weight)


TEACHER = nn.BatchNorm1d(4, affine=False)


def teacher_in_training(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x + TEACHER(x.detach())


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.arange(size) + 1.0


def cached_by_a_function(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x * table(4)


KEPT: dict[str, torch.Tensor] = {}


def kept_in_a_global(model: Model, x: torch.Tensor) -> torch.Tensor:
    KEPT["x"] = x.detach()
    return x


class Average:
    value: Any = 0.0


AVERAGE = Average()


def kept_by_an_object(model: Model, x: torch.Tensor) -> torch.Tensor:
    AVERAGE.value = x.detach().mean()
    return x


EQUAL: list[Forward] = [
    assigned,
    cached,
    buffer_assigned,
    buffer_by_another_name,
    data_scaled,
    transposed_beside_an_alias,
    parts_of_empty,
    resized,
    drawn_again,
    cast_twice,
    filled_copy_of_empty,
    mask_drawn_again,
    same_dropout_again,
    dropout_drawn_again,
    dropout_of_a_gradient,
    noise_in_a_checkpoint,
    noise_at_the_end_of_a_checkpoint,
]

REFUSED: list[tuple[Forward, str]] = [
    (data_assigned, r"assigns \.data of a tensor at .*side_effects.py:\d+"),
    (attribute_written, r"add_.*writes at .*side_effects.py:\d+ into a tensor of \(4,\)"),
    (attribute_replaced, r"the step before computed and kept .*'table'.*make it a buffer"),
    (state_in_an_attribute, r"the step before computed and kept .*'hidden'"),
    (state_in_a_dict, r"the step before computed and kept .*cache\['hidden'\]"),
    (every_other_step, r"something else in the second step \(op aten.sin.*'calls'"),
    (counted, r"something else in the second step \(op aten.mul.*'calls'"),
    (parameter_assigned, "assigns or removes parameter 'linear.weight'"),
    (weight_transposed, "changes the shape, the strides or the memory of parameter"),
    (never_written, "reads memory of an empty tensor that no op has written"),
    (noise_not_drawn_again, "set_checkpoint_early_stop"),
    (seeded, r"seeds the random generator .*side_effects.py:\d+"),
    (seeded_last, "seeds the random generator"),
    (drawn_by_python, "Python's or NumPy's generator"),
    (drawn_by_numpy, "Python's or NumPy's generator"),
    (generator_made, r"draws at .*side_effects.py:\d+ from a generator"),
    (other_shape_drawn_again, r"rand.default\(\[3, 4\].*now aten.rand.default\(\[4\]"),
    (one_op_drawn_again, "from which it drew for another tensor before"),
    (one_op_of_a_gradient, "from which it drew for another tensor before"),
    (generator_restored, r"draws at .*side_effects.py:\d+ from a generator"),
    (backward_within_backward, "custom function leaves a gradient in .grad of 'linear.weight'"),
    (teacher_in_training, r"writes at .* into a tensor of \(\) torch.int64"),
    (cached_by_a_function, "in the cache of the function table"),
    (kept_in_a_global, "KEPT"),
    (kept_by_an_object, "'value' of a.* Average"),
]
