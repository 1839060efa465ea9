"""What counts as communication in a graph, and in which order."""

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.ordering.proof import prove_order
from graph_trainer.core.ordering.sequences import issued_by, may_communicate
from graph_trainer.testing import Builder
from tests.unit.core.ordering.front_ends import offline, online, refused
from tests.unit.graphs import aten, c10d, captured_decoder, fake_world


@pytest.fixture
def unknown_op():
    with torch.library._scoped_library("order_test", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        yield torch.ops.order_test.mystery.default


def graph_with(*ops, group=None):
    """Each op on a vector; an all-reduce is waited for."""
    b = Builder()
    x = b.input("x", 4)
    total = b.call(aten.sum.default, x)
    for op in ops:
        if op is c10d.all_reduce.default:
            result = b.call(c10d.wait_tensor.default, b.call(op, x, "sum", group))
        else:
            result = b.call(op, x, module="layers.7")
        total = b.call(aten.add.Tensor, total, b.call(aten.sum.default, result))
    return b.joint(total)


def test_an_unknown_op_is_communication_among_all_ranks(unknown_op):
    fake_world(4)
    pair = torch.distributed.new_group([0, 1]).group_name
    plain = issued_by(graph_with(c10d.all_reduce.default, group=pair), 4)
    after = issued_by(graph_with(c10d.all_reduce.default, unknown_op, group=pair), 4)
    before = issued_by(graph_with(unknown_op, c10d.all_reduce.default, group=pair), 4)
    rest = issued_by(graph_with(unknown_op), 4)
    assert [s.entry[1] for s in after] == [(0, 1), (0, 1, 2, 3)]
    assert [s.waited_after for s in after] == [1, 2]
    proof = prove_order(dict(enumerate((after, after, rest, rest))))
    assert proof.unknown_ops == ("order_test.mystery.default",)
    assert "these ops are unknown: order_test.mystery.default" in str(proof)
    for check in (offline, online):
        assert check([plain, plain, [], []]) is None
        words = ["rank 1 issues nothing more", "mystery", "an unknown op", "'layers.7'"]
        refused(after, plain, rest, rest, words=words, check=check)
        refused(plain, plain, [], rest, words=["mystery"], check=check)
    # at another place beside the same collectives
    refused(after, before, rest, rest, words=["in a cycle", "mystery", "all_reduce"])


def test_what_only_computes_is_known():
    fake_world(4)
    joint = captured_decoder()
    counted = [n for n in joint.graph.nodes if may_communicate(n)]
    assert counted == [c.node for c in collectives(joint)]
    assert len(issued_by(joint, 4)) == len(counted) > 4


@pytest.mark.parametrize(
    "op, args, communicates",
    [
        (torch.ops.prims.convert_element_type.default, (torch.float64,), False),
        (torch.sym_max, (3,), False),
        (torch.ops._dtensor.shard_dim_alltoall.default, (0, 1, "0"), True),
        (print, (), True),
    ],
)
def test_known_and_unknown_ops(op, args, communicates):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert may_communicate(graph.call_function(op, (x, *args))) is communicates
    assert not may_communicate(x)


def test_a_higher_order_op_is_known_by_what_it_runs(unknown_op):
    fake_world(2)
    inner = torch.fx.Graph()
    inner.output((inner.call_function(unknown_op, (inner.placeholder("x"),)),))

    def joint_with(target):
        b = Builder()
        x = b.input("x", 4)
        body = torch.fx.GraphModule(torch.nn.Module(), inner)
        b.call_higher_order(target, body, x, val=x)
        return b.joint(b.call(aten.sum.default, x))

    once = issued_by(joint_with(torch.ops.higher_order.wrap_with_set_grad_enabled), 2)
    assert [s.entry[0] for s in once] == ["order_test.mystery.default"]
    with pytest.raises(gt.VerificationError, match="within a subgraph"):
        issued_by(joint_with(torch.ops.higher_order.cond), 2)
