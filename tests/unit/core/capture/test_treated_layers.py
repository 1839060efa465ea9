"""A model that treats alike layers differently is traced in full."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graph_trainer.core.capture.capture import capture
from graph_trainer.core.capture.model_state import state_of
from graph_trainer.core.capture.repeated_layers import repetition_in
from graph_trainer.errors import CaptureError
from graph_trainer.testing import mean_square
from tests.unit.core.capture.equal_steps import assert_equal
from tests.unit.core.capture.test_repeated_layers import Loop, X, both, with_nothing_between


def with_an_op_between(layers, x):
    for i, layer in enumerate(layers):
        x = layer(x + 1 if i == 3 else x)
    return x


def with_all_results(layers, x):
    results = [x]
    for layer in layers:
        results.append(layer(results[-1]))
    return torch.stack(results).sum(0)


def with_one_result(layers, x):
    results = [x]
    for layer in layers:
        results.append(layer(results[-1]))
    return results[-1] * results[4]


def dropping_one_result(layers, x):
    for i, layer in enumerate(layers):
        y = layer(x)
        x = x if i == 3 else y
    return x


def giving_one_an_earlier_result(layers, x):
    results = [x]
    for i, layer in enumerate(layers):
        results.append(layer(results[3] if i == 4 else results[-1]))
    return results[-1]


def without_gradients_in_one(layers, x):
    for i, layer in enumerate(layers):
        with torch.set_grad_enabled(i != 3):
            x = layer(x)
    return x


def casting_in_one(layers, x):
    for i, layer in enumerate(layers):
        with torch.autocast("cpu", enabled=i == 3):
            x = layer(x)
    return x


def drawing_between(layers, x):
    noise = []
    for layer in layers:
        x = layer(x)
        noise.append(torch.rand(2, 8))
    return x * noise[3]


class Counter:
    """Something that a layer may change, and read in the next."""

    count = 0


def passing_what_may_change(layers, x):
    for layer in layers:
        x = layer(x, Counter)
    return x


def backwards(layers, x):
    for layer in reversed(layers):
        x = layer(x)
    return x


def without_one(layers, x):
    for i, layer in enumerate(layers):
        x = x if i == 4 else layer(x)
    return x


def one_twice(layers, x):
    for i, layer in enumerate(layers):
        x = layer(layer(x)) if i == 3 else layer(x)
    return x


def catching(layers, x):
    for layer in reversed(layers):
        try:
            x = layer(x)
        except Exception:
            x = x * 3
    return x


def with_norms_of_weights(layers, x):
    for layer in layers:
        x = layer(x)
    return x + sum(layer.linear.weight.square().sum() for layer in layers)


def with_the_norm_of_one(layers, x):
    return with_nothing_between(layers, x) + layers[3].linear.weight.square().sum()


def writing_into_one(layers, x):
    x = with_nothing_between(layers, x)
    with torch.no_grad():
        layers[3].linear.bias.mul_(2.0)
    return x


def hooking_one(layers, x):
    layers[3].linear.weight.register_hook(lambda gradient: gradient * 2)
    return with_nothing_between(layers, x)


def hooking_the_inside_of_one(layers, x):
    handle = layers[3].linear.register_forward_hook(lambda module, args, output: output * 2)
    x = with_nothing_between(layers, x)
    handle.remove()
    return x


def with_another_mode_in_one(layers, x):
    layers[3].linear.eval()
    x = with_nothing_between(layers, x)
    layers[3].linear.train()
    return x


def hooking_one_result(layers, x):
    for i, layer in enumerate(layers):
        x = layer(x)
        if i == 3 and x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
    return x


def marking_one_result(layers, x):
    for i, layer in enumerate(layers):
        x = layer(x)
        if i == 2:  # which the next layer reads
            x.mark = True
    return x


def with_another_module_for_one(layers, x):
    one, other = (nn.LayerNorm(8, elementwise_affine=False) for _ in range(2))
    one.register_forward_hook(lambda module, args, output: output * 2)
    for i, layer in enumerate(layers):
        x = layer(x, one if i == 3 else other)
    return x


def with_parameters_of_another_for_one(layers, x):
    for i, layer in enumerate(layers):
        if i == 3:
            x = torch.func.functional_call(layer, dict(layers[0].named_parameters()), x)
        else:
            x = layer(x)
    return x


def saving_otherwise_in_one(layers, x):
    def packed(factor):
        return lambda tensor, factor=factor: tensor * factor

    for i, layer in enumerate(layers):
        pack = packed(2.0 if i == 3 else 1.0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = layer(x)
    return x


class Scaled(TorchFunctionMode):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * self.factor if function is nn.functional.linear else result


def in_another_mode_of_functions_in_one(layers, x):
    for i, layer in enumerate(layers):
        with Scaled(3.0 if i == 3 else 2.0):
            x = layer(x)
    return x


LOOPS = [
    hooking_one_result,
    marking_one_result,
    with_another_module_for_one,
    with_parameters_of_another_for_one,
    saving_otherwise_in_one,
    in_another_mode_of_functions_in_one,
    dropping_one_result,
    giving_one_an_earlier_result,
    without_gradients_in_one,
    casting_in_one,
    drawing_between,
    passing_what_may_change,
    with_an_op_between,
    with_all_results,
    with_one_result,
    backwards,
    without_one,
    one_twice,
    catching,
    with_norms_of_weights,
    with_the_norm_of_one,
    hooking_the_inside_of_one,
    with_another_mode_in_one,
    writing_into_one,
    hooking_one,
]
WITHOUT_BACKWARD = [
    pytest.param(loop, False, marks=() if loop in LOOPS[-3:] else pytest.mark.full)
    for loop in LOOPS
    if loop not in (without_gradients_in_one, hooking_one_result)
]


@pytest.mark.parametrize(
    ("loop", "backward"),
    [*((loop, True) for loop in LOOPS), *WITHOUT_BACKWARD],
)
def test_a_model_that_treats_alike_layers_differently_is_traced_in_full(loop, backward, reasons):
    model = Loop(loop)
    assert repetition_in(model, state_of(model).tensors) is not None
    assert_equal(*both(model, X, backward=backward))
    (reason,) = reasons.all()
    assert "Tracing all layers: " in reason


def giving_one_an_attribute(layers, x):
    layers[3].linear.weight.seen = True
    return with_nothing_between(layers, x)


def giving_one_a_gradient(layers, x):
    layers[3].linear.weight.grad = torch.ones(8, 8)
    return with_nothing_between(layers, x)


def replacing_one(layers, x):
    layers[3].linear.weight = nn.Parameter(torch.ones(8, 8))
    return with_nothing_between(layers, x)


def freezing_one(layers, x):
    layers[3].linear.weight.requires_grad_(False)
    return with_nothing_between(layers, x)


def reading_the_data_of_one(layers, x):
    return with_nothing_between(layers, x) * layers[3].linear.bias.tolist()[0]


@pytest.mark.parametrize(
    "loop",
    [
        giving_one_an_attribute,
        giving_one_a_gradient,
        replacing_one,
        freezing_one,
        reading_the_data_of_one,
    ],
)
def test_what_is_left_out_is_neither_changed_nor_forgotten(loop):
    """What a step does with a tensor of a layer that is not traced ends as if it were traced."""
    ends = []
    for full in (False, True):
        model = Loop(loop)
        weight, bits = model.layers[3].linear.weight, model.layers[3].linear.weight.clone()
        try:
            capture(model, mean_square, (X,), full_capture=full)
            ends.append("captured")
        except CaptureError as error:
            ends.append(str(error))
        assert model.layers[3].linear.weight is weight and torch.equal(weight, bits)
        assert weight.requires_grad and weight.grad is None and not hasattr(weight, "seen")
    assert ends[0] == ends[1]
    assert ends[0] != "captured"
