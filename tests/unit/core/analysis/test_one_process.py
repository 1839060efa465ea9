"""A graph runs on real values in one process, with collectives of ranks that do not exist."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graph_trainer as gt
from graph_trainer.core.analysis.one_process import REDUCTIONS, SIMULATED, run, values_for
from graph_trainer.core.graph.collective_kinds import KINDS, Effect
from graph_trainer.testing import Builder, become, mean_square
from tests.unit.graphs import ALL_REDUCE, GATHER, SCATTER, aten, c10d

X = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
SCALED = [X, 2 * X]
"""What ranks 0 and 1 hold, as rank 0 has it."""


def result_of(op, *args, dtype=torch.float32, **how):
    """What a collective makes of X."""
    b = Builder()
    value = b.waited(op, b.input("x", 2, 2, dtype=dtype), *args)
    joint = b.joint(value)
    result = run(joint, [X.to(dtype)], **how)[0]
    assert result.shape == value.meta["val"].shape and result.dtype == dtype
    return result


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (GATHER, (2, "0"), torch.cat(SCALED)),
        (SCATTER, ("sum", 2, "0"), 3 * X[:1]),
        (ALL_REDUCE, ("sum", "0"), 3 * X),
        (ALL_REDUCE, ("avg", "0"), 1.5 * X),
        (ALL_REDUCE, ("max", "0"), torch.maximum(*SCALED)),
        (ALL_REDUCE, ("min", "0"), torch.minimum(*SCALED)),
        (ALL_REDUCE, ("product", "0"), SCALED[0] * SCALED[1]),
        (c10d.broadcast.default, (1, "0"), SCALED[1]),
        (c10d.all_to_all_single.default, ([1, 1], [1, 1], "0"), torch.cat([X[:1], 2 * X[:1]])),
        (c10d.all_to_all_single.default, ([0, 2], [2, 0], "0"), 2 * X),
    ],
)
def test_what_a_rank_receives_from_a_rank_that_holds_twice_as_much(op, args, expected):
    assert torch.equal(result_of(op, *args), expected)


def test_ranks_that_are_alike_and_integers_hold_the_same():
    assert torch.equal(result_of(GATHER, 2, "0", alike=True), torch.cat([X, X]))
    assert torch.equal(result_of(GATHER, 2, "0", dtype=torch.int64), torch.cat([X, X]).long())
    assert torch.equal(result_of(ALL_REDUCE, "sum", "0", dtype=torch.int64), 2 * X.long())
    for reduction in REDUCTIONS:
        alone = result_of(ALL_REDUCE, reduction, "0", alike=True)
        assert torch.equal(alone, {"sum": X * 2, "product": X * X}.get(reduction, X))


def test_a_rank_in_the_middle():
    become(1, 4)
    group = torch.distributed.group.WORLD.group_name
    assert torch.equal(result_of(GATHER, 4, group), torch.cat([0.5 * X, X, 2 * X, 4 * X]))


def test_variants_that_take_a_list_or_write_into_a_buffer():
    b = Builder()
    x, out = b.input("x", 2, 2), b.call(aten.zeros.default, [4, 2])
    listed = b.call(c10d.all_gather_into_tensor_coalesced.default, [x, x], 2, "0")
    into = b.call(c10d.all_gather_into_tensor_out.default, x, 2, "0", out=out)
    reduced = b.call(c10d.all_reduce_.default, b.call(aten.clone.default, x), "sum", "0")
    both = b.call(c10d.all_reduce_coalesced_.default, [x], "sum", "0")
    last = b.call(torch.ops.aten.add.Tensor, reduced, b.call(lambda r: r[0], both))
    joint = b.joint(b.total(b.call(lambda r: r[1], listed), into, out, last))
    *_, written = run(joint, [X])
    assert torch.equal(written, 3 * X)
    assert torch.equal(run(joint, [X])[0], 3 * 3 * X.sum() + 3 * X.sum() + 3 * X.sum())


def test_collectives_without_a_simulation_are_those_of_pairs():
    starting = {name for name, kind in KINDS.items() if kind.effect is Effect.STARTS}
    assert starting - SIMULATED == {"isend", "irecv", "batch_p2p_ops"}
    with pytest.raises(gt.VerificationError, match="isend"):
        result_of(c10d.isend.default, 1, 0, "0")


class Noise(nn.Module):
    """Draws from torch's generator, also by its name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) + torch.randn(4, generator=torch.default_generator) * torch.rand(4)


def test_a_run_leaves_generators_and_constants_as_they_were():
    model = Noise()
    joint = gt.capture(model, mean_square, (torch.randn(2, 4),))
    first = run(joint)
    torch.rand(1)
    state = torch.get_rng_state()
    assert all(map(torch.equal, first, run(joint)))
    assert torch.equal(torch.get_rng_state(), state)
    b = Builder()
    b.root.constant = torch.zeros(4)
    x = b.input("x", 4)
    constant = b.graph.get_attr("constant")
    constant.meta["val"] = b.mode.from_tensor(b.root.constant)
    joint = b.joint(b.total(b.call(aten.add_.Tensor, constant, x)))
    run(joint)
    assert not b.root.constant.any() and not joint.graph_module.constant.any()


def test_values_look_as_the_graph_says():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6)[:, 1:5:2].t())
            self.register_buffer("variance", torch.ones(3, 1).expand(3, 2))

        def forward(self, i):
            return self.weight[i] * self.variance.sum()

    joint = gt.capture(Odd(), mean_square, (torch.tensor([0, 1]),))
    values = values_for(joint)
    for node, value in zip(joint.placeholders(), values, strict=True):
        fake = node.meta["val"]
        assert (value.shape, value.stride(), value.dtype) == (
            fake.shape,
            fake.stride(),
            fake.dtype,
        )
    assert all(map(torch.equal, values, values_for(joint)))
    weight, variance, place = values
    assert (variance > 0).all() and set(place.tolist()) <= {0, 1} and weight.abs().max() < 9
    assert not torch.equal(values_for(joint, seed=1)[0], weight)


def test_a_mean_is_none_of_its_parts_on_any_rank():
    """Rank 1 of two: the other's values are half of its own."""
    for rank, mean in ((0, 1.5), (1, 0.75)):
        become(rank, 2)
        b = Builder()
        waited = b.waited(ALL_REDUCE, b.parameter("p", 2, 2), "avg", dist.group.WORLD.group_name)
        ones = [torch.ones(2, 2)]
        assert run(b.joint(b.call(aten.sum.default, waited)), ones)[0].item() == 4 * mean
