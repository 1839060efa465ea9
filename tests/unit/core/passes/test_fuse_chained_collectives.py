"""Gathers over several axes become one, in the order of ranks that gives the same numbers, and so
do reductions."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import graph_trainer as gt
from graph_trainer.core.analysis.unshard_chains import unshard_chains
from graph_trainer.core.graph.annotations import Role, parameter_of, phase_of, role_of, value_of
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.ordering.agreement import OneRank
from graph_trainer.core.passes import fuse_chained_collectives
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.passes.fuse_chained_collectives import (
    fuse_chained_all_gathers,
    fuse_chained_reduce_scatters,
)
from graph_trainer.core.torch_private_groups import process_groups
from graph_trainer.testing import Builder, become, code, mean_square, targets
from tests.unit.core.passes.rank_order import (
    InnerFirst,
    inner_first,
    outer_first,
    run_world,
    worlds_of,
)
from tests.unit.fake_ranks import Agreed
from tests.unit.graphs import BACKWARD, FORWARD, GATHER, SCATTER, aten, c10d, unshards


def calls(joint, op=GATHER):
    return [n for n in joint.graph.nodes if n.target is op]


def same(before, after, op):
    """Whether both worlds give equal numbers; a sum has another order, so whole ones there."""
    one, other = (run_world(world, integers=op is SCATTER) for world in (before, after))
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


both = pytest.mark.parametrize(
    ("fuse", "op"),
    [(fuse_chained_all_gathers, GATHER), (fuse_chained_reduce_scatters, SCATTER)],
    ids=["gathers", "reductions"],
)
CASES = [
    pytest.param(sizes, make, id=f"{make.__name__}-{'x'.join(map(str, sizes))}")
    for make, sizes in [
        (inner_first, (2, 2)),
        (inner_first, (2, 3, 2)),
        (outer_first, (2, 2)),
        (outer_first, (3, 2)),
        (outer_first, (2, 4)),
    ]
]


@both
@pytest.mark.parametrize(("sizes", "make"), CASES)
def test_one_collective_gives_every_rank_what_the_chain_gave(sizes, make, fuse, op):
    before, after = worlds_of(sizes, lambda: make(*sizes), fuse)
    assert {len(calls(each.joint, op)) for each in before} == {len(sizes)}
    assert {len(calls(each.joint, op)) for each in after} == {1}
    assert same(before, after, op)
    made = after[0].made
    assert all(each.made == made for each in after), "every rank makes every group, in one order"
    everyone = tuple(range(math.prod(sizes)))
    if make is inner_first:
        assert not made and after[0].groups[calls(after[0].joint, op)[0].args[-1]] == everyone
    else:
        rows = torch.arange(math.prod(sizes)).view(sizes)
        assert made == [tuple(rows.t().flatten().tolist())]


@both
def test_another_order_of_ranks_gives_other_numbers(fuse, op):
    """What the tests above compare can tell an order from another."""

    def in_row_order(joint):
        fuse(joint)
        (call,) = calls(joint, op)
        call.args = (*call.args[:-1], dist.group.WORLD.group_name)

    before, after = worlds_of((3, 2), lambda: outer_first(3, 2), in_row_order)
    assert not same(before, after, op)


def test_in_a_slice_of_a_larger_mesh_every_rank_makes_the_groups_of_all_slices():
    def make():
        return outer_first(3, 2, replicate=2)

    before, after = worlds_of((2, 3, 2), make, fuse_chained_all_gathers)
    slices = [(0, 2, 4, 1, 3, 5), (6, 8, 10, 7, 9, 11)]
    assert all(each.made == slices for each in after)
    assert [each.groups[calls(each.joint)[0].args[2]] for each in after] == [
        slices[rank // 6] for rank in range(12)
    ]
    assert same(before, after, GATHER)


@both
def test_a_second_pass_and_a_second_graph_make_no_group_again(fuse, op):
    become(3, 8)
    joint = outer_first(4, 2)
    fuse(joint)
    text = code(joint)
    fuse(joint)
    assert code(joint) == text
    again = outer_first(4, 2)
    groups = len(process_groups())
    fuse(again, context=PassContext(agreement=OneRank(is_apart=True)))
    assert len(calls(again, op)) == 1 and len(process_groups()) == groups
    assert calls(again, op)[0].args[1:] == calls(joint, op)[0].args[1:]


@both
def test_the_collective_that_is_left_keeps_phase_role_and_shape(fuse, op):
    become(0, 8)
    joint = inner_first(4, 2, dtype=torch.bfloat16)
    last = calls(joint, op)[-1]
    shape = value_of(last).shape
    fuse(joint)
    joint.validate()
    (call,) = calls(joint, op)
    kept = (phase_of, role_of, parameter_of)
    assert [of(call) for of in kept] == [
        *((FORWARD, Role.UNSHARD) if op is GATHER else (BACKWARD, Role.REDUCE_GRAD)),
        "weight",
    ]
    assert value_of(call).shape == shape and value_of(call).dtype == torch.bfloat16
    if op is GATHER:
        assert value_of(call.args[0]).shape[0] * 8 == shape[0]
        (chain,) = unshard_chains(joint)
        assert call in chain.nodes


@pytest.mark.parametrize(
    ("off", "gathered"), [([], [2, 1]), (["fuse_chained_all_gathers"], [4, 2])]
)
def test_backward_gathers_again_with_one_gather_too(off, gathered):
    """But for the first weight: x, of which it would give the gradient, is no parameter."""
    become(1, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Sequential(InnerFirst(mesh, 4), InnerFirst(mesh, 4))
    joint = gt.capture(model, mean_square, (torch.randn(3, 4),))
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always", disable_passes=off))
    assert [len(unshards(joint, phase)) for phase in (FORWARD, BACKWARD)] == gathered


def test_other_reductions_of_the_two_are_left_alone():
    become(0, 8)
    joint = outer_first(4, 2)
    first, second = calls(joint, SCATTER)
    second.args = (second.args[0], "max", *second.args[2:])
    text = code(joint)
    fuse_chained_reduce_scatters(joint)
    assert code(joint) == text
    first.args = (first.args[0], "max", *first.args[2:])
    fuse_chained_reduce_scatters(joint)
    assert [r.args[1] for r in calls(joint, SCATTER)] == ["max"]


def test_arguments_may_have_names():
    become(0, 8)
    joint = outer_first(4, 2)
    for gather in calls(joint):
        source, size, group = gather.args
        gather.args, gather.kwargs = (source,), {"group_name": group, "group_size": size}
    fuse_chained_all_gathers(joint)
    (gather,) = calls(joint)
    assert gather.args[1] == 8 and not gather.kwargs


class Sharded(Builder):
    """Graphs by hand whose parameter is a DTensor, split by rows over a mesh of 4 x 2 ranks."""

    def __init__(self, rows=24, columns=3):
        super().__init__()
        become(0, 8)
        self.mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
        self.weight = self.parameter("weight", -(-rows // 8), columns)
        self.name = "weight"
        with self.mode:
            tensor = DTensor.from_local(
                value_of(self.weight),
                self.mesh,
                [Shard(0), Shard(0)],
                run_check=False,
                shape=(rows, columns),
                stride=(columns, 1),
            )
        layout = unwrap(tensor)[1]
        self._inputs[-1] = dataclasses.replace(self._inputs[-1], layout=layout)
        self.outer, self.inner = (self.mesh.get_group(name).group_name for name in ("fsdp", "tp"))

    def do(self, op, *args, role=Role.UNSHARD, **kwargs):
        return self.call(op, *args, role=role, parameter=role and self.name, **kwargs)

    def gather(self, read, size, group, role=Role.UNSHARD, **how):
        how |= {"role": role, "parameter": role and self.name}
        return self.waited(GATHER, read, size, group, **how)


def chain(b, between=lambda b, x: x, **second):
    part = between(b, b.gather(b.weight, 2, b.inner))
    return part, b.gather(part, 4, b.outer, **second)


def test_a_chain_by_hand_is_fused_through_views_that_change_nothing():
    def twice_transposed(b, x):
        there = b.do(aten.t.default, x)
        return b.do(aten.t.default, there)

    b = Sharded()
    joint = b.joint(b.total(chain(b, twice_transposed)[1]))
    fuse_chained_all_gathers(joint)
    assert targets(joint)[:2] == [GATHER, c10d.wait_tensor.default] and len(calls(joint)) == 1
    assert calls(joint)[0].args[0].op == "placeholder"


def left_alone(joint):
    before = code(joint)
    groups = len(process_groups())
    fuse_chained_all_gathers(joint)
    assert code(joint) == before and len(process_groups()) == groups


def the_first_gather_is_read_twice(b):
    started = b.do(GATHER, b.weight, 2, b.inner)
    waits = [b.do(c10d.wait_tensor.default, started) for _ in range(2)]
    return b.gather(waits[0], 4, b.outer), waits[1]


def the_shard_is_written_between_the_gathers(b):
    part = b.gather(b.weight, 2, b.inner)
    written = b.do(aten.mul_.Tensor, b.weight, 2, role=None)
    return b.gather(part, 4, b.outer), written


def a_plain_parameter(b):
    b.name, b.weight = "plain", b.parameter("plain", 3, 3)
    return chain(b)[1:]


def through(op, *args, **kwargs):
    """A chain with a node between its gathers that changes something."""
    return lambda b: chain(b, lambda b, x: b.do(op, x, *args, **kwargs))[1:]


NEAR_MISSES = {
    "another shape": through(aten.view.default, [3, 6]),
    "a part": through(aten.slice.Tensor, 0, 0, 4),
    "a copy": through(aten.clone.default),
    "a product": through(aten.mul.Tensor, 2),
    "a cast": through(aten._to_copy.default, dtype=torch.bfloat16),
    "a write": through(aten.relu_.default),
    "read by another": chain,
    "a view of it read by another": lambda b: chain(
        b, lambda b, x: b.do(aten.view.default, x, [6, 3])
    ),
    "the first gather read by another": the_first_gather_is_read_twice,
    "a written shard": the_shard_is_written_between_the_gathers,
    "one axis twice": lambda b: [b.gather(b.gather(b.weight, 2, b.inner), 2, b.inner)],
    # ranks 0, 1 and 2 of 8 are no axis of the mesh
    "another group": lambda b: [
        b.gather(b.gather(b.weight, 3, dist.new_group([0, 1, 2]).group_name), 4, b.outer)
    ],
    "another phase": lambda b: chain(b, phase=BACKWARD)[1:],
    "no role": lambda b: chain(b, role=None)[1:],
    "another role": lambda b: chain(b, role=Role.REDUCE_GRAD)[1:],
    "a plain parameter": a_plain_parameter,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_is_no_chain_of_gathers_alone_is_left_alone(name):
    b = Sharded()
    values = NEAR_MISSES[name](b)
    left_alone(b.joint(b.total(*values)))


def test_a_transposed_square_is_left_alone():
    """Its shape says nothing; its strides do."""
    b = Sharded(rows=8, columns=2)
    part, whole = chain(b, lambda b, x: b.do(aten.t.default, x))
    assert value_of(part).shape == (2, 2)
    left_alone(b.joint(b.total(whole)))


def test_uneven_shards_are_left_alone_although_nothing_stands_between_on_this_rank():
    """6 rows over 4 x 2: the last ranks hold none, and pad between their gathers."""
    become(0, 8)
    joint = inner_first(4, 2, rows=6)
    assert calls(joint)[1].args[0].args[0] is calls(joint)[0]
    left_alone(joint)


def test_a_mesh_without_some_ranks_of_the_world_is_left_alone():
    """The ranks outside would have to make the group too, and do not run this graph."""
    become(0, 8)
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))
    joint = gt.capture(InnerFirst(mesh, 8), mean_square, (torch.randn(3, 4),))
    assert len(calls(joint)) == 2
    left_alone(joint)


def test_a_group_of_another_backend_is_left_alone(monkeypatch):
    b = Sharded()
    joint = b.joint(b.total(chain(b)[1]))
    backends = {b.inner: "gloo", b.outer: "fake"}
    monkeypatch.setattr(fuse_chained_collectives, "group_backend", backends.__getitem__)
    left_alone(joint)
    monkeypatch.undo()
    fuse_chained_all_gathers(joint)
    assert len(calls(joint)) == 1


def test_a_group_that_this_process_does_not_have_is_an_error():
    b = Sharded()
    joint = b.joint(b.total(b.gather(b.gather(b.weight, 2, "gone"), 4, b.outer)))
    with pytest.raises(gt.PassError, match=r"all_gather_into_tensor.*'gone'.*where the graph"):
        fuse_chained_all_gathers(joint)


@pytest.mark.parametrize("other", [1 << 60, -(1 << 60)])
def test_ranks_that_ask_for_other_groups_make_none(other):
    """Whichever of two ranks has the larger number to agree on, both hear of it."""

    def agree(mine):
        return max(mine, other if mine > 0 else -other)

    become(0, 8)
    joint = outer_first(4, 2)
    before, groups = code(joint), len(process_groups())
    with pytest.raises(gt.PassError, match="need different process"):
        fuse_chained_all_gathers(joint, context=PassContext(agreement=Agreed(agree)))
    assert code(joint) == before and len(process_groups()) == groups


def test_ranks_that_ask_for_the_same_groups_make_them():
    become(0, 8)
    joint = outer_first(4, 2)
    asked = []
    agreement = Agreed(lambda mine: asked.append(mine) or mine)
    fuse_chained_all_gathers(joint, context=PassContext(agreement=agreement))
    assert asked[0] == -asked[1] and len(calls(joint)) == 1


def test_a_rank_on_its_own_makes_no_groups():
    become(0, 8)
    joint = outer_first(4, 2)
    apart = PassContext(agreement=OneRank(is_apart=True))
    with pytest.raises(gt.PassError, match="do not make them now"):
        fuse_chained_all_gathers(joint, context=apart)
