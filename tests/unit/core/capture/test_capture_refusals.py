"""What cannot be captured is refused with an error that names the place and the remedy."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from tests.unit.core.capture.steps import batch, check_against_eager, mean, net, squares

X = batch()[0]


class Inner(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.what = what

    def forward(self, x):
        return self.what(self, self.linear(x))


def reads_item(module, x):
    return x * x.sum().item()


def model_of(what):
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), Inner(what)), nn.Linear(4, 1))


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("bad backward")


def an_error_that_the_model_catches_itself():
    def falls_back(module, x):
        try:
            module.linear(x[:, :1])
        except RuntimeError:
            x = module.linear(x)
        return x

    model = model_of(falls_back)
    model[1] = Inner(reads_item)
    return model, mean


def backward_inside_the_loss(detach):
    def loss(model, x):
        result = model(x).mean()
        result.backward(retain_graph=True)
        return result.detach() if detach else result

    return net(), loss


def reentrant_checkpointing():
    """Behind frozen layers autograd.grad never reaches it, and its gradients would be lost."""
    frozen, block, head = (nn.Linear(4, 4) for _ in range(3))
    frozen.requires_grad_(False)

    def loss(model, x):
        h = model[0](x).requires_grad_()
        return model[2](checkpoint(model[1], h, use_reentrant=True)).sum()

    return nn.ModuleList([frozen, block, head]), loss


class Buffers(nn.Module):
    """Two buffers, the second under two names, and a forward that changes them."""

    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", torch.zeros(2))
        self.register_buffer("c", self.b)
        self.change = change

    def forward(self, x):
        self.change(self)
        return self.linear(x)


def buffers(name, value):
    return Buffers(lambda m: setattr(m, name, value)), mean


def a_parameter_read_past_its_attribute():
    """It would be a constant: right once, and never trained."""
    model = net()
    hidden = [model[0].weight]
    return model, lambda m, x: m(x).mean() + hidden[0].sum()


def a_trainable_tensor_outside_the_model():
    temperature = torch.ones(3, 1, requires_grad=True)
    return net(), lambda m, x: (m(x) * temperature).mean()


def a_subclass_inside_a_subclass():
    model, inner = net(), TwoTensor(torch.ones(4), torch.ones(4))
    model.register_buffer("nested", TwoTensor(inner, inner))
    return model, mean


def a_hook_after_accumulation():
    model = net()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    return model, mean


def added_buffer():
    return Buffers(lambda m: m.register_buffer("d", torch.ones(1))), mean


REFUSED = [
    (lambda: (model_of(reads_item), mean), r"module '0\.1'.*_local_scalar_dense.*\.item\(\)"),
    (lambda: (Inner(reads_item), mean), r"the forward of the model itself.*\.item\(\)"),
    (an_error_that_the_model_catches_itself, "module '1'"),
    (lambda: (model_of(lambda m, x: Bad.apply(x)), mean), r"module '0\.1'.*bad backward"),
    (lambda: (net(), lambda m, x: m(x)), r"scalar tensor, and it returned \(3, 1\)"),
    (lambda: (net(), lambda m, x: 3.0), "returned float"),
    (lambda: (net(), lambda m, x: m(x).detach().mean()), "does not depend on any parameter"),
    (lambda: (net(), lambda m, x: m(x).mean().backward()), "returned NoneType"),
    (lambda: backward_inside_the_loss(False), r"'0\.weight': it calls backward\(\) itself"),
    (lambda: backward_inside_the_loss(True), r"'0\.weight': it calls backward\(\) itself"),
    (reentrant_checkpointing, "use_reentrant=False"),
    (lambda: buffers("a", torch.zeros(3)), r"buffer 'a' of \(2,\).*one of \(3,\)"),
    (lambda: buffers("a", torch.zeros(2).long()), "'a'.*int64"),
    (lambda: buffers("a", None), r"adds or removes buffers \['a'\]"),
    (added_buffer, r"adds or removes buffers \['d'\]"),
    (lambda: buffers("b", torch.ones(2)), r"one tensor under the names \['b', 'c'\]"),
    (a_parameter_read_past_its_attribute, r"reads '0\.weight' from a list"),
    (a_trainable_tensor_outside_the_model, "its gradient would be lost"),
    (a_subclass_inside_a_subclass, "'nested' is a TwoTensor that contains a TwoTensor as 'a'"),
    (a_hook_after_accumulation, r"0\.weight.*accumulated into \.grad"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_captured_is_named_and_leaves_no_gradient(make, message):
    model, loss_fn = make()
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(model, loss_fn, (X,))
    assert all(p.grad is None for p in model.parameters())


class SparseLayer(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return torch.sparse.mm(self.weight.to_sparse(), x.t())


def dense(x):
    return x.to_dense() if x.layout is not torch.strided else x.dequantize()


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (torch.eye(4).to_sparse(), "sparse_coo"),
        (torch.eye(4).to_sparse_csr(), "sparse_csr"),
        (torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)]), "nested"),
        (torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_a_batch_that_is_not_dense_is_refused(x, kind):
    with pytest.raises(gt.CaptureError, match=rf"'args\[0\]' is a {kind} tensor"):
        gt.capture(nn.Linear(4, 4), lambda m, x: m(dense(x)).mean(), (x,))


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (nn.LazyLinear(4), X, "'weight' has no shape yet: run the model once"),
        (nn.Embedding(9, 4, sparse=True), torch.arange(3), "the gradient of 'weight' is sparse"),
    ],
)
def test_a_model_that_a_graph_cannot_hold_is_refused(model, x, message):
    with pytest.raises(gt.CaptureError, match=message):
        gt.capture(model, mean, (x,))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, X)])
def test_a_scripted_module_is_refused_by_name(make):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(make(nn.Linear(4, 4))))
    with pytest.raises(gt.CaptureError, match=r"module '1\.0' is scripted or traced by torch\.jit"):
        gt.capture(model, mean, (X,))


def test_a_sparse_tensor_within_the_step_is_refused():
    with pytest.raises(gt.CaptureError, match=r"_to_sparse.default \(module '0'\) makes a sparse"):
        gt.capture(nn.Sequential(SparseLayer()), mean, (X,))


def test_max_unpool2d_of_any_layout_is_captured():
    model = nn.Conv2d(2, 3, 3, padding=1)

    def loss_fn(model, x):
        pooled, places = nn.functional.max_pool2d(model(x), 2, return_indices=True)
        return nn.functional.max_unpool2d(pooled, places, 2).square().mean()

    x = torch.randn(2, 2, 6, 6)
    for given in (x, x.to(memory_format=torch.channels_last), x.mT.contiguous().mT):
        check_against_eager(model, loss_fn, given)


def test_an_lstm_of_one_dnn_is_refused_at_capture():
    with pytest.raises(gt.CaptureError, match=r"mkldnn.flags\(enabled=False\)"):
        gt.capture(nn.LSTM(4, 3), lambda m, x: m(x)[0].mean(), (torch.randn(5, 2, 4),))


def test_arguments_that_are_no_tuple_are_refused():
    with pytest.raises(gt.CaptureError, match=r"\(batch,\)"):
        gt.capture(net(), mean, X)


def test_a_table_outside_the_model_is_a_constant():
    table = torch.randn(3, 1)
    check_against_eager(net(), lambda m, x: (m(x) * table).mean(), X)


def test_torch_logs_no_traceback_beside_the_error(caplog):
    model = model_of(lambda module, x: x * torch.ones(3))
    with pytest.raises(gt.CaptureError, match="in module '0.1' at .*test_capture_refusals.py"):
        gt.capture(model, mean, (X,))
    assert "failed while attempting" not in caplog.text


def test_a_failed_capture_does_not_spoil_the_next():
    model = net()
    code = gt.capture(model, squares, batch()).graph_module.code
    with pytest.raises(gt.CaptureError):
        gt.capture(model, lambda m, *_: m(torch.ones(1)), batch())
    assert gt.capture(model, squares, batch()).graph_module.code == code


def test_a_step_refuses_another_mode_or_a_frozen_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    for backward in (True, False):
        step = gt.compile(gt.capture(model.train(), mean, (X,), backward=backward))
        step(model, X)
        with pytest.raises(gt.CaptureError, match=r"was in train\(\) mode"):
            step(model.eval(), X)
    step = gt.compile(gt.capture(model, mean, (X,)))
    model[0].bias.requires_grad_(False)
    with pytest.raises(gt.CaptureError, match="'0.bias' was trainable"):
        step(model, X)
