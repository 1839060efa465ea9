"""A graph does not depend on strides that fake kernels have and real ones have not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graph_trainer as gt
from tests.unit.core.capture.steps import check_against_eager, check_step, eager


class Between(nn.Module):
    """An operator between two changes of layout, and views behind it."""

    def __init__(self, operator, into, out_of):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.operator, self.into, self.out_of = operator, into, out_of

    def forward(self, x):
        return self.last(self.out_of(self.operator(self.into(self.first(x)))))


OPERATORS = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "layer norm": lambda: nn.LayerNorm(4),
    "layer norm of two": lambda: nn.LayerNorm((6, 4)),
    "log softmax": lambda: nn.LogSoftmax(-1),
    "softmax": lambda: nn.Softmax(1),
    "log sigmoid": nn.LogSigmoid,
    "rrelu": nn.RReLU,
    "batch norm without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "batch norm of rows": lambda: nn.BatchNorm1d(4),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "prelu": lambda: nn.PReLU(6),
    "glu": lambda: nn.GLU(1),
    "convolution": lambda: nn.Conv1d(6, 6, 1),
}
LAYOUTS = {
    "transposed": (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "flat": (lambda x: x.transpose(1, 2), lambda x: x.flatten(1).unflatten(1, (-1, 6))),
    "view": (lambda x: x.transpose(1, 2), lambda x: x.reshape(-1).view(x.shape[0], -1, 6)),
    "rolled": (lambda x: x.permute(2, 1, 0).permute(2, 0, 1).mT, lambda x: x.mT),
    "sliced": (lambda x: torch.cat([x, x], 1)[:, ::2].mT, lambda x: x.mT.reshape(-1, 6)),
    "expanded": (lambda x: x[:1].expand(3, 4, 6).mT, lambda x: x.mT.flatten(0, 1)),
}


def loss_fn(model, x):
    return (model(x) * torch.linspace(-1, 1, 6)).sum()


def check(model, x, *, plain=True):
    for passes in (None, gt.PassConfig())[0 if plain else 1 :]:
        joint = gt.capture(model, loss_fn, (x,))
        if passes is not None:
            gt.run_passes(joint, passes)
        check_step(gt.compile(joint), model, loss_fn, x)


@pytest.mark.parametrize("operator", list(OPERATORS.values())[:7], ids=list(OPERATORS)[:7])
def test_an_operator_between_two_transposes_is_bitwise_eager(operator):
    check(Between(operator(), *LAYOUTS["transposed"]), torch.randn(3, 4, 6), plain=False)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_an_operator_between_two_layouts_is_bitwise_eager(operator, layout):
    for training in (True, False):
        try:
            model = Between(operator(), *layout).train(training)
            loss_fn(model, torch.randn(3, 4, 6))
        except RuntimeError:  # a shape that the operator does not take
            continue
        check(model, torch.randn(3, 4, 6))


class PointNet(nn.Module):
    """Features of points in the layout of convolutions, turned by a matrix of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, 6), nn.BatchNorm1d(6)
        self.turn, self.turn_norm = nn.Conv1d(6, 36, 1), nn.BatchNorm1d(36)
        self.last, self.last_norm = nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6)

    def forward(self, points):
        x = self.norm(self.first(points).transpose(1, 2)).relu()
        turn = self.turn_norm(self.turn(x)).amax(-1).view(-1, 6, 6)
        x = torch.bmm(x.transpose(1, 2), turn).transpose(1, 2)
        return self.last_norm(self.last(x)).transpose(1, 2).log_softmax(1).flatten(0, 1)


@pytest.mark.parametrize("training", [True, False])
def test_a_point_net_is_bitwise_eager(training):
    batches = [(torch.randn(3, 5, 3),) for _ in range(2)]
    gt.check_capture(PointNet().train(training), loss_fn, batches)


class Viewed(nn.Module):
    """Rows of an operator's result on transposed features, by a view or a reshape."""

    def __init__(self, operator, rows):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(24, 6)
        self.operator, self.rows = operator, rows

    def forward(self, x):
        return self.last(self.rows(self.operator(self.first(x).transpose(1, 2))))


VIEWED = {
    "reshape": lambda: Viewed(nn.LogSigmoid(), lambda x: x.reshape(2, -1)),
    "flatten": lambda: Viewed(nn.BatchNorm1d(4), lambda x: x.flatten(1)),
    "view": lambda: Viewed(nn.LogSigmoid(), lambda x: x.view(2, -1)),
    "view of norm": lambda: Viewed(nn.BatchNorm1d(4), lambda x: x.view(2, -1)),
}


def behind_torch_compile(step, x):
    return torch.compile(step, backend=gt.backend("eager"))


def exported(partition):
    def compiled(step, x):
        with gt.ExportedStep(step, x) as again:
            again.refresh()
            again.remove_unused_waits()
            return again.compile(partition=partition)

    return compiled


@pytest.mark.parametrize("name", VIEWED)
@pytest.mark.parametrize(
    "again",
    [behind_torch_compile, exported("tags"), exported("min_cut")],
    ids=["torch.compile", "tags", "min_cut"],
)
def test_a_view_of_real_strides_is_traced_again(name, again):
    """AOTAutograd has plain fake tensors, of which the view is impossible."""
    model, x = VIEWED[name](), torch.randn(2, 6, 6)
    same = copy.deepcopy(model)
    step = gt.partition(gt.capture(model, loss_fn, (x,)), model)
    again(step, x)(x).backward()
    wanted, gradients = eager(same, loss_fn, x)
    assert torch.equal(step(x), wanted)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, gradients, rtol=0, atol=0)


def test_a_write_through_a_view_is_never_into_a_copy():
    """Traced again, where the view is impossible, it raises; a copy would lose the write."""

    def doubled(x):
        x.view(2, -1).mul_(2)
        return x.flatten(1)

    model, x = Viewed(lambda x: F.logsigmoid(x).detach(), doubled), torch.randn(2, 6, 6)
    check_against_eager(model, loss_fn, x)
    step = gt.partition(gt.capture(model, loss_fn, (x,)), model)
    with pytest.raises(ValueError, match="Cannot view"):
        exported("tags")(step, x)


def test_a_write_into_what_may_be_a_copy_is_refused():
    """Eager writes through this reshape, which is a view of the real result; a trace copies."""

    def doubled(x):
        x.reshape(2, -1).mul_(2)
        return x.flatten(1)

    model = Viewed(lambda x: F.logsigmoid(x).detach(), doubled)
    with pytest.raises(gt.CaptureError, match=r"clone\(\) first"):
        gt.capture(model, loss_fn, (torch.randn(2, 6, 6),))


@pytest.mark.full
@pytest.mark.parametrize("name", VIEWED)
def test_a_view_of_real_strides_is_compiled_by_inductor(name):
    model, x = VIEWED[name](), torch.randn(2, 6, 6)
    same = copy.deepcopy(model)
    found = gt.compile(gt.capture(model, loss_fn, (x,)), backend="inductor")(model, x)
    torch.testing.assert_close(tuple(found), eager(same, loss_fn, x))


@pytest.mark.parametrize("name", VIEWED)
def test_the_passes_and_their_checks_bear_views_that_may_copy(name):
    model, x = VIEWED[name](), torch.randn(2, 6, 6)
    joint = gt.capture(model, loss_fn, (x,))
    gt.run_passes(joint, gt.PassConfig(activation_policy="full", verify_passes=True))
    check_step(gt.compile(joint), model, loss_fn, x)


def test_a_capture_on_meta_for_cpu_is_that_of_cpu():
    model, x = VIEWED["view"](), torch.randn(2, 6, 6)
    here = gt.capture(model, loss_fn, (x,))
    planned = gt.capture(model.to("meta"), loss_fn, (x.to("meta"),), meta_as="cpu")

    def layouts(joint):
        values = [
            n.meta["val"] for n in joint.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)
        ]
        return [(v.shape, v.stride()) for v in values]

    assert layouts(planned) == layouts(here)


def test_gradients_have_the_parameters_strides_where_a_kernel_gives_others():
    """Where one factor is expanded, the fake kernel of mul in bfloat16 gives the rows' strides, and
    the real one those of the other factor."""
    torch.manual_seed(0)
    rows, columns = torch.randn(2, 2, 2, dtype=torch.bfloat16)
    model = nn.ParameterDict({"a": rows, "b": columns.t()})

    def loss_fn(model):
        return (model["a"] * model["b"]).sum()

    check_against_eager(model, loss_fn)


class Image(nn.Module):
    """An operator on the values of images, laid out with their channels last or transposed."""

    def __init__(self, operator):
        super().__init__()
        self.scale, self.operator = nn.Parameter(torch.ones(1)), operator

    def forward(self, x):
        return self.operator(x * self.scale)


IMAGES = {
    "halves": (lambda x: F.glu(x, -1), lambda: torch.randn(8, 128, 64).mT),
    "reflection": (
        lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"),
        lambda: torch.randn(2, 32, 32, 8).permute(0, 3, 1, 2),
    ),
    "replication": (
        lambda x: F.pad(x, (3,) * 6, mode="replicate"),
        lambda: torch.randn(2, 16, 16, 16, 8).permute(0, 4, 1, 2, 3),
    ),
    "wide padding": (
        lambda x: F.pad(x, (150, 0, 0, 0), mode="replicate"),
        lambda: torch.randn(4, 3, 6, 200).mT,
    ),
    "channels in groups": (
        nn.ChannelShuffle(3),
        lambda: torch.randn(2, 32, 32, 48).permute(0, 3, 1, 2),
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_an_operator_on_images_of_another_layout_is_bitwise_eager(name):
    operator, batch = IMAGES[name]
    check_against_eager(Image(operator), lambda model, x: model(x).pow(2).mean(), batch())


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_a_dtype_of_its_own_is_captured(training):
    """The fake kernel gives the saved statistics another dtype than the real one."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = nn.Linear(6, 6).bfloat16(), nn.BatchNorm1d(6)

        def forward(self, x):
            return self.norm(self.a(x).transpose(1, 2)).transpose(1, 2)

    model, x = Mixed().train(training), torch.randn(2, 8, 6, dtype=torch.bfloat16)
    gt.check_capture(model, lambda m, x: m(x).float().square().mean(), [(x,), (x,)])
