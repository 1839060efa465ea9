"""Facts of a graph are remembered until it changes, in whichever way."""

import pytest
import torch
from torch import fx, nn

from graph_trainer.core.analysis import lifetimes
from graph_trainer.core.analysis.fusible import free_nodes, fusible_nodes
from graph_trainer.core.graph.annotations import tensor_of
from graph_trainer.core.graph.content import (
    content_of,
    is_same,
    once_per_graph,
    once_per_node,
    unchanging,
)
from graph_trainer.core.graph.data_sizes import data_sizes_of
from graph_trainer.core.graph.ops import (
    collective_kinds,
    once_nodes,
    storage_roots,
    value_storages,
    written_by_node,
)
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.graph.writes import Writes, access_order, writes_of
from graph_trainer.core.simulation import matmul_costs, op_costs
from tests.unit.graphs import captured
from tests.unit.planner.test_expert_parallel import fake_rank

aten = torch.ops.aten


FACTS = (
    *(value_storages, storage_roots, writes_of, access_order, lifetimes._uses, lifetimes._sizes),
    *(lifetimes._plain_lifetimes, lifetimes._stored_bytes, free_nodes, fusible_nodes),
    *(written_by_node, collective_kinds, once_nodes, op_costs._sizes, op_costs._flops_by_node),
    matmul_costs.products_of,
)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return (self.linear(self.linear(x).relu()).sin() * self.calls).sum()


def joint():
    return captured(Twice(), torch.randn(2, 3))


def node_of(graph, target):
    return next(iter(graph.find_nodes(op="call_function", target=target)))


def insert(graph):
    sine = node_of(graph, aten.sin.default)
    with graph.inserting_after(sine):
        graph.call_function(aten.neg.default, (sine,)).meta["val"] = sine.meta["val"]


def erase(graph):
    (unused,) = (n for n in graph.nodes if n.name == "unused")
    graph.erase_node(unused)


def move(graph):
    first, second, *_ = (n for n in graph.nodes if n.op == "placeholder")
    second.append(first)


def change_target(graph):
    node_of(graph, aten.sin.default).target = aten.alias.default


def change_kind(graph):
    node_of(graph, aten.sin.default).op = "call_method"


def change_argument(graph):
    sine = node_of(graph, aten.sin.default)
    sine.args = (sine.args[0].args[0],)


def update_argument(graph):
    sine = node_of(graph, aten.sin.default)
    sine.update_arg(0, next(iter(graph.nodes)))


def change_keyword(graph):
    sine = node_of(graph, aten.sin.default)
    sine.kwargs = {"out": None}


def replace_input(graph):
    sine = node_of(graph, aten.sin.default)
    sine.replace_input_with(sine.args[0], next(iter(graph.nodes)))


def replace_uses(graph):
    sine = node_of(graph, aten.sin.default)
    sine.replace_all_uses_with(sine.args[0], propagate_meta=False)


def change_value(graph):
    sine = node_of(graph, aten.sin.default)
    sine.meta["val"] = sine.meta["val"].clone()


def change_size(graph):
    """Of a node's value: what its readers read changes."""
    node_of(graph, aten.sin.default).meta["val"] = torch.empty(5, 3)


def change_output(graph):
    (output,) = graph.find_nodes(op="output")
    output.args = (next(iter(graph.nodes)),)


CHANGES = (
    *(insert, erase, move, change_kind, change_target, change_argument, update_argument),
    *(change_keyword, replace_input, replace_uses, change_value, change_size, change_output),
)


def prepared():
    """A graph with a node that nothing reads."""
    graph = joint().graph
    sine = node_of(graph, aten.sin.default)
    with graph.inserting_after(sine):
        unused = graph.create_node("call_function", aten.neg.default, (sine,), name="unused")
    unused.meta["val"] = sine.meta["val"]
    return graph


@pytest.mark.parametrize("change", CHANGES)
def test_every_way_to_change_a_graph_is_seen(change):
    calls = []

    @once_per_graph
    def names(graph):
        calls.append(graph)
        return [str(n) for n in graph.nodes]

    graph = prepared()
    assert names(graph) is names(graph) and len(calls) == 1
    change(graph)
    assert names(graph) == [str(n) for n in graph.nodes]
    assert len(calls) == 2


def shown(fact):
    """A fact as text, in which equal nodes of two graphs are equal."""
    if isinstance(fact, Writes):
        return str(fact.writers)
    return str(sorted(map(str, fact)) if isinstance(fact, frozenset) else fact)


@pytest.mark.parametrize("change", CHANGES)
def test_facts_are_those_of_a_graph_that_was_never_asked_before(change):
    asked, fresh = prepared(), prepared()
    before = [shown(fact(asked)) for fact in FACTS]
    for graph in (asked, fresh):
        change(graph)
    after = [shown(fact(asked)) for fact in FACTS]
    assert after == [shown(fact(fresh)) for fact in FACTS]
    assert after != before or change in (change_keyword, change_value)


def test_a_fact_that_another_one_asks_for_is_remembered():
    calls = []

    @once_per_graph
    def inner(graph):
        calls.append(graph)
        return len(graph.nodes)

    @once_per_graph
    def outer(graph):
        return inner(graph) + 1

    graph = prepared()
    assert outer(graph) == inner(graph) + 1 == outer(graph)
    assert len(calls) == 1
    insert(graph)
    assert outer(graph) == inner(graph) + 1
    assert len(calls) == 2


def test_sizes_that_are_expected_are_part_of_the_content():
    joint = fake_rank("--parallelism.expert_parallel_degree", "2").capture()
    sizes = data_sizes_of(tensor_of(joint.placeholders()[0]))
    even = sum(lifetimes._sizes(joint.graph).values())
    with sizes.assuming(2.0):
        assert sum(lifetimes._sizes(joint.graph).values()) > even
    assert sum(lifetimes._sizes(joint.graph).values()) == even


def test_a_change_inside_a_graph_that_an_op_runs_is_seen():
    body = fx.Graph()
    body.output(body.call_function(aten.sin.default, (body.placeholder("x"),)))
    graph = fx.Graph()
    graph.output(graph.create_node("get_attr", "body"))
    outer = fx.GraphModule({"body": fx.GraphModule({}, body)}, graph)
    before = content_of(outer.graph)
    assert is_same(before, content_of(outer.graph))
    node_of(outer.body.graph, aten.sin.default).target = aten.cos.default
    assert not is_same(before, content_of(outer.graph))


def test_a_fact_of_a_node_is_made_again_for_what_changed_and_its_readers():
    calls = []

    @once_per_node
    def inputs(node):
        calls.append(node.name)
        return [str(tensor_of(n).shape) for n in node.all_input_nodes if "val" in n.meta]

    graph = prepared()
    assert list(inputs(graph)) == list(graph.nodes)
    sine = node_of(graph, aten.sin.default)
    calls.clear()
    move(graph)
    assert list(inputs(graph)) == list(graph.nodes) and calls == []
    change_size(graph)
    read = {n.name for n in sine.users if "torch.Size([5, 3])" in inputs(graph)[n]}
    assert read == {n.name for n in sine.users}
    assert sorted(calls) == sorted(["sin", *read])
    calls.clear()
    insert(graph)
    assert inputs(graph)[sine.next] == [str(tensor_of(sine).shape)] and calls == [sine.next.name]


def test_facts_of_a_copy_are_of_its_nodes_and_change_alone():
    original, fresh = joint(), joint().graph
    before = [shown(fact(original.graph)) for fact in FACTS]
    copied = copy_graph(original).graph
    assert [shown(fact(copied)) for fact in FACTS] == before
    of_copy = {n for written in written_by_node(copied).values() for n in written}
    assert of_copy and of_copy <= set(copied.nodes)
    for graph in (copied, fresh):
        change_argument(graph)
    assert [shown(fact(copied)) for fact in FACTS] == [shown(fact(fresh)) for fact in FACTS]
    assert [shown(fact(original.graph)) for fact in FACTS] == before


def test_a_write_inside_a_graph_that_an_op_runs_is_a_write_of_the_op():
    body = fx.Graph()
    body.output(body.call_function(aten.sin.default, (body.placeholder("x"),)))
    graph = fx.Graph()
    read, given = graph.create_node("get_attr", "body"), graph.placeholder("x")
    called = graph.call_function(torch.ops.higher_order.invoke_subgraph, (read, "name", given))
    graph.output(called)
    outer = fx.GraphModule({"body": fx.GraphModule({}, body)}, graph)
    called = node_of(outer.graph, torch.ops.higher_order.invoke_subgraph)
    assert written_by_node(outer.graph)[called] == []
    node_of(outer.body.graph, aten.sin.default).target = aten.sin_.default
    assert [n.name for n in written_by_node(outer.graph)[called]] == ["x"]


def test_a_graph_is_compared_once_where_it_cannot_change():
    graph = prepared()
    with unchanging(graph):
        roots = storage_roots(graph)
        with unchanging(graph):
            pass
        insert(graph)  # which is not allowed: to show that no fact looks for it
        assert storage_roots(graph) is roots
    assert storage_roots(graph).keys() == set(graph.nodes)


def test_a_copy_has_no_facts_of_its_original():
    original = joint()
    roots = storage_roots(original.graph)
    copied = copy_graph(original).graph
    change_argument(copied)
    assert storage_roots(copied).keys() == set(copied.nodes)
    assert storage_roots(original.graph) is roots
