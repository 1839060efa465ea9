"""Formulas and kernels that torch chooses otherwise under a trace: eager's, or reported."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graph_trainer as gt
from graph_trainer.core.bisect.replay import Runs
from graph_trainer.core.tensor_diff import compare
from tests.unit.core.capture.steps import check_against_eager


class Held(nn.Module):
    """One parameter, and a function of it."""

    def __init__(self, function, *shape):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self):
        return self.function(self.weight)


def negative(model):
    return -model().sum()


def bits_and_notes(model, loss_fn, *args):
    """What differs between a step and eager, signs of zeros too, and the notes of the report."""
    runs = Runs(model, loss_fn, args, {})
    joint = runs.capture()
    report = gt.run_passes(joint)
    return compare(runs.eager(), runs.graph(joint)), report.notes()


@pytest.mark.parametrize("op", [torch.max, torch.min, torch.median, torch.nanmedian])
@pytest.mark.parametrize("recompute", [False, True])
def test_zeros_beside_the_chosen_element_have_eagers_sign(op, recompute):
    def function(x):
        if recompute:
            return torch.utils.checkpoint.checkpoint(op, x, use_reentrant=False)
        return op(x)

    assert bits_and_notes(Held(function, 3, 4), negative) == ([], [])


@pytest.mark.parametrize("index", [0, (0, 1), slice(None)])
def test_not_a_number_and_several_chosen_elements_are_as_in_eager(index):
    model = Held(torch.max, 3, 4)
    for value in (9.0, float("nan")):
        with torch.no_grad():
            model.weight[index] = value
        assert bits_and_notes(model, negative) == ([], [])


def test_a_mask_times_a_quotient_of_the_users_is_left_alone():
    def function(x):
        mask = x == x.amax()
        zeros_and_one = mask * (x / mask.sum())
        return torch.where(zeros_and_one.signbit(), x, 2 * x)

    assert bits_and_notes(Held(function, 3, 4), negative) == ([], [])


def filled(x):
    return torch.zeros(50).masked_fill(torch.arange(50) % 3 == 0, x).cos() * torch.arange(50)


@pytest.mark.parametrize(
    ("function", "shape", "reason"),
    [
        (torch.prod, (40,), "gradient of prod"),
        (lambda x: x.prod(1), (3, 40), "gradient of prod"),
        (filled, (), "masked_fill's value"),
    ],
)
def test_a_gradient_that_is_equal_up_to_rounding_is_reported(function, shape, reason):
    differences, notes = bits_and_notes(Held(function, *shape), negative)
    assert all(d.max_rel < 1e-5 for d in differences)
    (note,) = notes
    assert note.startswith("capture: equal up to rounding: ")
    assert reason in note and note.endswith("(module '')")


def test_check_capture_says_what_the_graph_says():
    model = Held(torch.prod, 40)
    with pytest.raises(gt.VerificationError, match="equal up to rounding: the gradient of prod"):
        gt.check_capture(model, negative, [(), ()])


def weighted(smoothing, ignored):
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(5, (40,), generator=generator)
    weights = torch.rand(5, generator=generator)

    def function(x):
        given = {"ignore_index": 1 if ignored else -100, "label_smoothing": smoothing}
        return F.cross_entropy(x, target, weights, **given)

    return function


def test_weights_of_smoothed_labels_are_reported():
    differences, notes = bits_and_notes(Held(weighted(0.1, True), 40, 5), negative)
    assert differences and all(d.max_rel < 1e-5 for d in differences)
    (note,) = notes
    assert "cross_entropy with weights" in note


@pytest.mark.parametrize(
    "function",
    [
        weighted(0.0, True),
        lambda x: torch.cumprod(x, 0),
        lambda x: x.masked_fill(x > 0, torch.tensor(2.0)),
        lambda x: torch.where(x > 0, x, x.sum()),
    ],
)
def test_what_is_bitwise_equal_is_not_reported(function):
    assert bits_and_notes(Held(function, 40, 5), negative) == ([], [])


def encoder(norm_first=False):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def count(joint, name):
    return sum(name in str(node.target) for node in joint.graph.nodes)


def scored(model, *args, **kwargs):
    return (model(*args, **kwargs) * torch.linspace(-1, 1, 16)).sum()


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_in_validation_takes_its_fused_kernel(norm_first):
    model = encoder(norm_first).eval()
    x = torch.randn(3, 5, 16)
    joint = check_against_eager(model, scored, x, backward=False)
    assert count(joint, "_transformer_encoder_layer_fwd") == 2
    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
    check_against_eager(model, scored, x, mask=mask, is_causal=False, backward=False)
    # in training, with gradients, and where a module has a hook, eager has no such kernel either
    assert count(check_against_eager(model, scored, x), "encoder_layer_fwd") == 0
    model.layers[0].linear1.register_forward_hook(lambda *_: None)
    assert count(check_against_eager(model, scored, x, backward=False), "encoder_layer_fwd") == 1
    model.train()
    assert count(check_against_eager(model, scored, x, backward=False), "encoder_layer_fwd") == 0


def test_attention_in_validation_takes_its_fused_kernel():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(3, 5, 16)

    def loss_fn(model, x):
        return (model(x, x, x, need_weights=False)[0] * torch.linspace(-1, 1, 16)).sum()

    joint = check_against_eager(model, loss_fn, x, backward=False)
    assert count(joint, "_native_multi_head_attention") == 1


def test_a_frozen_encoder_in_training_takes_its_fused_kernel():
    torch.manual_seed(0)
    model = nn.Sequential(encoder().eval().requires_grad_(False), nn.Linear(16, 16))
    joint = check_against_eager(model, scored, torch.randn(3, 5, 16))
    assert count(joint, "_transformer_encoder_layer_fwd") == 2


def test_torch_is_left_as_it_was():
    asked, tracing = torch.overrides.has_torch_function, nn.modules.activation._is_make_fx_tracing
    gt.capture(encoder().eval(), scored, (torch.randn(3, 5, 16),), backward=False)
    assert torch.overrides.has_torch_function is asked
    assert nn.modules.activation._is_make_fx_tracing is tracing
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_gradients_have_the_parameters_strides_where_a_kernel_gives_others():
    """Where one factor is expanded, the fake kernel of mul in bfloat16 gives the rows' strides, and
    the real one those of the other factor."""
    torch.manual_seed(0)
    rows, columns = torch.randn(2, 2, 2, dtype=torch.bfloat16)
    model = nn.ParameterDict({"a": rows, "b": columns.t()})

    def loss_fn(model):
        return (model["a"] * model["b"]).sum()

    check_against_eager(model, loss_fn)
