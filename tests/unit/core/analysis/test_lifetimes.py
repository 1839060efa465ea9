"""Predicted memory against what a run of the generated code really allocates and frees."""

import operator

import pytest
import torch
from torch import nn

import graph_trainer as gt
from graph_trainer.core.analysis.lifetimes import SCRATCH, lifetimes
from graph_trainer.core.graph.data_sizes import storage_bytes
from graph_trainer.core.simulation.collective_costs import scratch_bytes
from graph_trainer.testing import Builder
from tests.unit.core.analysis.run_and_count import measured, predicted
from tests.unit.graphs import aten, c10d, fake_world


def test_a_result_of_none_keeps_its_index():
    """The gradients of a convolution: no input gradient, so the first result is None."""
    b = Builder()
    x, w, g = b.input("x", 1, 2, 4), b.input("w", 2, 2, 1), b.input("g", 1, 2, 4)
    parts = b.call(
        aten.convolution_backward.default,
        *(g, x, w, [2], [1], [0], [1], False, [0], 1, [False, True, True]),
    )
    weight, bias = b.call(operator.getitem, parts, 1), b.call(operator.getitem, parts, 2)
    doubled = b.call(aten.mul.Tensor, weight, 2)
    total = b.call(
        aten.add.Tensor, b.call(aten.sum.default, bias), b.call(aten.sum.default, doubled)
    )
    found = lifetimes(b.joint(total))
    assert found.size[(parts, 1)] == 2 * 2 * 4 and found.size[(parts, 2)] == 2 * 4
    assert (parts, 0) not in found.size
    order = list(b.graph.nodes)
    assert found.last_use[(parts, 1)] == order.index(doubled)


def test_an_empty_graph_has_no_peak():
    b = Builder()
    x = b.input("x")
    assert lifetimes(b.joint(x)).peak_bytes == 0


@pytest.mark.parametrize(
    "tensor, size",
    [
        (torch.empty(3, 4), 48),
        (torch.empty(4).expand(3, 4), 16),
        (torch.empty(3, 4)[:, ::2], 44),
        (torch.empty(0, 4), 0),
        (torch.empty((), dtype=torch.float64), 8),
    ],
)
def test_storage_bytes(tensor, size):
    assert storage_bytes(tensor) == size


def test_a_captured_step_allocates_what_is_predicted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    joint = gt.capture(model, lambda m, x: m(x).square().mean(), [torch.randn(3, 4)])
    for passes in (["normalize_views"], ["eliminate_dead_code"]):
        gt.run_passes(joint, gt.PassConfig(passes=passes))
        assert predicted(joint) == measured(joint)


# --- scratch memory of a backend -----------------------------------------------------------


def test_collectives_on_cpu_allocate_what_the_table_says():
    """In bytes; measured on real ranks by tests/integration/test_predicted_memory.py."""
    fake_world(2)
    b = Builder()
    x, y = b.input("x", 8), b.input("y", 4)
    out = b.call(aten.empty.memory_format, [16])
    expected = {
        b.call(c10d.all_gather_into_tensor.default, x, 2, "0"): 2 * 32,
        b.call(c10d.all_gather_into_tensor_out.default, x, 2, "0", out=out): 2 * 32,
        b.call(c10d.all_gather_into_tensor_coalesced.default, [x, y], 2, "0"): 2 * (32 + 16),
        b.call(c10d.reduce_scatter_tensor.default, x, "sum", 2, "0"): 32,
        b.call(c10d.reduce_scatter_tensor_coalesced.default, [x, y], "sum", 2, "0"): 32 + 16,
        b.call(c10d.all_reduce.default, x, "sum", "0"): 32,
        b.call(c10d.all_reduce_.default, x, "sum", "0"): 32,
        b.call(c10d.all_reduce_coalesced.default, [x, y], "sum", "0"): 32 + 16,
        b.call(c10d.all_to_all_single.default, x, [4, 4], [4, 4], "0"): 0,
        b.call(c10d.broadcast.default, x, 0, "0"): 0,
    }
    found = scratch_bytes(b.joint(b.call(aten.sum.default, x)), "cpu")
    assert found == {node: num for node, num in expected.items() if num}


def test_scratch_memory_is_alive_while_its_node_runs_or_until_the_wait():
    fake_world(2)
    b = Builder()
    x = b.input("x", 8)
    gathered = b.call(c10d.all_gather_into_tensor_coalesced.default, [x, x], 2, "0")
    part = b.call(operator.getitem, gathered, 1)
    product = b.call(aten.mul.Tensor, x, x)
    wait = b.call(c10d.wait_tensor.default, part)
    total = b.call(aten.sum.default, b.call(aten.cat.default, [wait, product]))
    joint = b.joint(total)
    found = lifetimes(joint, scratch={gathered: 1000, product: 7})
    plain, order = lifetimes(joint), list(joint.graph.nodes)
    added = {
        node: a - b
        for node, a, b in zip(order, found.live_bytes, plain.live_bytes, strict=True)
        if a != b
    }
    assert added == {gathered: 1000, part: 1000, product: 1007, wait: 1000}
    assert found.last_use[(gathered, SCRATCH)] == order.index(wait)
