"""An in-place write becomes a copy only where no other node can observe it."""

import operator

import pytest
import torch

from graph_trainer.core.graph.annotations import Phase
from graph_trainer.core.passes.functionalize_writes import functionalize_writes
from graph_trainer.testing import Builder, check_pass, targets
from tests.unit.graphs import aten

PUT = aten.index_put_.default


class Graph(Builder):
    def __init__(self):
        super().__init__()
        self.x = self.input("x", 4)
        self.index = self.input("index", 2, dtype=torch.int64)
        self.values = self.input("values", 2)

    def made(self):
        return self.call(aten.mul.Tensor, self.x, 2)

    def put(self, target, **kwargs):
        return self.call(PUT, target, [self.index], self.values, **kwargs)

    def done(self, *read):
        return self.joint(self.total(*read))


@pytest.mark.parametrize("accumulate", [False, True])
def test_fires_on_a_temporary_and_its_later_readers_follow(accumulate):
    g = Graph()
    target = g.made()
    g.put(target, accumulate=accumulate)
    joint = g.done(target, g.call(aten.neg.default, target))
    assert check_pass(functionalize_writes, joint)
    assert PUT not in targets(joint) and list(target.users) == [
        joint.graph.find_nodes(op="call_function", target=aten.index_put.default)[0]
    ]


def test_fires_on_one_write_after_another():
    g = Graph()
    joint = g.done(g.put(g.put(g.made())))
    assert check_pass(functionalize_writes, joint)
    assert targets(joint).count(aten.index_put.default) == 2


def read_before(g):
    target = g.made()
    before = g.call(aten.neg.default, target)
    return g.put(target), before


def viewed_before(g):
    target = g.made()
    view = g.call(aten.view.default, target, [2, 2])
    g.put(target)
    return (view,)


def an_input(g):
    return (g.put(g.x),)


def a_view_of_an_input(g):
    g.put(g.call(aten.view.default, g.x, [4]))
    return (g.x,)


def a_view_of_a_temporary(g):
    base = g.made()
    g.put(g.call(aten.alias.default, base))
    return (base,)


def an_unsafe_view(g):
    base = g.made()
    g.put(g.call(aten._unsafe_view.default, base, [4]))
    return (base,)


def a_part_of_a_split(g):
    base = g.call(aten.cat.default, [g.x, g.x])
    g.put(g.call(operator.getitem, g.call(aten.split.Tensor, base, 4), 0))
    return (base,)


def a_wait(g):
    gathered = g.call(torch.ops._c10d_functional.all_reduce.default, g.x, "sum", "0")
    g.put(g.call(torch.ops._c10d_functional.wait_tensor.default, gathered))
    return (gathered,)


def a_second_write_after_one_that_stays(g):
    target = g.made()
    before = g.call(aten.alias.default, target)
    g.put(g.put(target))
    return (before,)


@pytest.mark.parametrize(
    "near_miss",
    [
        read_before,
        viewed_before,
        an_input,
        a_view_of_an_input,
        a_view_of_a_temporary,
        an_unsafe_view,
        a_part_of_a_split,
        a_wait,
        a_second_write_after_one_that_stays,
    ],
)
def test_a_near_miss_stays(near_miss):
    g = Graph()
    assert not check_pass(functionalize_writes, g.done(*near_miss(g)))


def elementwise(target, *args, phase=Phase.FORWARD):
    """A graph that writes into what it has made: `target`(made, *args)."""
    g = Graph()
    made = g.made()
    written = g.call(target, made, *args, phase=phase)
    return g.done(g.call(aten.rsqrt.default, written), g.call(aten.neg.default, made))


@pytest.mark.parametrize(
    ("write", "instead", "args"),
    [
        (aten.add_.Scalar, aten.add.Scalar, (1e-5,)),
        (aten.add_.Tensor, aten.add.Tensor, (0.5,)),
        (aten.sigmoid_.default, aten.sigmoid.default, ()),
    ],
)
def test_an_elementwise_write_of_forward_makes_a_new_tensor(write, instead, args):
    joint = elementwise(write, *args)
    assert check_pass(functionalize_writes, joint)
    assert instead in targets(joint) and write not in targets(joint)


@pytest.mark.parametrize(
    ("write", "args", "how"),
    [
        (aten.add_.Tensor, (0.5,), {"phase": Phase.BACKWARD}),  # never runs twice
        (aten.bernoulli_.float, (0.5,), {}),
        (aten.zero_.default, (), {}),
    ],
)
def test_other_writes_stay(write, args, how):
    joint = elementwise(write, *args, **how)
    functionalize_writes(joint)
    assert write in targets(joint)


def test_an_elementwise_write_of_another_type_stays():
    """The result in place is bfloat16; a new tensor would be float32."""
    g = Graph()
    made = g.call(aten.to.dtype, g.made(), torch.bfloat16)
    joint = g.done(g.call(aten.add_.Tensor, made, g.x))
    functionalize_writes(joint)
    assert aten.add_.Tensor in targets(joint)


def test_a_tensor_written_into_itself_stays_for_torch_to_refuse():
    g = Graph()
    target = g.call(aten.mul.Tensor, g.values, 2)
    joint = g.done(g.call(PUT, target, [g.index], target))
    functionalize_writes(joint)
    assert PUT in targets(joint)


def test_a_layout_that_a_copy_would_not_keep_stays():
    g = Graph()
    gaps = g.call(aten.rand_like.default, g.x)
    gaps.meta["val"] = gaps.meta["val"].new_empty_strided((4,), (2,))
    joint = g.done(g.put(gaps))
    functionalize_writes(joint)
    assert PUT in targets(joint)
