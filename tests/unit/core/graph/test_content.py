"""Facts of a graph are remembered until it changes, in whichever way."""

import pytest
import torch
from torch import fx, nn

from graph_trainer.core.analysis import lifetimes
from graph_trainer.core.analysis.fusible import free_nodes, fusible_nodes
from graph_trainer.core.graph.annotations import tensor_of
from graph_trainer.core.graph.content import content_of, is_same, once_per_graph
from graph_trainer.core.graph.data_sizes import data_sizes_of
from graph_trainer.core.graph.ops import storage_roots, value_storages
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.graph.writes import Writes, access_order, writes_of
from tests.unit.graphs import captured
from tests.unit.planner.test_expert_parallel import fake_rank

aten = torch.ops.aten


FACTS = (
    *(value_storages, storage_roots, writes_of, access_order, free_nodes, fusible_nodes),
    *(lifetimes._uses, lifetimes._sizes),
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


def change_output(graph):
    (output,) = graph.find_nodes(op="output")
    output.args = (next(iter(graph.nodes)),)


CHANGES = (
    *(insert, erase, move, change_kind, change_target, change_argument, update_argument),
    *(change_keyword, replace_input, replace_uses, change_value, change_output),
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


def test_a_copy_has_no_facts_of_its_original():
    original = joint()
    roots = storage_roots(original.graph)
    copied = copy_graph(original).graph
    change_argument(copied)
    assert storage_roots(copied).keys() == set(copied.nodes)
    assert storage_roots(original.graph) is roots
