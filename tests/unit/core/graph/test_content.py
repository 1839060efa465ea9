"""Facts of a graph are remembered until it changes, in whichever way."""

import pytest
import torch
from torch import fx, nn

from graph_trainer.core.graph.content import content_of, is_same, once_per_graph
from graph_trainer.core.graph.ops import storage_roots, value_storages
from graph_trainer.core.graph.writes import access_order
from tests.unit.graphs import captured

aten = torch.ops.aten


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(self.linear(x).relu()).sin().sum()


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
    node_of(graph, aten.sin.default).target = aten.cos.default


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


def change_output(graph):
    (output,) = graph.find_nodes(op="output")
    output.args = (next(iter(graph.nodes)),)


CHANGES = (
    *(insert, erase, move, change_target, change_argument, update_argument, change_keyword),
    *(replace_input, replace_uses, change_value, change_output),
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


@pytest.mark.parametrize("change", CHANGES)
def test_facts_are_those_of_a_graph_that_was_never_asked_before(change):
    asked, fresh = prepared(), prepared()
    facts = (value_storages, storage_roots, access_order)
    for fact in facts:
        fact(asked)
    for graph in (asked, fresh):
        change(graph)
    for fact in facts:
        assert str(fact(asked)) == str(fact(fresh))


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


def test_a_copy_has_no_facts_of_its_original():
    original = joint()
    roots = storage_roots(original.graph)
    copied = fx.Graph()
    copied.graph_copy(original.graph, {})
    assert storage_roots(copied).keys().isdisjoint(roots)
