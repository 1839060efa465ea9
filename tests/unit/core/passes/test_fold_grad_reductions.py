"""Gradients of one parameter are added before they are reduced, and lose nothing by it."""

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import Role, is_backward, role_of
from graph_trainer.core.passes.fold_grad_reductions import fold_grad_reductions
from graph_trainer.core.passes.verify import verify_values
from tests.examples import examples
from tests.unit.graphs import (
    BACKWARD,
    Builder,
    assert_same,
    aten,
    c10d,
    captured,
    captured_decoder,
    code,
    fake_world,
    run,
    values_for,
)

RANKS = 4
MIXED = gt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def reductions(joint, parameter):
    issued = [c for c in collectives(joint) if c.role is Role.REDUCE_GRAD]
    return [c.kind for c in issued if c.parameter == parameter]


def fold(joint):
    """Whether the pass changed anything; the graph must hold, and a second run change nothing."""
    text = code(joint)
    fold_grad_reductions(joint)
    joint.validate()
    verify_values(joint)
    first = code(joint)
    fold_grad_reductions(joint)
    assert code(joint) == first, "the second run changed the graph"
    return first != text


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


def hybrid(model, x, **fsdp):
    fake_world(RANKS)
    gt.simple_fsdp(model, init_device_mesh("cpu", (2, 2)), "hybrid_shard", **fsdp)
    return gt.capture(model, total, (x,))


def sharded(model, x, **fsdp):
    return captured(model, x, loss_fn=total, **fsdp)


FOUR, FIVE = torch.zeros(2, 4), torch.zeros(2, 5)
HALF = torch.zeros(2, 4, dtype=torch.bfloat16)
SCATTER, REDUCE = "reduce_scatter_tensor", "all_reduce"
MODELS = {
    "fully sharded": (lambda: sharded(Read(), FOUR), [SCATTER]),
    "three readings": (lambda: sharded(Read(times=3), FOUR), [SCATTER]),
    "five readings": (lambda: sharded(Read(times=5), FOUR), [SCATTER]),
    "padded": (lambda: sharded(Read(5), FIVE), [SCATTER]),
    "padded, half a shard": (lambda: sharded(Read(5), FIVE, rank=2), [SCATTER]),
    "padded, no shard": (lambda: sharded(Read(5), FIVE, rank=3), [SCATTER]),
    "replicated": (lambda: sharded(Read(), FOUR, mode="replicate"), [REDUCE]),
    "hybrid": (lambda: hybrid(Read(), FOUR), [SCATTER, REDUCE]),
    "hybrid, padded": (lambda: hybrid(Read(5), FIVE), [SCATTER, REDUCE]),
    "mixed precision": (lambda: sharded(Read(), HALF, mp_policy=MIXED), [SCATTER]),
    "hybrid, mixed": (lambda: hybrid(Read(), HALF, mp_policy=MIXED), [SCATTER, REDUCE]),
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
TERMS = 2 * RANKS


def bound(absolute, terms=TERMS):
    """What two sums of the same terms in float32 may differ by, whatever their orders.

    A sum of n terms is off by at most g * (sum of the absolute values), g = (n - 1) u /
    (1 - (n - 1) u); a division by a power of two adds nothing. (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2.)
    """
    off = (terms - 1) * UNIT
    return 2 * off / (1 - off) * absolute


def reduced(b, gradient, *, cast=None, back=None, scatter=True, **change):
    """The way that SimpleFSDP sends a gradient."""
    tag = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": change.get("parameter", "w")}
    node = gradient
    if cast is not None:
        node = b.call(aten._to_copy.default, node, dtype=cast, **tag)
    operation, group = change.get("operation", "sum"), change.get("group", "0")
    if scatter:
        node = b.call(c10d.reduce_scatter_tensor.default, node, operation, RANKS, group, **tag)
    else:
        node = b.call(c10d.all_reduce.default, node, operation, group, **tag)
    node = b.call(c10d.wait_tensor.default, node, **tag)
    node = b.call(aten.div.Tensor, node, change.get("divisor", 4.0), **tag)
    if back is not None:
        node = b.call(aten._to_copy.default, node, dtype=back, **tag)
    return node


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
    ends = [reduced(b, g, cast=cast) for g in gradients]
    node = ends[0]
    for end in ends[1:]:
        node = plus(b, node, end)
    joint = b.joint(loss, w=node)
    before = run(joint)[1]
    assert fold(joint)
    assert reductions(joint, "w") == [SCATTER]
    off = (run(joint)[1].double() - before.double()).abs()
    assert torch.all(off <= bound(scattered_sum(joint), number * RANKS))


def test_gradients_are_added_in_the_dtype_of_the_reduction():
    """In bfloat16 the small one would be lost."""
    b, loss, (one, other) = started(torch.bfloat16)
    joint = b.joint(loss, w=plus(b, *(reduced(b, g, cast=torch.float32) for g in (one, other))))
    large, small = torch.full((12, 5), 256.0), torch.full((12, 5), 2.0**-8)
    inputs = [torch.zeros(3, 5), large.bfloat16(), small.bfloat16()]
    before = run(joint, inputs)
    assert fold(joint)
    assert_same(before, run(joint, inputs))
    assert torch.equal(run(joint, inputs)[1], torch.full((3, 5), 256 + 2.0**-8))


def test_a_sum_of_sums_is_one_reduction():
    b, loss, gradients = started(number=4)
    one, two, three, four = (reduced(b, g) for g in gradients)
    joint = b.joint(loss, w=plus(b, plus(b, one, two), plus(b, three, four)))
    assert fold(joint)
    assert reductions(joint, "w") == [SCATTER]


def test_what_is_reduced_to_a_finer_dtype_than_it_is_added_in_is_folded():
    b, loss, gradients = started(torch.bfloat16, weight=torch.bfloat16)
    ends = [reduced(b, g, cast=torch.float32, back=torch.bfloat16) for g in gradients]
    joint = b.joint(loss, w=plus(b, *ends))
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


def test_it_runs_when_asked_for():
    for passes, number in ((["default"], 2), (["default", "fold_grad_reductions"], 1)):
        joint = captured(Read(), FOUR)
        gt.run_passes(joint, gt.PassConfig(passes=passes, verify_passes=True))
        assert reductions(joint, "linear.weight") == [SCATTER] * number


# --- near misses -------------------------------------------------------------------------------

OTHER = {
    "another group": {"group": "1"},
    "another divisor": {"divisor": 8.0},
    "another reduction": {"operation": "avg"},
    "another parameter": {"parameter": "v"},
    "another dtype": {"cast": torch.float64, "back": torch.float32},
}


@pytest.mark.parametrize("name", OTHER)
def test_another_way_stays_another(name):
    b, loss, (one, other) = started()
    assert not fold(b.joint(loss, w=plus(b, reduced(b, one), reduced(b, other, **OTHER[name]))))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape, dtype", [((12, 1), torch.float32), ((12, 5), torch.bfloat16)])
def test_gradients_that_only_adding_makes_alike_stay(shape, dtype, turned):
    """Of another shape or dtype, which an addition allows."""
    fake_world(RANKS)
    b = Builder()
    w, one = b.parameter("w", 3, 5), b.input("one", 12, 5)
    ends = [reduced(b, g) for g in (one, b.input("other", *shape, dtype=dtype))]
    ends = ends[::-1] if turned else ends
    assert not fold(b.joint(b.call(aten.sum.default, w), w=plus(b, *ends)))


def both(b, gradients, **how):
    return [reduced(b, g, **how) for g in gradients]


def half_precision(dtype):
    """Reduced in half the bits, added in float32: the sum would be rounded once more."""
    return dtype, lambda b, g: plus(b, *both(b, g, back=torch.float32))


STAYS = {
    **{
        f"reduced by {op}": (torch.float32, lambda b, g, op=op: plus(b, *both(b, g, operation=op)))
        for op in ("max", "min", "product")
    },
    "reduced in bfloat16": half_precision(torch.bfloat16),
    "reduced in float16": half_precision(torch.float16),
    "a weighted sum": (torch.float32, lambda b, g: plus(b, *both(b, g), alpha=2)),
    "added to itself": (torch.float32, lambda b, g: plus(b, *both(b, g[:1]) * 2)),
    "added to something else": (
        torch.float32,
        lambda b, g: plus(
            b, reduced(b, g[0]), b.call(aten.slice.Tensor, g[1], 0, 0, 3, phase=BACKWARD)
        ),
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_no_plain_sum_of_two_reductions_stays(name):
    dtype, gradient = STAYS[name]
    b, loss, gradients = started(dtype)
    assert not fold(b.joint(loss, w=gradient(b, gradients)))


def test_float16_stays():
    """Twice a sum that fits may overflow."""
    b, loss, gradients = started(torch.float16, weight=torch.float16)
    assert not fold(b.joint(loss, w=plus(b, *both(b, gradients))))


@pytest.mark.parametrize("back", [None, torch.float32])
def test_a_reduction_that_another_node_reads_stays(back):
    b, loss, (one, other) = started()
    first, second = (reduced(b, g, back=back) for g in (one, other))
    norm = b.call(aten.sum.default, first.args[0], phase=BACKWARD)
    both = b.call(aten.add.Tensor, loss, norm, phase=BACKWARD)
    assert not fold(b.joint(both, w=plus(b, first, second)))


BENT = {
    "clamped": lambda b, node, **tag: b.call(aten.clamp.default, node, -1, 1, **tag),
    "clamped in place": lambda b, node, **tag: b.call(aten.clamp_.default, node, -1, 1, **tag),
    "squared": lambda b, node, **tag: b.call(aten.mul.Tensor, node, node, **tag),
    "rounded": lambda b, node, **tag: b.call(
        aten._to_copy.default,
        b.call(aten._to_copy.default, node, dtype=torch.bfloat16, **tag),
        dtype=torch.float32,
        **tag,
    ),
    "reduced in place": lambda b, node, **tag: b.call(
        c10d.wait_tensor.default, b.call(c10d.all_reduce_.default, node, "sum", "0", **tag), **tag
    ),
}


@pytest.mark.parametrize("name", BENT)
def test_what_does_other_things_to_a_sum_than_to_its_summands_stays(name):
    b, loss, gradients = started()
    tag = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": "w"}
    ends = [BENT[name](b, reduced(b, g), **tag) for g in gradients]
    assert not fold(b.joint(loss, w=plus(b, *ends)))


@pytest.mark.parametrize("role, parameter", [(None, None), (Role.REDUCE_GRAD, "v")])
def test_a_reduction_of_something_else_that_is_passed_on_stays(role, parameter):
    b, loss, gradients = started()
    ends = []
    for gradient in gradients:
        tag = {"phase": BACKWARD, "role": role, "parameter": parameter}
        node = b.call(c10d.reduce_scatter_tensor.default, gradient, "sum", RANKS, "0", **tag)
        node = b.call(c10d.wait_tensor.default, node, **tag)
        tag = {"phase": BACKWARD, "role": Role.REDUCE_GRAD, "parameter": "w"}
        ends.append(b.call(aten.div.Tensor, node, 4.0, **tag))
    assert not fold(b.joint(loss, w=plus(b, *ends)))


def test_activations_that_are_reduced_and_added_are_not_its_business():
    b, loss, gradients = started()
    ends = []
    for g in gradients:
        summed = b.call(c10d.all_reduce.default, g, "sum", "0", phase=BACKWARD)
        ends.append(b.call(c10d.wait_tensor.default, summed, phase=BACKWARD))
    both = b.call(aten.sum.default, plus(b, *ends), phase=BACKWARD)
    assert not fold(b.joint(b.call(aten.add.Tensor, loss, both, phase=BACKWARD)))


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
