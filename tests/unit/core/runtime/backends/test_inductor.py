"""Inductor runs collectives in the graph's order, and its configuration is left as it was."""

import re

import pytest
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code

from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.graph.ops import collective_name, is_collective, is_wait
from graph_trainer.core.passes.overlap.schedule_overlap import schedule_overlap
from graph_trainer.core.runtime.backends.inductor import compile_graph
from graph_trainer.testing import Builder
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
    """Collectives, waits and products."""
    return [
        collective_name(n) if is_collective(n) else "wait_tensor" if is_wait(n) else "mm"
        for n in joint.graph.nodes
        if n.op == "call_function"
    ]


def order_in_code(code):
    found = re.findall(r"_c10d_functional\.(\w+)\.default\(|extern_kernels\.(mm)\(", code)
    return [one or other for one, other in found]


@pytest.mark.parametrize("scheduled", [False, True], ids=["in place", "scheduled"])
def test_collectives_run_in_the_order_of_the_graph(scheduled):
    joint = products()
    plain = order_in_graph(joint)
    if scheduled:
        # a product takes as long as a collective
        how = {"collective_seconds": 1e-5, "memory_bytes_per_second": 1e8}
        schedule_overlap(joint, *options(max_peak_growth=9.0, machine=how))
    wanted = order_in_graph(joint)
    assert (wanted != plain) == scheduled
    with inductor_config.patch(reorder_for_compute_comm_overlap=True, bucket_all_gathers_fx="all"):
        _, (code,) = run_and_get_code(lambda: compile_graph(joint))
        assert inductor_config.reorder_for_compute_comm_overlap, "as it was"
        assert inductor_config.bucket_all_gathers_fx == "all"
    assert order_in_code(code) == wanted
