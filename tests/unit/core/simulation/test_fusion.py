"""Which nodes become one kernel."""

import graphlib

import pytest
import torch
from hypothesis import HealthCheck, example, given

from graph_trainer.core.analysis.fusible import is_free, is_fusible
from graph_trainer.core.analysis.regions import find_regions
from graph_trainer.core.graph.joint_graph import compute_nodes
from graph_trainer.core.simulation import fusion
from graph_trainer.core.simulation.fusion import fuse, fuse_in_regions, read_until
from graph_trainer.testing import Builder
from tests.examples import examples
from tests.unit.core.simulation.machines import random_graph, steps
from tests.unit.graphs import ALL_REDUCE, BACKWARD, FORWARD, aten, c10d, captured_decoder


def chain(b, x, *ops):
    nodes = []
    for op in ops:
        nodes.append(b.call(op, nodes[-1] if nodes else x))
    return nodes


def matmul(b, x):
    return b.call(aten.mm.default, x, x)


def groups_of(found, nodes):
    return [found.group.get(node) for node in nodes]


def test_a_chain_is_one_kernel_and_its_intermediate_results_are_not_allocated():
    b = Builder()
    nodes = chain(b, b.input("x", 4, 4), aten.relu.default, aten.t.default, aten.exp.default,
                  aten.neg.default)  # fmt: skip
    found = fuse(b.joint(b.call(aten.sum.default, matmul(b, nodes[-1]))))
    relu, view, exp, neg = nodes
    assert len({found.group[relu], found.group[exp], found.group[neg]}) == 1
    assert view not in found.group
    assert {(relu, 0), (exp, 0)} <= found.kept_inside and (neg, 0) not in found.kept_inside


@pytest.mark.parametrize(("tensors", "device", "kept"), [
    (2, "cpu", False), (8, "cuda", True), (9, "cuda", False)
])  # fmt: skip
def test_a_concatenation_that_is_a_kernel_of_its_own_is_allocated(tensors, device, kept):
    b = Builder()
    x = b.input("x", 4, 4)
    with b.mode:
        x.meta["val"] = torch.empty(4, 4, device=device)
    joined = b.call(aten.cat.default, [b.call(aten.exp.default, x) for _ in range(tensors)])
    found = fuse(b.joint(b.call(aten.sum.default, b.call(aten.neg.default, joined))))
    assert ((joined, 0) in found.kept_inside) == kept


@pytest.mark.parametrize(("dtype", "coexist"), [(torch.float32, False), (torch.float64, True)])
def test_what_a_kernel_reads_is_there_while_it_writes_unless_its_result_takes_the_place(
    dtype, coexist
):
    b = Builder()
    read = matmul(b, b.input("x", 4, 4))
    written = b.call(aten._to_copy.default, b.call(aten.exp.default, read), dtype=dtype)
    joint = b.joint(b.call(aten.sum.default, matmul(b, written)))
    place = list(joint.graph.nodes).index(written)
    assert read_until(joint, fuse(joint)) == ({(read, 0): place} if coexist else {})


def test_what_leaves_the_group_is_allocated():
    b = Builder()
    w = b.parameter("w", 4, 4)
    sent, kept, returned = chain(b, w, aten.relu.default, aten.exp.default, aten.neg.default)
    total = b.call(aten.add.Tensor, b.call(aten.add.Tensor, sent, kept), returned)
    b.call(c10d.all_reduce.default, sent, "sum", "0")
    found = fuse(b.joint(b.call(aten.sum.default, total), w=returned))
    assert len(set(groups_of(found, [sent, kept, returned]))) == 1
    assert (kept, 0) in found.kept_inside
    assert not {(sent, 0), (returned, 0)} & found.kept_inside


def test_branches_that_meet_are_one_kernel():
    b = Builder()
    x, y = b.input("x", 4, 4), b.input("y", 4, 4)
    left, right = b.call(aten.relu.default, x), b.call(aten.exp.default, y)
    both = b.call(aten.add.Tensor, left, right)
    found = fuse(b.joint(b.call(aten.sum.default, matmul(b, both))))
    assert len(set(groups_of(found, [left, right, both]))) == 1
    assert found.kept_inside >= {(left, 0), (right, 0)}


def test_nothing_is_fused_across_a_matmul_or_a_collective():
    b = Builder()
    before = b.call(aten.relu.default, b.input("x", 4, 4))
    through = matmul(b, before)
    after = b.call(aten.add.Tensor, before, through)
    waited = b.call(c10d.wait_tensor.default, b.call(c10d.all_reduce.default, after, "sum", "0"))
    last = b.call(aten.mul.Tensor, waited, after)
    found = fuse(b.joint(b.call(aten.sum.default, matmul(b, last))))
    assert len(set(groups_of(found, [before, after, last]))) == 3
    assert through not in found.group and waited not in found.group
    assert not {(before, 0), (after, 0), (through, 0)} & found.kept_inside


def test_phases_and_far_nodes_are_apart(monkeypatch):
    b = Builder()
    first = b.call(aten.relu.default, b.input("x", 4, 4), phase=FORWARD)
    near = b.call(aten.exp.default, first, phase=FORWARD)
    other_phase = b.call(aten.neg.default, near, phase=BACKWARD)
    joint = b.joint(b.call(aten.sum.default, other_phase, phase=BACKWARD))
    found = fuse(joint)
    assert found.group[first] == found.group[near] != found.group[other_phase]
    monkeypatch.setattr(fusion, "_REACH", 0)
    found = fuse(joint)
    assert len(set(groups_of(found, [first, near, other_phase]))) == 3


def test_only_what_the_compiler_sees():
    joint = captured_decoder()
    assert fuse(joint).group and not fuse(joint, lambda node: False).group


def test_random_numbers_and_views_are_no_part_of_a_kernel():
    b = Builder()
    x = b.input("x", 4, 4)
    drawn = b.call(aten.rrelu.default, x, 0.1, 0.3, True)  # pointwise but for that
    view = b.call(aten.t.default, x)
    assert not is_fusible(drawn) and not is_fusible(view) and is_free(view) and not is_free(drawn)
    cast = b.call(aten._to_copy.default, x, dtype=torch.bfloat16)
    assert is_fusible(cast) and not is_fusible(matmul(b, x))


ZIGZAG = [  # two branches that read each other's nodes in turn
    ("relu", 0, 0, FORWARD),
    ("relu", 1, 0, FORWARD),
    ("add", 2, 3, FORWARD),
    ("add", 3, 4, FORWARD),
]
THERE_AND_BACK = [  # a node of another phase between two of one
    ("relu", 0, 0, FORWARD),
    ("relu", 2, 0, BACKWARD),
    ("add", 2, 3, FORWARD),
]


def inputs_through_views(joint):
    """For every node what it reads, through views, which are part of the kernels that read them."""
    found = {}
    for node in joint.graph.nodes:
        inputs = node.all_input_nodes
        found[node] = {s for n in inputs for s in (found[n] if is_view(n) else [n])}
    return found


def is_view(node):
    return node.op == "call_function" and is_free(node)


@examples(50, suppress_health_check=list(HealthCheck))
@example(program=ZIGZAG)
@example(program=THERE_AND_BACK)
@given(program=steps)
def test_kernels_never_wait_for_each_other(program):
    joint = random_graph(program)
    group, inputs = fuse(joint).group, inputs_through_views(joint)
    kernels = graphlib.TopologicalSorter()
    for node in joint.graph.nodes:
        kernel = group.get(node, node)
        kernels.add(kernel, *({group.get(n, n) for n in inputs[node]} - {kernel}))
    assert len(list(kernels.static_order())) >= 1  # raises CycleError


@examples(25, suppress_health_check=list(HealthCheck))
@given(program=steps)
def test_only_its_kernel_reads_a_storage_that_is_not_allocated(program):
    joint = random_graph(program)
    found = fuse(joint)
    for node, sources in inputs_through_views(joint).items():
        for source in () if is_free(node) else sources:
            if (source, 0) in found.kept_inside:
                assert found.group[source] == found.group[node]
    assert set(found.group) == {n for n in compute_nodes(joint.graph) if is_fusible(n)}


def test_a_reduction_of_a_number_is_fused_like_any_other():
    builder = Builder()
    x = builder.input("x")
    total = builder.call(aten.sum.dim_IntList, builder.call(aten.neg.default, x), [0])
    joint = builder.joint(total)
    assert len(set(fuse(joint).group.values())) == 1


def test_no_region_is_fused_with_another():
    """What is made before a collective and read behind it is stored, unlike in a whole program."""
    b = Builder()
    x = b.input("x", 4, 4)
    inner = b.call(aten.sin.default, x)
    crosses = b.call(aten.cos.default, inner)
    b.waited(ALL_REDUCE, x, "sum", "0")
    last = b.call(aten.neg.default, b.call(aten.exp.default, crosses))
    joint = b.joint(b.total(last))
    assert {(inner, 0), (crosses, 0)} <= fuse(joint).kept_inside
    found = fuse_in_regions(joint)
    assert (inner, 0) in found.kept_inside and (crosses, 0) not in found.kept_inside


@examples(25, suppress_health_check=list(HealthCheck))
@given(program=steps)
def test_regions_store_all_that_leaves_them(program):
    joint = random_graph(program)
    regions, kept = find_regions(joint.graph), fuse_in_regions(joint).kept_inside
    assert kept.isdisjoint({(node, 0) for region in regions for node in region.outputs})
