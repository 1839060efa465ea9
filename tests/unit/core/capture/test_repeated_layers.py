"""A graph whose alike layers are copies is the graph of a full capture."""

import importlib.util
import inspect
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graph_trainer.core.capture.capture as capture_module
from graph_trainer.core.capture.capture import capture
from graph_trainer.core.capture.forward_alone import capture_forward
from graph_trainer.core.capture.repetition.extend import extend
from graph_trainer.core.capture.repetition.repeated_layers import repetition_in
from graph_trainer.core.capture.tracing.model_state import state_of
from graph_trainer.core.sharding.simple_fsdp import simple_fsdp
from graph_trainer.testing import fake_mesh, mean_square
from tests.unit.core.capture.equal_steps import assert_equal
from tests.unit.graphs import Decoder

TOKENS = torch.zeros(2, 4, dtype=torch.int64)
X = torch.ones(2, 8)


def both(model, *args, loss_fn=mean_square, **how):
    """Capture a step with copies and in full; return the graphs."""
    return [capture(model, loss_fn, args, full_capture=full, **how) for full in (False, True)]


def stack_of(*layers):
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*layers), nn.Linear(8, 8))


class Dropped(nn.Module):
    """Draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + nn.functional.dropout(self.linear(x), 0.5)


class Recomputed(Dropped):
    """Draws them again in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Named(nn.Module):
    """Multiplies by an attribute, by which layers may differ."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x, after=None):
        result = self.linear(x) * self.factor
        result = result + 1 if hasattr(x, "mark") else result
        return after(result) if isinstance(after, nn.Module) else result


class Loop(nn.Module):
    """Runs its layers in a way of its own."""

    def __init__(self, loop, layers=6):
        super().__init__()
        self.first = nn.Linear(8, 8)  # so that the first layer passes a gradient on, as others do
        self.layers = nn.ModuleList(Named() for _ in range(layers))
        self.loop = loop

    def forward(self, x):
        return self.loop(self.layers, self.first(x))


def with_nothing_between(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def hooked(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


def tied_across(layers):
    for layer in layers[1:]:
        layer.linear.weight = layers[0].linear.weight
    return layers


MODELS = {
    "decoder": (lambda: Decoder(6), TOKENS),
    "tied embedding": (lambda: Decoder(6, tied=True), TOKENS),
    "checkpointed": (lambda: Decoder(6, checkpointed=True), TOKENS),
    "random": (lambda: stack_of(*(Dropped() for _ in range(6))), X),
    "random again": (lambda: stack_of(*(Recomputed() for _ in range(6))), X),
    "two kinds in turn": (
        lambda: stack_of(*(Named(2.0 + i % 2) for i in range(10))),
        X,
    ),
    "other layers first": (
        lambda: stack_of(Dropped(), Dropped(), *(Named() for _ in range(6)), Dropped()),
        X,
    ),
    "statistics": (
        lambda: stack_of(*(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(6))),
        X,
    ),
    "frozen": (lambda: stack_of(*(Named().requires_grad_(i > 99) for i in range(6))), X),
}


WAYS = [(3, True), (3, False), (None, True)]
"""Over how many ranks, and whether with backward: each model in the first, few in the others."""
QUICK = ("decoder", "random again", "statistics")


@pytest.mark.parametrize(
    ("name", "shards", "backward"),
    [
        pytest.param(name, *way, marks=() if way == WAYS[0] or name in QUICK else pytest.mark.full)
        for way in WAYS
        for name in MODELS
    ],
)
def test_the_graph_is_that_of_a_full_capture(name, shards, backward, reasons):
    make, *args = MODELS[name]
    model = make()
    if shards is not None:  # 8 rows over 3 ranks: the last has fewer
        simple_fsdp(model, fake_mesh(shards, shards - 1))
    # draws that are shared with backward get their names when the trace has ended
    assert_equal(*both(model, *args, backward=backward), names=name != "random again")
    assert reasons.all() == []


class Packed(nn.Module):
    """Has its weights in one memory, the last with a mark of torch's on it."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(3, 8, 8, dtype=torch.complex64)
        self.q, self.k, self.v = map(nn.Parameter, (memory[0], memory[1], memory[2].conj()))

    def forward(self, x):
        y = x.to(torch.complex64)
        return (y @ self.q + y @ self.k * (y @ self.v)).real


def test_parameters_in_one_memory_are_so_in_the_graph(reasons):
    assert_equal(*both(stack_of(*(Packed() for _ in range(6))), X))
    assert reasons.all() == []


def test_layers_are_really_left_out(monkeypatch, reasons):
    traced = []

    def extended(graph_module, *given):
        traced.append(len(graph_module.graph.nodes))
        return extend(graph_module, *given)

    monkeypatch.setattr(capture_module, "extend", extended)
    graphs = [
        capture(Decoder(layers), mean_square, (TOKENS,), full_capture=False) for layers in (6, 10)
    ]
    assert traced[0] + 4 == traced[1]  # an alias for each layer that is left out
    assert traced[1] < len(graphs[0].graph.nodes) < len(graphs[1].graph.nodes)
    # classes of the caller's own are traced in full unless that is asked for
    for full in (True, None):
        capture(Decoder(9), mean_square, (TOKENS,), full_capture=full)
    assert len(traced) == 2 and reasons.all() == [
        "Tracing all layers: a module, a hook or the loss is code of your own, in "
        + inspect.getfile(Decoder)
    ]
    model = stack_of(*(nn.Linear(8, 8) for _ in range(6)))  # of torch's classes alone
    capture(model, mean_square, (X,))
    assert len(traced) == 3


def test_a_package_of_the_users_own_is_so_where_it_is_installed(tmp_path, monkeypatch, reasons):
    """Its models, and its functions in the place of methods of a class that is known."""
    known, of_user = (tmp_path / "site-packages" / name for name in ("transformers", "of_user"))
    layer = "from torch import nn\nclass Layer(nn.Linear):\n"
    layer += "    def forward(self, x):\n        return nn.functional.linear(x, self.weight)\n"
    modules = []
    for folder in (known, of_user):
        folder.mkdir(parents=True)
        (folder / "layer.py").write_text(layer)
        spec = importlib.util.spec_from_file_location(f"{folder.name}_layer", folder / "layer.py")
        modules.append(importlib.util.module_from_spec(spec))
        monkeypatch.setitem(sys.modules, spec.name, modules[-1])
        spec.loader.exec_module(modules[-1])

    def traced_in_full(kind):
        capture(stack_of(*(kind(8, 8) for _ in range(6))), mean_square, (X,))
        return [reason for reason in reasons.all() if str(of_user) in reason]

    installed, own = modules
    assert not traced_in_full(installed.Layer)
    assert len(traced_in_full(own.Layer)) == 1
    monkeypatch.setattr(installed.Layer, "forward", own.Layer.forward)
    assert len(traced_in_full(installed.Layer)) == 2


def test_a_name_is_that_of_a_full_capture_though_layers_left_out_return_aliases(reasons):
    def aliased(model, x):
        return torch.ops.aten.alias(model(x)).square().mean()

    model = stack_of(*(nn.Linear(8, 8) for _ in range(7)))
    assert_equal(*both(model, X, loss_fn=aliased))
    assert not reasons.all()


def test_the_model_is_left_as_it_was():
    model = stack_of(*(hooked(Named()) for _ in range(6)))
    before = [dict(vars(m)) for m in model.modules()]
    capture(model, mean_square, (X,), full_capture=False)
    assert [dict(vars(m)) for m in model.modules()] == before
    assert all("forward" not in vars(m) for m in model.modules())


def shifted(layers):
    layers[3].linear.weight.data = layers[3].linear.weight.data.t()
    return layers


def test_a_tensor_that_all_layers_hold_is_no_difference():
    class Holding(Named):
        table = None

        def forward(self, x):
            return super().forward(x) + self.table

    table, layers = torch.ones(8), [Holding() for _ in range(6)]
    for layer in layers:
        layer.table = table
    model = stack_of(*layers)
    assert repetition_in(model, state_of(model).tensors) is not None
    assert_equal(*both(model, X))


def with_table(table):
    layer = Named()
    layer.table = table
    return layer


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [Named(float(i)) for i in range(6)],
        lambda: [Named(), Named(), Named(3.0), Named(), Named(), Named(3.0)],
        lambda: [Named() for _ in range(4)],
        lambda: [Named(-0.0 if i == 3 else 0.0) for i in range(6)],
        lambda: [hooked(Named()) for i in range(6)],
        lambda: [Named().train(i != 3) for i in range(6)],
        lambda: [Named().requires_grad_(i != 3) for i in range(6)],
        lambda: shifted([Named() for _ in range(6)]),
        lambda: [with_table({1: 1} if i == 3 else {}) for i in range(6)],
    ],
    ids=[
        "all differ",
        "no period",
        "few",
        "minus zero",
        "hooks",
        "a mode",
        "frozen",
        "strides",
        "a dict that is empty in others",
    ],
)
def test_layers_that_differ_are_not_taken_for_alike(layers):
    model = stack_of(*layers())
    assert repetition_in(model, state_of(model).tensors) is None
    assert_equal(*both(model, X))


class Known(Named):
    """Multiplies by what a table of its class says of the object by id: no attribute shows it."""

    factors: dict[int, float] = {}

    def forward(self, x):
        return super().forward(x) * self.factors.get(id(self), 2.0)


@pytest.mark.parametrize("place", [0, 1, 3, 5])
@pytest.mark.parametrize("backward", [True, False])
def test_the_periods_that_are_traced_must_be_one_pattern(place, backward, reasons, monkeypatch):
    model = Loop(with_nothing_between)
    model.layers = nn.ModuleList(Known() for _ in range(6))
    monkeypatch.setitem(Known.factors, id(model.layers[place]), 3.0)
    assert_equal(*both(model, X, backward=backward))
    assert "differs from" in reasons.all()[0]


def test_what_layers_return_to_the_caller_is_of_the_right_ones(reasons):
    class Hidden(Loop):
        def forward(self, x):
            states = [self.first(x)]
            for layer in self.layers:
                states.append(layer(states[-1]))
            return {"all": states, "last": states[-1]}

    joint = capture_forward(Hidden(None), (X,))
    assert len(dict.fromkeys(joint.output_values()[:7])) == 7
    losses = lambda model, x: sum(state.sum() for state in model(x)["all"])  # noqa: E731
    assert_equal(*both(Hidden(None), X, loss_fn=losses))
    assert reasons.all()


class Numbered(Named):
    """Knows which layer it is, as those of transformers do, and may compute by it."""

    every = 99

    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x):
        x = super().forward(x)
        return x * 3 if self.layer_idx % self.every == self.every - 1 else x


class Alternating(Numbered):
    every = 2


@pytest.mark.parametrize("kind", [Numbered, Alternating])
def test_a_layer_may_know_its_number_but_not_compute_by_it(kind, reasons):
    model = stack_of(*(kind(i) for i in range(8)))
    assert_equal(*both(model, X))
    assert bool(reasons.all()) == (kind is Alternating)


def test_a_layer_that_counts_its_calls_is_traced_in_full(reasons):
    class Counting(Named):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    assert_equal(*both(stack_of(*(Counting() for _ in range(6))), X))
    assert "forward changes" in reasons.all()[0]


def test_tensors_that_only_some_layers_share_are_told_apart():
    layers = [Named() for _ in range(7)]
    layers[2].linear.weight = layers[5].linear.weight
    assert_equal(*both(stack_of(*layers), X))
    assert_equal(*both(stack_of(*tied_across([Named() for _ in range(6)])), X))
