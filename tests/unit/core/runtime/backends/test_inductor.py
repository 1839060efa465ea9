"""Inductor runs collectives in the graph's order, and its configuration is left as it was."""

import re

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import graph_trainer as gt
from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.graph.ops import collective_name, is_collective, is_wait
from graph_trainer.core.passes.overlap.schedule_overlap import schedule_overlap
from graph_trainer.core.runtime.backends.inductor import compile_graph
from graph_trainer.core.simulation.hardware import load_hardware
from graph_trainer.testing import Builder, become
from tests.unit.core.passes.overlap.schedule_graphs import FSDP, make_groups, options
from tests.unit.graphs import BACKWARD, aten, c10d

LAYERS = 3


def products():
    """Matrix products with gathered parameters and reduced gradients: no kernel to compile."""
    group = make_groups()[FSDP]
    b = Builder()
    shards = {f"p{i}": b.parameter(f"p{i}", 8, 16) for i in range(LAYERS)}
    value = b.input("x", 16, 16)

    def waited(op, *args, **how):
        return b.call(c10d.wait_tensor.default, b.call(op, *args, group, **how), **how)

    for name, shard in shards.items():
        how = {"role": Role.UNSHARD, "parameter": name}
        full = waited(c10d.all_gather_into_tensor.default, shard, 2, **how)
        value = b.call(aten.mm.default, value, full)
    grads = {}
    for name in reversed(shards):
        how = {"role": Role.REDUCE_GRAD, "parameter": name, "phase": BACKWARD}
        grad = b.call(aten.mm.default, value, value, phase=BACKWARD)
        grads[name] = waited(c10d.reduce_scatter_tensor.default, grad, "sum", 2, **how)
        value = b.call(aten.mm.default, value, value, phase=BACKWARD)
    return b.joint(value, **grads)


def order_in_graph(joint):
    """Collectives, waits, products and attention."""
    found = []
    for node in joint.graph.nodes:
        if is_collective(node):
            found.append(collective_name(node))
        elif is_wait(node):
            found.append("wait_tensor")
        elif node.target is aten.mm.default:
            found.append("mm")
        elif "scaled_dot_product" in str(node.target) and node.op == "call_function":
            found.append("attention")
    return found


def order_in_code(code):
    collective, product = r"_c10d_functional\.(\w+)\.default\(", r"extern_kernels\.(mm)\("
    attention = r"aten\._scaled_dot_product_\w*?(attention)\w*\.default\("
    found = re.findall(f"{collective}|{product}|{attention}", code)
    return [a or b or c for a, b, c in found]


@pytest.fixture
def code_of(monkeypatch):
    """The program that Inductor writes for a graph, which no C++ compiler sees."""
    from torch._inductor.graph import GraphLowering

    class Written(Exception):
        pass

    def write(self):
        raise Written(self.codegen()[0].value)

    def code_of(joint):
        with monkeypatch.context() as patch, pytest.raises(Exception) as raised:
            patch.setattr(GraphLowering, "compile_to_module", write)
            compile_graph(joint)
        return str(raised.value)

    return code_of


@pytest.mark.full
def test_the_debug_models_starts_waits_products_and_attention_keep_their_order(code_of):
    """Fusion would start what reads a gather with what is before it, and so wait for it earlier."""
    from graph_trainer.titan.device import setup

    setup()
    from graph_trainer.llama3.config_registry import llama3_debugmodel

    become(0, 4)
    spec = llama3_debugmodel().model_spec
    del spec.model.layers[2:]
    model = spec.model.build()
    gt.simple_fsdp(model, init_device_mesh("cpu", (4,)))
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    loss = lambda m, x: torch.nn.functional.cross_entropy(m(x).flatten(0, 1), x.flatten())  # noqa: E731
    joint = gt.capture(model, loss, (tokens,))
    config = gt.PassConfig(reshard_after_forward="always", hardware=load_hardware("cpu"))
    gt.run_passes(joint, config)
    wanted = order_in_graph(joint)
    assert {"mm", "attention", "reduce_scatter_tensor"} < set(wanted)
    assert order_in_code(code_of(joint)) == wanted


@pytest.mark.parametrize("scheduled", [False, True], ids=["in place", "scheduled"])
def test_collectives_run_in_the_order_of_the_graph(scheduled):
    joint = products()
    plain = order_in_graph(joint)
    if scheduled:
        # a product takes as long as a collective
        how = {"base_seconds": 1e-5, "memory_bytes_per_second": 1e8}
        schedule_overlap(joint, *options(machine=how))
    wanted = order_in_graph(joint)
    assert (wanted != plain) == scheduled
    with inductor_config.patch(reorder_for_compute_comm_overlap=True, bucket_all_gathers_fx="all"):
        _, (code,) = run_and_get_code(lambda: compile_graph(joint))
        assert inductor_config.reorder_for_compute_comm_overlap, "as it was"
        assert inductor_config.bucket_all_gathers_fx == "all"
    assert order_in_code(code) == wanted
