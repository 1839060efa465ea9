"""Every backend starts copies and waits for them in the graph's order, and gives the same bits."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from graph_trainer.core.analysis.regions import find_regions
from graph_trainer.core.graph.annotations import set_offload
from graph_trainer.core.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPY, is_host_copy
from graph_trainer.core.passes.offload_activations import (
    OffloadActivationsOptions,
    offload_activations,
)
from graph_trainer.core.runtime.backends import eager, inductor
from graph_trainer.core.runtime.backends.regional.regional import compile_graph as compile_regions
from graph_trainer.core.torch_private import TorchDispatchMode
from graph_trainer.testing import Builder, assert_same
from tests.unit.core.runtime.backends.test_regional import as_it_stands
from tests.unit.graphs import BACKWARD, LOSS, aten

OURS = "graph_trainer::"


def products(blocks=4):
    """Products alone: no kernel to compile, and nothing whose order of sums Inductor changes."""
    b = Builder()
    w, value, made = b.parameter("w", 16, 16), b.input("x", 16, 16), []
    for i in range(blocks):
        value = b.call(aten.mm.default, value, w, module=f"layers.{i}")
        made.append(value)
    loss = b.call(aten.mm.default, value, w, phase=LOSS)
    grad = b.call(aten.mm.default, value, w, phase=BACKWARD)
    for i in reversed(range(blocks)):
        how = {"phase": BACKWARD, "module": f"layers.{i}"}
        grad = b.call(aten.mm.default, grad, b.call(aten.t.default, made[i], **how), **how)
        grad = b.call(aten.mm.default, grad, made[i], **how)
    for node in made:
        set_offload(node)
    joint = b.joint(loss, w=grad)
    before = eager.compile_graph(joint)(values())
    offload_activations(joint, OffloadActivationsOptions(min_bytes=0))
    assert sum(n.target is OFFLOAD for n in joint.graph.nodes) >= 2
    return joint, before


def values():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 16, generator=generator) / 4 for _ in range(2)]


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name
        if name.startswith(OURS) or name == "aten::mm":
            self.ops.append(name.rstrip("_"))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "compile_graph",
    [eager.compile_graph, inductor.compile_graph, lambda j: compile_regions(j, as_it_stands)],
    ids=["eager", "inductor", "regional"],
)
def test_copies_run_in_the_order_of_the_graph(compile_graph):
    joint, before = products()
    run = compile_graph(joint)
    assert_same(before, run(values()))
    with Called() as called:
        run(values())
    ours = (OFFLOAD, RELOAD, WAIT_COPY, aten.mm.default)
    wanted = [n.target._schema.name for n in joint.graph.nodes if n.target in ours]
    assert called.ops == wanted


def test_inductor_waits_in_place_and_keeps_what_is_copied_until_the_wait():
    joint, before = products()
    found, (code, *_) = run_and_get_code(lambda: inductor.compile_graph(joint)(values()))
    assert_same(before, found)
    waits = re.findall(r"wait_copy_\.default\((\w+), (\w+)\)", code)
    assert len(waits) == sum(n.target is WAIT_COPY for n in joint.graph.nodes)
    assert "wait_copy.default(" not in code
    for copy, source in waits:
        body = code[code.index("def call(") :]
        wait = body.index(f"wait_copy_.default({copy}, {source})")
        # neither is freed, nor its memory used for something else, before
        for name in (copy, source):
            assert not re.search(rf"= {name}; del|del {name}\b", body[:wait])


def test_inductors_table_of_ops_is_left_as_it_was():
    from torch._inductor.lowering import lowerings

    joint, _ = products()
    inductor.compile_graph(joint)
    assert WAIT_COPY not in lowerings


def test_no_region_has_a_copy_and_one_reads_what_came_back():
    b = Builder()
    value, made = b.input("x", 4, 4), []
    for i in range(3):
        for op in (aten.tanh, aten.relu, aten.sin):
            value = b.call(op.default, value, module=f"layers.{i}")
        made.append(value)
    grad = b.call(aten.neg.default, value, phase=BACKWARD)
    for i in reversed(range(3)):
        how = {"phase": BACKWARD, "module": f"layers.{i}"}
        for op in (aten.t, aten.neg, aten.cos):
            grad = b.call(op.default, grad, **how)
        grad = b.call(aten.mul.Tensor, b.call(aten.t.default, made[i], **how), grad, **how)
        grad = b.call(aten.sin.default, grad, **how)
    set_offload(made[0])
    joint = b.joint(b.total(grad, phase=BACKWARD))
    offload_activations(joint, OffloadActivationsOptions(min_bytes=0))
    regions = find_regions(joint.graph)
    assert len(regions) >= 6
    inside = [n for region in regions for n in (*region.nodes, *region.after)]
    copies = [n for n in joint.graph.nodes if is_host_copy(n)]
    assert len(copies) == 4 and not set(copies).intersection(inside)
    (view,) = copies[-1].users
    assert any(view in region.inputs for region in regions)
    x = torch.randn(4, 4)
    assert_same(eager.compile_graph(joint)([x]), compile_regions(joint, as_it_stands)([x]))
