"""The collectives of a graph: order, sizes, groups, waits."""

import operator

import pytest
import torch

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import Role
from graph_trainer.testing import Builder
from tests.unit.graphs import BACKWARD, aten, c10d, captured_decoder


def collectives_of(joint):
    joint.groups = {"0": (0, 1), "1": (1, 0)}
    return collectives(joint)


def graph_of(*calls, dtype=torch.float32):
    b = Builder()
    x = b.input("x", 4, dtype=dtype)
    total = b.call(aten.sum.default, x)
    for op, *args in calls:
        total = b.call(aten.add.Tensor, total, b.total(b.waited(op, x, *args)))
    return b.joint(total)


ALL_REDUCE = (c10d.all_reduce.default, "sum", "0")
GATHER = (c10d.all_gather_into_tensor.default, 2, "0")
SCATTER = (c10d.reduce_scatter_tensor.default, "sum", 2, "0")


def test_every_collective_in_order_with_sizes_and_no_waits():
    found = collectives_of(graph_of(ALL_REDUCE, GATHER, SCATTER))
    assert [(c.kind, c.reduction, c.input_bytes, c.output_bytes) for c in found] == [
        ("all_reduce", "sum", 16, 16),
        ("all_gather_into_tensor", None, 16, 32),
        ("reduce_scatter_tensor", "sum", 16, 8),
    ]
    assert {c.ranks for c in found} == {(0, 1)}
    assert found[1].entry() == ("all_gather_into_tensor", (0, 1), (("torch.float32", 4),), "")
    for word in ("reduce_scatter_tensor(sum)", "4 x torch.float32", "[0, 1]", found[2].node.name):
        assert word in found[2].describe()


def test_an_out_buffer_is_not_sent():
    b = Builder()
    x, out = b.input("x", 4), b.input("out", 8)
    gathered = b.call(c10d.all_gather_into_tensor_out.default, x, 2, "0", out=out)
    waited = b.call(c10d.wait_tensor.default, gathered)
    (found,) = collectives_of(b.joint(b.call(aten.sum.default, waited)))
    assert (found.input_bytes, found.output_bytes) == (16, 32)


def test_a_coalesced_collective_sends_all_its_tensors():
    b = Builder()
    x, y = b.input("x", 4), b.input("y", 6)
    gathered = b.call(c10d.all_gather_into_tensor_coalesced.default, [x, y], 2, "0")
    part = b.call(operator.getitem, gathered, 1)
    joint = b.joint(b.call(aten.sum.default, b.call(c10d.wait_tensor.default, part)))
    (found,) = collectives_of(joint)
    assert (found.input_bytes, found.output_bytes, found.waited_after) == (40, 80, 1)


@pytest.mark.parametrize(
    "received, sent, rows", [([2, 2], [2, 2], 2), ([1, 3], [3, 1], 3), ([4, 1], [2, 2], 4)]
)
def test_an_all_to_all_has_a_largest_split(received, sent, rows):
    b = Builder()
    x = b.input("x", 4, 5)
    exchanged = b.waited(c10d.all_to_all_single.default, x, received, sent, "0")
    joint = b.joint(b.call(aten.sum.default, exchanged))
    assert [c.largest_split_bytes for c in collectives_of(joint)] == [rows * 5 * 4]
    assert [c.largest_split_bytes for c in collectives_of(graph_of(ALL_REDUCE, GATHER))] == [0, 0]


def test_the_source_of_a_broadcast_is_part_of_its_entry():
    entries = [
        collectives_of(graph_of((c10d.broadcast.default, source, "0")))[0].entry()
        for source in (0, 1)
    ]
    assert entries[0] != entries[1]


def test_communication_without_a_named_group_is_refused():
    b = Builder()
    x = b.input("x", 4)
    node = b.graph.call_function(torch.ops.c10d.allreduce_.default, ([x], None, None, None))
    node.meta.update(val=([x.meta["val"]], None), custom={"phase": "forward"})
    with pytest.raises(gt.VerificationError, match="functional collectives"):
        collectives_of(b.joint(b.call(aten.sum.default, x)))


def test_collectives_of_a_captured_step_have_role_phase_module_and_parameter():
    found = collectives(captured_decoder())
    unshards = [c for c in found if c.role is Role.UNSHARD]
    reductions = [c for c in found if c.role is Role.REDUCE_GRAD]
    names = [c.parameter for c in unshards]
    assert sorted(names) == sorted(c.parameter for c in reductions) and len(names) == 9
    assert all(c.phase is BACKWARD for c in reductions)
    by_parameter = {c.parameter: c for c in unshards}
    assert by_parameter["layers.1.up.weight"].module == "layers.1.up"
    assert by_parameter["layers.1.up.weight"].output_bytes == 16 * 8 * 4
    assert all(c.ranks == (0, 1, 2, 3) for c in found)


def test_where_waits_stand():
    def graph(early):
        b = Builder()
        x = b.input("x", 4)
        first = b.call(c10d.all_reduce.default, x, "sum", "0")
        if early:
            waited = b.call(c10d.wait_tensor.default, first)
        second = b.call(c10d.all_reduce.default, x, "max", "0")
        if not early:
            waited = b.call(c10d.wait_tensor.default, first)
        later = b.call(c10d.wait_tensor.default, second)
        total = b.call(aten.sum.default, b.call(aten.add.Tensor, waited, later))
        return collectives_of(b.joint(total))

    assert [c.waited_after for c in graph(True)] == [1, 2]
    assert [c.waited_after for c in graph(False)] == [2, 2]


# --- subgraphs of higher-order ops ----------------------------------------------------------


def with_subgraph(op):
    """One all-reduce before a higher-order op, one waited for within it."""
    b = Builder()
    x = b.input("x", 4)
    graph = torch.fx.Graph()
    inner = graph.placeholder("inner")
    inner.meta["val"] = x.meta["val"]
    issued = graph.call_function(c10d.all_reduce.default, (inner, "max", "1"))
    issued.meta["val"] = x.meta["val"]
    graph.output((graph.call_function(c10d.wait_tensor.default, (issued,)),))
    first = b.call(c10d.all_reduce.default, x, "sum", "0")
    body = torch.fx.GraphModule(torch.nn.Module(), graph)
    called = b.call_higher_order(op, body, "body", x, val=x)
    result = b.call(operator.getitem, called, 0)
    waited = b.call(c10d.wait_tensor.default, first)
    return b.joint(b.call(aten.sum.default, b.call(aten.add.Tensor, waited, result)))


def test_a_subgraph_that_runs_once_counts_where_it_runs():
    found = collectives_of(with_subgraph(torch.ops.higher_order.invoke_subgraph))
    assert [(c.reduction, c.ranks, c.waited_after) for c in found] == [
        ("sum", (0, 1), 2),
        ("max", (1, 0), 2),
    ]


def test_communication_that_depends_on_data_is_refused():
    joint = with_subgraph(torch.ops.higher_order.cond)
    with pytest.raises(gt.VerificationError, match=r"'cond'.*all_reduce.*no order"):
        collectives_of(joint)
