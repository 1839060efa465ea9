"""Gradients of one parameter are added before they are reduced, and lose nothing by it."""

import functools

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import Role, is_backward, role_of
from graph_trainer.core.passes.fold_grad_reductions import fold_grad_reductions
from graph_trainer.core.passes.verify import verify_values
from graph_trainer.testing import Builder, assert_same, captured, check_pass, run, values_for
from tests.examples import examples
from tests.unit.graphs import BACKWARD, aten, c10d, captured_decoder, fake_world

RANKS = 4
MIXED = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def reductions(joint, parameter):
    issued = [c for c in collectives(joint) if c.role is Role.REDUCE_GRAD]
    return [c.kind for c in issued if c.parameter == parameter]


def fold(joint):
    changed = check_pass(fold_grad_reductions, joint)
    verify_values(joint)
    return changed


def cleaned(joint):
    gt.run_passes(joint, gt.PassConfig(passes=["normalize_views", "eliminate_dead_code"]))
    return joint


def whole_numbers(joint):
    """Inputs whose sums and products are exact, in any order."""
    return [v.clamp(-1, 1).round() if v.is_floating_point() else v for v in values_for(joint)]


# --- captured models, on numbers that are exact in any order -----------------------------------


class Read(nn.Module):
    """One weight, read so many times."""

    def __init__(self, size=4, times=2):
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.relu(self.linear(x))
        return x


class Checkpointed(Read):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def total(model, x):
    return model(x).sum()


def sharded(model, x, **fsdp):
    return captured(model, x, loss_fn=total, **fsdp)


FOUR, FIVE = torch.zeros(2, 4), torch.zeros(2, 5)
HALF = torch.zeros(2, 4, dtype=torch.bfloat16)
HYBRID = {"world": (2, 2), "mode": "hybrid_shard"}
SCATTER, REDUCE = "reduce_scatter_tensor", "all_reduce"
MODELS = {
    "fully sharded": (lambda: sharded(Read(), FOUR), [SCATTER]),
    "three readings": (lambda: sharded(Read(times=3), FOUR), [SCATTER]),
    "five readings": (lambda: sharded(Read(times=5), FOUR), [SCATTER]),
    "padded": (lambda: sharded(Read(5), FIVE), [SCATTER]),
    "padded, half a shard": (lambda: sharded(Read(5), FIVE, rank=2), [SCATTER]),
    "padded, no shard": (lambda: sharded(Read(5), FIVE, rank=3), [SCATTER]),
    "replicated": (lambda: sharded(Read(), FOUR, mode="replicate"), [REDUCE]),
    "hybrid": (lambda: sharded(Read(), FOUR, **HYBRID), [SCATTER, REDUCE]),
    "hybrid, padded": (lambda: sharded(Read(5), FIVE, **HYBRID), [SCATTER, REDUCE]),
    "mixed precision": (lambda: sharded(Read(), HALF, mp_policy=MIXED), [SCATTER]),
    "hybrid, mixed": (lambda: sharded(Read(), HALF, mp_policy=MIXED, **HYBRID), [SCATTER, REDUCE]),
    "checkpointed": (lambda: sharded(Checkpointed(), FOUR), [SCATTER]),
    "divided by 8": (lambda: sharded(Read(), FOUR, gradient_divide_factor=8.0), [SCATTER]),
    "undivided": (lambda: sharded(Read(), FOUR, gradient_divide_factor=1), [SCATTER]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_that_is_read_twice_is_reduced_once(name):
    capture, left = MODELS[name]
    joint = cleaned(capture())
    inputs = whole_numbers(joint)
    before = run(joint, inputs)
    assert fold(joint)
    assert reductions(joint, "linear.weight") == left
    assert_same(before, run(joint, inputs))
    summed = [n for n in joint.graph.nodes if n.target is aten.add.Tensor and role_of(n)]
    assert summed and all(is_backward(n) for n in summed)


def test_every_rank_folds_alike():
    said = []
    for rank in range(RANKS):
        joint = cleaned(sharded(Read(5), torch.zeros(2, 5), rank=rank))
        assert fold(joint)
        said.append([c.entry() for c in collectives(joint)])
    assert said.count(said[0]) == RANKS


# --- the same numbers but for the order of summation -------------------------------------------

UNIT = 2.0**-24  # of float32
GRADIENT = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": "w"}


def bound(absolute, terms):
    """What two sums of the same terms in float32 may differ by, whatever their orders.

    A sum of n terms is off by at most g * (sum of the absolute values), g = (n - 1) u /
    (1 - (n - 1) u); a division by a power of two adds nothing. (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2.)
    """
    off = (terms - 1) * UNIT
    return 2 * off / (1 - off) * absolute


def reduced(b, gradient, *, cast=None, back=None, **change):
    """The way that SimpleFSDP sends a gradient."""
    tag = GRADIENT | {"parameter": change.get("parameter", "w")}
    node = gradient
    if cast is not None:
        node = b.call(aten._to_copy.default, node, dtype=cast, **tag)
    operation, group = change.get("operation", "sum"), change.get("group", "0")
    node = b.waited(c10d.reduce_scatter_tensor.default, node, operation, RANKS, group, **tag)
    node = b.call(aten.div.Tensor, node, change.get("divisor", 4.0), **tag)
    if back is not None:
        node = b.call(aten._to_copy.default, node, dtype=back, **tag)
    return node


def both(b, gradients, **how):
    return [reduced(b, g, **how) for g in gradients]


def plus(b, one, other, **alpha):
    return b.call(aten.add.Tensor, one, other, phase=BACKWARD, **alpha)


def started(dtype=torch.float32, number=2, shard=3, weight=torch.float32):
    """A builder, and gradients of a parameter `w` of [shard, 5]."""
    fake_world(RANKS)
    b = Builder()
    w = b.parameter("w", shard, 5, dtype=weight)
    gradients = [b.input(f"g{i}", RANKS * shard, 5, dtype=dtype) for i in range(number)]
    return b, b.call(aten.sum.default, w), gradients


def scattered_sum(joint):
    """For every element of the gradient, the absolute values that add up to it."""
    absolute = sum(v.double().abs() for v in values_for(joint)[1:])
    return torch.stack(absolute.chunk(RANKS)).sum(0) / 4


@hypothesis.given(
    strategies.integers(2, 5), strategies.sampled_from([torch.float32, torch.bfloat16])
)
@examples(10, derandomize=True)
def test_sums_differ_by_their_order_alone(number, dtype):
    b, loss, gradients = started(dtype, number)
    cast = None if dtype is torch.float32 else torch.float32
    ends = both(b, gradients, cast=cast)
    joint = b.joint(loss, w=functools.reduce(lambda one, other: plus(b, one, other), ends))
    before = run(joint)[1]
    assert fold(joint)
    assert reductions(joint, "w") == [SCATTER]
    off = (run(joint)[1].double() - before.double()).abs()
    assert torch.all(off <= bound(scattered_sum(joint), number * RANKS))


def test_gradients_are_added_in_the_dtype_of_the_reduction():
    """In bfloat16 the small one would be lost."""
    b, loss, gradients = started(torch.bfloat16)
    joint = b.joint(loss, w=plus(b, *both(b, gradients, cast=torch.float32)))
    large, small = torch.full((12, 5), 256.0), torch.full((12, 5), 2.0**-8)
    inputs = [torch.zeros(3, 5), large.bfloat16(), small.bfloat16()]
    before = run(joint, inputs)
    assert fold(joint)
    assert_same(before, run(joint, inputs))
    assert torch.equal(run(joint, inputs, alike=True)[1], torch.full((3, 5), 256 + 2.0**-8))


FOLDS = {
    "a sum of sums": (
        {"number": 4},
        lambda b, g: plus(b, plus(b, *both(b, g[:2])), plus(b, *both(b, g[2:]))),
    ),
    "reduced in a finer dtype than added in": (
        {"dtype": torch.bfloat16, "weight": torch.bfloat16},
        lambda b, g: plus(b, *both(b, g, cast=torch.float32, back=torch.bfloat16)),
    ),
}


@pytest.mark.parametrize(("how", "gradient"), FOLDS.values(), ids=FOLDS)
def test_any_sum_of_reductions_is_one_reduction(how, gradient):
    b, loss, gradients = started(**how)
    joint = b.joint(loss, w=gradient(b, gradients))
    assert fold(joint)
    assert reductions(joint, "w") == [SCATTER]


@pytest.mark.parametrize("policy", [None, MIXED])
def test_a_tied_embedding_is_reduced_once(policy):
    joint = cleaned(captured_decoder(tied=True, fsdp={"mp_policy": policy}))
    others = [c.parameter for c in collectives(joint) if c.parameter != "embedding.weight"]
    assert reductions(joint, "embedding.weight") == [SCATTER] * 2
    assert fold(joint)
    assert reductions(joint, "embedding.weight") == [SCATTER]
    assert [c.parameter for c in collectives(joint) if c.parameter != "embedding.weight"] == others


# --- near misses -------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape, dtype", [((12, 1), torch.float32), ((12, 5), torch.bfloat16)])
def test_gradients_that_only_adding_makes_alike_stay(shape, dtype, turned):
    """Of another shape or dtype, which an addition allows."""
    fake_world(RANKS)
    b = Builder()
    w, one = b.parameter("w", 3, 5), b.input("one", 12, 5)
    ends = both(b, (one, b.input("other", *shape, dtype=dtype)))
    ends = ends[::-1] if turned else ends
    assert not fold(b.joint(b.call(aten.sum.default, w), w=plus(b, *ends)))


def other(**change):
    """The second of two gradients is reduced in another way."""
    return lambda b, g: plus(b, reduced(b, g[0]), reduced(b, g[1], **change))


def alike(**how):
    return lambda b, g: plus(b, *both(b, g, **how))


def bent(bend):
    """Something happens to either reduction that gives other numbers for their sum."""
    return lambda b, g: plus(b, *(bend(b, end) for end in both(b, g)))


def do(op, *args, **kwargs):
    return lambda b, node: b.call(op, node, *args, **kwargs, **GRADIENT)


def passed_on(role, parameter):
    """A reduction of something else, which is only divided as a gradient is."""

    def gradient(b, g):
        how = {"phase": BACKWARD, "role": role, "parameter": parameter}
        waits = [
            b.waited(c10d.reduce_scatter_tensor.default, x, "sum", RANKS, "0", **how) for x in g
        ]
        return plus(b, *(b.call(aten.div.Tensor, wait, 4.0, **GRADIENT) for wait in waits))

    return gradient


STAYS = {
    "another group": other(group="1"),
    "another divisor": other(divisor=8.0),
    "another reduction": other(operation="avg"),
    "another parameter": other(parameter="v"),
    "another dtype": other(cast=torch.float64, back=torch.float32),
    "reduced by max": alike(operation="max"),
    "reduced by min": alike(operation="min"),
    "reduced by product": alike(operation="product"),
    "a weighted sum": lambda b, g: plus(b, *both(b, g), alpha=2),
    "added to itself": lambda b, g: plus(b, *both(b, g[:1]) * 2),
    "added to something else": lambda b, g: plus(
        b, reduced(b, g[0]), b.call(aten.slice.Tensor, g[1], 0, 0, 3, phase=BACKWARD)
    ),
    "clamped": bent(do(aten.clamp.default, -1, 1)),
    "clamped in place": bent(do(aten.clamp_.default, -1, 1)),
    "squared": bent(lambda b, node: b.call(aten.mul.Tensor, node, node, **GRADIENT)),
    "rounded": bent(
        lambda b, node: do(aten._to_copy.default, dtype=torch.float32)(
            b, do(aten._to_copy.default, dtype=torch.bfloat16)(b, node)
        )
    ),
    "reduced in place": bent(
        lambda b, node: b.waited(c10d.all_reduce_.default, node, "sum", "0", **GRADIENT)
    ),
    "of no gradient": passed_on(None, None),
    "of another parameter's gradient": passed_on(Role.REDUCE_GRAD, "v"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_no_plain_sum_of_two_reductions_stays(name):
    b, loss, gradients = started()
    assert not fold(b.joint(loss, w=STAYS[name](b, gradients)))


@pytest.mark.parametrize(
    ("dtype", "weight", "back"),
    [
        # reduced in half the bits and added in float32: the sum would be rounded once more
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        # twice a sum that fits may overflow
        (torch.float16, torch.float16, None),
    ],
)
def test_a_sum_that_half_precision_would_change_stays(dtype, weight, back):
    b, loss, gradients = started(dtype, weight=weight)
    assert not fold(b.joint(loss, w=alike(back=back)(b, gradients)))


@pytest.mark.parametrize("back", [None, torch.float32])
def test_a_reduction_that_another_node_reads_stays(back):
    b, loss, gradients = started()
    first, second = both(b, gradients, back=back)
    norm = b.call(aten.sum.default, first.args[0], phase=BACKWARD)
    loss = b.call(aten.add.Tensor, loss, norm, phase=BACKWARD)
    assert not fold(b.joint(loss, w=plus(b, first, second)))


def test_activations_that_are_reduced_and_added_are_not_its_business():
    b, loss, gradients = started()
    b.phase = BACKWARD
    ends = [b.waited(c10d.all_reduce.default, g, "sum", "0") for g in gradients]
    loss = b.call(aten.add.Tensor, loss, b.call(aten.sum.default, plus(b, *ends)))
    assert not fold(b.joint(loss))


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_is_overwritten_once_it_is_reduced_stays(late):
    b, loss, (one, other) = started()
    gradient = b.call(aten.mul.Tensor, one, 2, phase=BACKWARD)
    first = reduced(b, gradient)
    second = reduced(b, other) if late else None
    b.call(aten.zero_.default, gradient, phase=BACKWARD)
    second = second or reduced(b, other)
    joint = b.joint(loss, w=plus(b, first, second))
    inputs = whole_numbers(joint)
    before = run(joint, inputs)
    assert fold(joint) is late, "a write after both reductions changes nothing"
    assert_same(before, run(joint, inputs))
