"""A copy of a graph restores what a pass did, attributes of the module included."""

import operator

import pytest
import torch
from torch import fx, nn

from graph_trainer.core.graph.ops import subgraph_of
from graph_trainer.core.graph.snapshot import copy_graph, restore_graph
from graph_trainer.testing import Builder, assert_same, run, values_for

aten = torch.ops.aten


def with_attributes():
    """relu(x) * const * scales.factor, negated by a subgraph."""
    b = Builder()
    inner = fx.Graph()
    x = b.call(aten.relu.default, b.input("x", 8))
    value = inner.placeholder("value")
    inner.output((inner.call_function(aten.neg.default, (value,)),))
    body = b.call_higher_order(called, fx.GraphModule(nn.Module(), inner), x, val=x)
    result = b.call(operator.getitem, body, 0)
    b.root.register_buffer("const", torch.ones(8))
    b.root.scales = nn.Module()
    b.root.scales.register_buffer("factor", torch.full((8,), 0.5))
    for name in ("const", "scales.factor"):
        constant = b.graph.get_attr(name)
        constant.meta["val"] = x.meta["val"]
        result = b.call(aten.mul.Tensor, result, constant)
    return b.joint(b.call(aten.sum.default, result))


def called(module, *args):
    """A higher-order op, as far as fx can tell."""
    return module(*args)


def replaced(module):
    module.const = torch.full((8,), 10.0)
    module.scales = nn.Module()
    module.scales.register_buffer("factor", torch.zeros(8))


def replaced_inside(module):
    module.scales.factor = torch.zeros(8)


def deleted(module):
    del module.const, module.scales


def another_body(module):
    graph = fx.Graph()
    value = graph.placeholder("value")
    graph.output((graph.call_function(aten.exp.default, (value,)),))
    module.body = fx.GraphModule(nn.Module(), graph)


def added(module):
    module.register_buffer("extra", torch.ones(8))


@pytest.mark.parametrize("change", [replaced, replaced_inside, deleted, another_body, added])
def test_what_a_pass_did_to_attributes_is_restored(change):
    joint = with_attributes()
    joint.graph_module.meta["set by"] = "the caller"
    before, text = run(joint), str(joint)
    copy = copy_graph(joint)
    change(joint.graph_module)
    restore_graph(joint, copy)
    assert_same(before, run(joint))
    assert str(joint) == text and not hasattr(joint.graph_module, "extra")
    assert joint.graph_module.meta["set by"] == "the caller"
    assert all(subgraph_of(n) is not None for n in joint.graph.nodes if n.target == "body")
    # and so in the code that backends compile
    assert_same(before[:1], [o.clone() for o in joint.graph_module(*values_for(joint))])
