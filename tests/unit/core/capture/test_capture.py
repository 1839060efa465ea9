"""gt.capture: what it must not touch, what it must not allocate, what it must refuse, and that
the graph computes what eager does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def check_against_eager(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
) -> JointGraph:
    """Loss, gradients, buffers and random state of the graph are bitwise those of eager."""
    before = {n: b.clone() for n, b in model.named_buffers()}
    joint = gt.capture(model, loss_fn, args, kwargs)
    torch.manual_seed(3)
    loss, gradients = gt.compile(joint)(model, *args, **kwargs)
    random = torch.get_rng_state()
    after = {n: b.clone() for n, b in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    model.zero_grad()
    torch.manual_seed(3)
    expected = loss_fn(model, *args, **kwargs)
    expected.backward()
    assert torch.equal(loss, expected)
    assert gradients.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(gradients[name], parameter.grad), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, after[name]), name
    assert torch.equal(random, torch.get_rng_state())
    model.zero_grad()
    return joint


# --- nothing is allocated, nothing is changed ---------------------------------------------------


def allocated_during(action: Callable[[], Any]) -> int:
    """The most bytes of CPU memory that torch allocated above where it began."""
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        marker = torch.empty(1)  # so that there is an event to begin with
        action()
        del marker
    totals = [
        e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    peak = current = 0
    for change in totals:
        current += change
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_storage_is_allocated(device: str) -> None:
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

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.dropout(self.norm(self.linear(x)))
        self.average = 0.5 * self.average + self.last.detach().mean(0)
        self.cache = x
        return self.lstm(self.last)[0].mean()


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_state_are_left_as_they_were(fails: bool) -> None:
    model = Restless()
    model.linear.weight.grad = torch.ones(4, 4)
    model.linear.register_forward_hook(lambda *_: None)
    random = torch.get_rng_state()
    tensors = dict(model.state_dict(keep_vars=True))
    values = {n: t.detach().clone() for n, t in tensors.items()}
    attributes = [(m, type(m), dict(vars(m))) for m in model.modules()]
    hooks = [
        {k: list(v) for k, v in vars(m).items() if "hooks" in k and v} for m in model.modules()
    ]
    grads = {n: p.grad for n, p in model.named_parameters()}

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result = model(x)
        if fails:
            raise RuntimeError("on purpose")
        return result

    if fails:
        with pytest.raises(gt.CaptureError, match="on purpose"):
            gt.capture(model, loss, (torch.randn(3, 4),))
        torch.set_rng_state(random)  # the batch above was drawn
    else:
        x = torch.randn(3, 4)
        torch.set_rng_state(random)
        gt.capture(model, loss, (x,))
        assert torch.equal(torch.get_rng_state(), random)

    assert {n: id(t) for n, t in model.state_dict(keep_vars=True).items()} == {
        n: id(t) for n, t in tensors.items()
    }
    for name, value in values.items():
        assert torch.equal(tensors[name], value), name
    for module, cls, before in attributes:
        assert type(module) is cls
        assert vars(module).keys() == before.keys()
        assert all(vars(module)[k] is v for k, v in before.items())
    assert [
        {k: list(v) for k, v in vars(m).items() if "hooks" in k and v} for m in model.modules()
    ] == hooks
    assert {n: p.grad for n, p in model.named_parameters()} == grads
    assert all(type(w) is nn.Parameter for w in model.lstm._flat_weights)


# --- the same numbers ---------------------------------------------------------------------------


def test_a_plain_net() -> None:
    joint = check_against_eager(net(), squares, *batch())
    assert [i.name for i in joint.signature.inputs][-2:] == ["args[0]", "args[1]"]


def test_capture_twice_gives_the_same_graph() -> None:
    model = net()
    first, second = (gt.capture(model, squares, batch()) for _ in range(2))
    assert first.graph_module.code == second.graph_module.code
    assert first.signature == second.signature
    assert "flat_" not in first.graph_module.code, "names say what inputs are"


def test_under_the_users_no_grad_and_inference_mode() -> None:
    model, (x, y) = net(), batch()
    code = gt.capture(model, squares, (x, y)).graph_module.code
    with torch.no_grad():
        assert gt.capture(model, squares, (x, y)).graph_module.code == code
    with torch.inference_mode():
        assert gt.capture(model, squares, (x, y)).graph_module.code == code


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.head_again = self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head_again(self.shared(torch.tanh(self.shared(x))))


def test_a_module_called_twice_and_one_under_two_names() -> None:
    joint = check_against_eager(Twice(), squares, *batch())
    (head,) = [i for i in joint.signature.inputs if i.name == "head.weight"]
    assert head.aliases == ("head_again.weight",)


def test_lstm_which_keeps_its_weights_in_a_list_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    # oneDNN's LSTM hands its backward a workspace that fake tensors do not have
    with torch.backends.mkldnn.flags(enabled=False):
        joint = check_against_eager(Model(), mean, torch.randn(5, 2, 4))
    assert len(list(joint.gradients())) == 4


def test_batch_norm_statistics_and_a_replaced_buffer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("average", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = self.average
            self.average = 0.9 * old + x.mean(0)
            # backward reads the old buffer, so it must not be overwritten before
            return self.norm(x) * old * self.average

    joint = check_against_eager(Model(), mean, torch.randn(5, 4))
    mutated = {i.name for i in joint.signature.inputs if i.mutated}
    assert mutated == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "average",
    }


class Recomputed(nn.Module):
    def __init__(self, dropout: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(
                lambda x, f=layer: torch.tanh(self.dropout(f(x))), x, use_reentrant=False
            )
            x = F.dropout(x, 0.1)
        return x


@pytest.mark.parametrize(
    "dropout",
    [
        lambda x: x,
        lambda x: F.dropout(x, 0.5),
        lambda x: x * torch.rand_like(x).add_(1),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: F.dropout(x, 0.5) * torch.randn(3, 4),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
    ],
    ids=["none", "dropout", "written after", "functional", "two draws", "mask"],
)
def test_checkpointed_blocks_draw_the_same_numbers_again(
    dropout: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    joint = check_against_eager(Recomputed(dropout), mean, torch.randn(3, 4))
    assert not any("random_draw" in (n.meta.get("custom") or {}) for n in joint.graph.nodes)


def test_checkpointed_blocks_read_their_parameters_from_the_graphs_inputs() -> None:
    joint = check_against_eager(Recomputed(torch.sin), mean, torch.randn(3, 4))
    assert not joint.graph.find_nodes(op="get_attr")


def test_hooks_on_a_parameters_gradient() -> None:
    model = net()
    model[0].weight.register_hook(lambda g: 2 * g)
    check_against_eager(model, squares, *batch())


def test_a_hook_after_accumulation_is_refused() -> None:
    model = net()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(gt.CaptureError, match=r"0\.weight.*accumulated into \.grad"):
        gt.capture(model, squares, batch())


class Sums(nn.Module):
    """Gradients that autograd hands out expanded, shared, or as the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4))
        self.b = nn.Parameter(torch.randn(4))
        self.c = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a + self.b).tanh().sum() + self.c.sum() + Product.apply(self.c, x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return a @ x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.saved_tensors[0], None


def test_every_gradient_has_memory_of_its_own() -> None:
    model, x = Sums(), torch.randn(4)
    check_against_eager(model, lambda m, x: m(x), x)
    model.c.requires_grad_(False)
    before = x.clone()
    for loss_fn in (lambda m, x: m(x), lambda m, x: Product.apply(m.a, x) + m.b.sum()):
        _, gradients = gt.compile(gt.capture(model, loss_fn, (x,)))(model, x)
        for gradient in gradients.values():
            gradient.mul_(2)  # as clipping does
        _, again = gt.compile(gt.capture(model, loss_fn, (x,)))(model, x)
        assert torch.equal(x, before)
        for name in gradients:
            assert torch.equal(gradients[name], 2 * again[name]), name


def test_a_loss_that_is_a_parameter_has_memory_of_its_own() -> None:
    model = nn.Module()
    model.p = nn.Parameter(torch.tensor(2.0))
    loss, _ = gt.compile(gt.capture(model, lambda m: m.p.view(())))(model)
    with torch.no_grad():
        model.p.fill_(5)
    assert loss == 2


def test_frozen_and_unused_parameters() -> None:
    model = net()
    model[0].requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(2))
    joint = gt.capture(model, lambda m, x, y: F.mse_loss(m[2](m[1](m[0](x))), y), batch())
    assert [n for n, _ in joint.gradients()] == ["2.weight", "2.bias"]
    assert joint.signature.parameters_without_grad == ("unused",)


def test_a_model_with_nothing_to_train() -> None:
    model = net().requires_grad_(False)
    joint = gt.capture(model, squares, batch())
    loss, gradients = gt.compile(joint)(model, *batch())
    assert torch.equal(loss, squares(model, *batch()))
    assert gradients == {}


def test_a_batch_tensor_that_requires_a_gradient() -> None:
    """For a penalty on the input's gradient; it is no output of the step."""

    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).tanh().sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return g.square().sum()

    check_against_eager(net(), penalty, torch.randn(3, 4, requires_grad=True))


# --- the batch ----------------------------------------------------------------------------------


def test_structures_keywords_and_constants() -> None:
    def loss(model: nn.Module, pair: Any, *, labels: Any, scale: float, mode: Any) -> torch.Tensor:
        result = F.mse_loss(model(pair["x"][0]), labels) * scale
        return result if mode is None else -result

    x, y = batch()
    joint = check_against_eager(net(), loss, {"x": [x]}, labels=y, scale=0.5, mode=None)
    names = [s.name for s, _ in joint.inputs_of(InputKind.BATCH)]
    assert names == ["args[0]['x'][0]", "labels"]
    step, model = gt.compile(joint), net()
    good = {"labels": y, "scale": 0.5, "mode": None}
    for args, kwargs, message in [
        (({"x": [x]},), good | {"scale": 0.25}, r"'scale' was 0\.5 .* is 0\.25 now"),
        (({"x": [x]},), good | {"mode": "neg"}, "'mode' was None"),
        (({"x": [x]},), good | {"mode": y}, "'mode' was None .* a tensor of"),
        (({"x": [x]},), good | {"labels": 3}, "'labels' was a tensor .* is 3 now"),
        (({"x": [x, x]},), good, r"new: 'args\[0\]\['x'\]\[1\]'"),
        (({"z": [x]},), good, r"missing: 'args\[0\]\['x'\]\[0\]'; new: 'args\[0\]\['z'\]\[0\]'"),
        (({"x": (x,)},), good, "another structure"),
        (({"x": [x[:2]]},), good, r"args\[0\]\['x'\]\[0\]' is Tensor \(2, 4\)"),
        (({"x": [x.double()]},), good, r"args\[0\].*float64"),
        (({"x": [x.to("meta")]},), good, r"args\[0\].*on meta"),
        (({"x": [torch.randn(4, 3).t()]},), good, r"args\[0\].*stride \(1, 3\)"),
    ]:
        with pytest.raises(gt.CaptureError, match=message):
            step(model, *args, **kwargs)


@pytest.mark.parametrize(
    ("captured", "called", "fits"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ("a", "a", True),
        (None, 0, False),
    ],
)
def test_a_constant_is_the_same_only_if_the_graph_is(
    captured: Any, called: Any, fits: bool
) -> None:
    joint = gt.capture(net(), lambda m, x, c: m(x).mean(), (batch()[0], captured))
    step, model = gt.compile(joint), net()
    if fits:
        step(model, batch()[0], called)
    else:
        with pytest.raises(gt.CaptureError, match=r"args\[1\]"):
            step(model, batch()[0], called)


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"'args\[1\]' is a set.*frozenset"),
        (bytearray(b"x"), r"'args\[1\]' is a bytearray"),
        (Holder(torch.ones(1)), r"'args\[1\]' is a Holder that holds tensors.*pytree"),
        (frozenset([torch.ones(1)]), r"'args\[1\]' is a frozenset that holds tensors"),
    ],
)
def test_constants_that_cannot_be_checked_later_are_refused(value: Any, message: str) -> None:
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(net(), lambda m, x, c: m(x).mean(), (batch()[0], value))


def test_one_tensor_given_twice_is_two_inputs() -> None:
    def loss(model: nn.Module, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (model(x) - 2 * model(z)).mean()

    model, x, z = net(), torch.randn(3, 4), torch.randn(3, 4)
    step = gt.compile(gt.capture(model, loss, (x, x)))
    assert torch.equal(step(model, x, z)[0], loss(model, x, z))


def test_expanded_and_transposed_batches_keep_their_strides() -> None:
    x = torch.randn(1, 4).expand(3, 4)
    check_against_eager(net(), mean, x)
    y = torch.randn(4, 3).t()
    joint = check_against_eager(net(), mean, y)
    with pytest.raises(gt.CaptureError, match="stride"):
        gt.compile(joint)(net(), x)


@pytest.mark.parametrize("name", ["boxed", "device", "torch", "inf", "mean", "len", "lambda_"])
def test_a_batch_value_may_have_any_name(name: str) -> None:
    def loss(model: nn.Module, **kwargs: torch.Tensor) -> torch.Tensor:
        return model(kwargs[name]).mean() + torch.ones(3).to(torch.float64).sum()

    check_against_eager(net(), loss, **{name: batch()[0]})


# --- refusals -----------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self, what: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, self.linear(x))


def reads_item(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def model_of(what: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), Inner(what)), nn.Linear(4, 1))


def test_data_dependent_code_is_an_error_that_names_op_and_module() -> None:
    with pytest.raises(gt.CaptureError, match=r"module '0\.1'.*_local_scalar_dense"):
        gt.capture(model_of(reads_item), mean, (batch()[0],))


def test_an_error_that_the_model_catches_itself_is_not_blamed() -> None:
    def falls_back(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        try:
            module.linear(x[:, :1])
        except RuntimeError:
            x = module.linear(x)
        return x

    model = model_of(falls_back)
    model[1] = Inner(reads_item)
    with pytest.raises(gt.CaptureError, match=r"module '1'"):
        gt.capture(model, mean, (batch()[0],))


def test_an_error_in_backward_names_the_module() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("bad backward")

    model = model_of(lambda m, x: Bad.apply(x))
    with pytest.raises(gt.CaptureError, match=r"module '0\.1'.*bad backward"):
        gt.capture(model, mean, (batch()[0],))


def test_losses_that_cannot_be_captured() -> None:
    model, (x, _) = net(), batch()
    for loss_fn, message in [
        (lambda m, x: m(x), r"scalar tensor and returned \(3, 1\)"),
        (lambda m, x: 3.0, "returned float"),
        (lambda m, x: m(x).detach().mean(), "does not depend on any parameter"),
        (lambda m, x: m(x).mean().backward(), "returned NoneType"),
    ]:
        with pytest.raises(gt.CaptureError, match=message):
            gt.capture(model, loss_fn, (x,))


@pytest.mark.parametrize("detach", [False, True])
def test_backward_inside_the_loss_is_refused(detach: bool) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result = model(x).mean()
        result.backward(retain_graph=True)
        return result.detach() if detach else result

    model = net()
    with pytest.raises(gt.CaptureError, match=r"'0\.weight': it calls backward\(\) itself"):
        gt.capture(model, loss, (batch()[0],))
    assert model[0].weight.grad is None


class Buffers(nn.Module):
    def __init__(self, forward: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", torch.zeros(2))
        self.c = self.b
        self.change = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return self.linear(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "a", torch.zeros(3)), r"buffer 'a' of \(2,\).*one of \(3,\)"),
        (lambda m: setattr(m, "a", torch.zeros(2).long()), "'a'.*int64"),
        (lambda m: setattr(m, "a", None), r"adds or removes buffers: \['a'\]"),
        (lambda m: m.register_buffer("d", torch.ones(1)), r"adds or removes buffers: \['d'\]"),
    ],
)
def test_a_step_leaves_the_buffers_it_found(change: Any, message: str) -> None:
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(Buffers(change), mean, (batch()[0],))


def test_replacing_one_of_two_names_of_a_buffer_is_refused() -> None:
    model = Buffers(lambda m: setattr(m, "c", m.c + 1))
    model.register_buffer("a", model.b)
    with pytest.raises(gt.CaptureError, match=r"one tensor under the names \['a', 'b'\]"):
        model.change = lambda m: setattr(m, "b", m.b + 1)
        gt.capture(model, mean, (batch()[0],))


def test_a_parameter_read_past_its_attribute_is_refused() -> None:
    """It would be a constant: right once, and never trained."""
    model = net()
    hidden = [model[0].weight]
    with pytest.raises(gt.CaptureError, match=r"'0\.weight' is read through something else"):
        gt.capture(model, lambda m, x: m(x).mean() + hidden[0].sum(), (batch()[0],))


def test_a_trainable_tensor_outside_the_model_is_refused() -> None:
    temperature = torch.ones(3, 1, requires_grad=True)
    with pytest.raises(gt.CaptureError, match="its gradient would be lost"):
        gt.capture(net(), lambda m, x: (m(x) * temperature).mean(), (batch()[0],))


def test_a_table_outside_the_model_is_a_constant() -> None:
    table = torch.randn(3, 1)
    check_against_eager(net(), lambda m, x: (m(x) * table).mean(), batch()[0])


def test_a_subclass_inside_a_subclass_is_refused_by_name() -> None:
    model = net()
    inner = TwoTensor(torch.ones(4), torch.ones(4))
    model.register_buffer("nested", TwoTensor(inner, inner))
    with pytest.raises(gt.CaptureError, match="'nested' is a TwoTensor that holds a TwoTensor"):
        gt.capture(model, squares, batch())


def test_a_failed_capture_does_not_spoil_the_next() -> None:
    model = net()
    code = gt.capture(model, squares, batch()).graph_module.code
    with pytest.raises(gt.CaptureError):
        gt.capture(model, lambda m, *_: m(torch.ones(1)), batch())
    assert gt.capture(model, squares, batch()).graph_module.code == code
