"""FLOPs, bytes and seconds of nodes."""

import importlib
import operator

import pytest
import torch

from graph_trainer.core.simulation.fusion import fuse
from graph_trainer.core.simulation.op_costs import CostKind, costs, flops_of
from graph_trainer.testing import Builder
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import BACKWARD, aten, c10d, captured_decoder

FLOAT = 4


def cost_of(b, node, hardware=None):
    """The cost of one node of a graph that ends with it."""
    several = isinstance(node.meta["val"], tuple)
    first = b.call(operator.getitem, node, 0) if several else node
    return costs(b.joint(b.call(aten.sum.default, first)), hardware or machine())[node]


def attention(query_rows, *, causal, heads=2, rows=16, size=8):
    b = Builder()
    q = b.input("q", 1, heads, query_rows, size, dtype=torch.bfloat16)
    k, v = (b.input(n, 1, heads, rows, size, dtype=torch.bfloat16) for n in "kv")
    node = b.call(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, causal)
    return b, node


@pytest.mark.parametrize(
    ("op", "left", "right", "batch"),
    [(aten.mm.default, (3, 5), (5, 7), 1), (aten.bmm.default, (4, 3, 5), (4, 5, 7), 4)],
)
def test_a_matmul_takes_two_flops_a_product(op, left, right, batch):
    b = Builder()
    found = cost_of(b, b.call(op, b.input("x", *left), b.input("w", *right)))
    assert (found.kind, found.flops) == (CostKind.MATMUL, batch * 2 * 3 * 5 * 7)
    assert found.bytes == FLOAT * batch * (3 * 5 + 5 * 7 + 3 * 7)


def test_a_large_matmul_is_bound_by_flops_and_a_thin_one_by_bytes():
    hardware = machine()
    for rows, bound in ((512, "flops"), (1, "bytes")):
        b = Builder()
        found = cost_of(b, b.call(aten.mm.default, b.input("x", rows, 512), b.input("w", 512, 512)))
        times = {
            "flops": found.flops / (1e9 * hardware.matmul_efficiency),
            "bytes": found.bytes / 1e9,
        }
        assert found.seconds == max(times.values()) == times[bound]


def matmul_seconds(hardware, rows=1024, dtype=torch.float32):
    b = Builder()
    x, w = b.input("x", rows, 512, dtype=dtype), b.input("w", 512, 512, dtype=dtype)
    return cost_of(b, b.call(aten.mm.default, x, w), hardware).seconds


def test_a_capped_clock_slows_matmuls_and_not_memory():
    full, capped = (
        machine(power_limit_watts=limit, memory_bytes_per_second=1e8) for limit in (100, 50)
    )
    assert capped.clock < full.clock
    for rows, slower in ((1024, 1 / capped.clock), (1, 1.0)):
        ratio = matmul_seconds(capped, rows) / matmul_seconds(full, rows)
        assert ratio == pytest.approx(slower)


def test_the_peak_is_that_of_the_dtype():
    single, half = (matmul_seconds(machine(), dtype=d) for d in (torch.float32, torch.bfloat16))
    assert single == pytest.approx(4 * half)


def test_causal_attention_computes_half():
    found = [cost_of(*attention(16, causal=causal)) for causal in (False, True)]
    assert {each.kind for each in found} == {CostKind.ATTENTION}
    assert found[0].flops == 2 * 2 * (2 * 16 * 16 * 8) == 2 * found[1].flops


def test_attention_has_another_efficiency_than_matmuls():
    heavy = {"memory_bytes_per_second": 1e30}
    b, node = attention(16, causal=False)
    found = cost_of(b, node, machine(**heavy))
    assert found.seconds == pytest.approx(found.flops / (4e9 * machine().attention_efficiency))


def test_attention_on_a_cpu_counts_as_on_a_gpu():
    shape = (1, 2, 16, 8)
    b = Builder()
    q, k, v = (b.input(name, *shape) for name in "qkv")
    on_cpu = b.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True)
    gpu = attention(16, causal=True)[1]
    assert flops_of(on_cpu) == flops_of(gpu)
    out, lse = (b.call(operator.getitem, on_cpu, place) for place in (0, 1))
    backward = b.call(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(out, q, k, v, out, lse, 0.0, True),
    )
    forward = flops_of(on_cpu)[0]
    assert flops_of(backward) == (forward * 5 // 2, CostKind.ATTENTION)  # 5 matmuls to 2


def test_views_waits_parts_and_collectives_are_no_compute():
    b = Builder()
    x = b.input("x", 4, 6)
    free = [
        b.call(aten.t.default, x),
        b.call(aten.view.default, x, [24]),
        b.call(aten.expand.default, b.call(aten.unsqueeze.default, x, 0), [3, 4, 6]),
    ]
    split = b.call(aten.split.Tensor, x, 2)
    free += [split, b.call(operator.getitem, split, 1)]
    started = b.call(c10d.all_reduce.default, x, "sum", "0")
    free += [started, b.call(c10d.wait_tensor.default, started)]
    found = costs(b.joint(b.call(aten.sum.default, free[-1])), machine(launch_seconds=1.0))
    for node in free:
        assert (found[node].kind, found[node].seconds, found[node].bytes) == (CostKind.FREE, 0.0, 0)


def on(op, *shapes, **kwargs):
    """A function that calls an op on inputs of these shapes."""
    return lambda b: b.call(op, *(b.input(f"x{i}", *s) for i, s in enumerate(shapes)), **kwargs)


def relu_of(op, shape, *args):
    return lambda b: b.call(aten.relu.default, b.call(op, b.input("x", *shape), *args))


def lookup(op):
    """Five rows of eight numbers."""

    def call(b):
        table, tokens = b.input("table", 1000, 8), b.input("tokens", 5, dtype=torch.int64)
        return b.call(op, table, [tokens] if op is aten.index.Tensor else tokens)

    return call


BYTES = {
    "read and written": (on(aten.relu.default, [100]), 200 * FLOAT),
    "written in place": (on(aten.add_.Tensor, [100], [100]), 300 * FLOAT),
    "read once": (lambda b: b.call(aten.mul.Tensor, *[b.input("x", 100)] * 2), 200 * FLOAT),
    "cast": (on(aten._to_copy.default, [100], dtype=torch.bfloat16), 100 * (FLOAT + 2)),
    "copied": (on(aten.copy_.default, [100], [100]), 200 * FLOAT),
    "only its shape used": (on(aten.zeros_like.default, [100]), 100 * FLOAT),
    "overwritten": (on(aten.zero_.default, [100]), 100 * FLOAT),
    "embedding": (lookup(aten.embedding.default), 2 * 5 * 8 * FLOAT + 5 * 8),
    "index": (lookup(aten.index.Tensor), 2 * 5 * 8 * FLOAT + 5 * 8),
    "expanded": (relu_of(aten.expand.default, [1, 8], [1000, 8]), (8 + 8000) * FLOAT),
    "sliced": (relu_of(aten.slice.Tensor, [1000, 8], 0, 0, 10), 2 * 10 * 8 * FLOAT),
}


@pytest.mark.parametrize(("call", "expected"), BYTES.values(), ids=BYTES)
def test_bytes_are_what_is_read_and_written(call, expected):
    b = Builder()
    found = cost_of(b, call(b))
    assert (found.kind, found.bytes) == (CostKind.MEMORY, expected)


def test_a_group_that_uses_a_shape_and_then_reads_the_tensor_reads_it():
    b = Builder()
    x = b.input("x", 10, 10)
    zeros = b.call(aten.zeros_like.default, x)
    both = b.call(aten.add.Tensor, zeros, x)
    joint = b.joint(b.call(aten.sum.default, b.call(aten.mm.default, both, both)))
    fusion = fuse(joint)
    assert fusion.group[zeros] == fusion.group[both]
    found = costs(joint, machine(), fusion)
    assert found[zeros].bytes + found[both].bytes == 2 * 100 * FLOAT


def test_the_loss_reads_one_score_a_token():
    b = Builder()
    scores, tokens = b.input("scores", 5, 1000), b.input("tokens", 5, dtype=torch.int64)
    lost = b.call(aten.nll_loss_forward.default, scores, tokens, None, 1, -100)
    loss, total = (b.call(operator.getitem, lost, place) for place in (0, 1))
    back = b.call(
        aten.nll_loss_backward.default, loss, scores, tokens, None, 1, -100, total, phase=BACKWARD
    )
    found = costs(b.joint(b.call(aten.sum.default, back)), machine())
    assert found[lost].bytes < 1000
    assert 5 * 1000 * FLOAT <= found[back].bytes < 5 * 1000 * FLOAT + 1000  # writes them all


def test_nothing_that_computes_takes_less_than_a_launch():
    joint = captured_decoder()
    launch = 0.25
    found = costs(joint, machine(launch_seconds=launch))
    computing = [c.seconds for c in found.values() if c.kind is not CostKind.FREE]
    assert computing and min(computing) == launch


def test_a_fused_group_is_launched_once_and_reads_its_inputs_and_writes_its_outputs():
    b = Builder()
    x, y, w = b.input("x", 100), b.input("y", 100), b.input("w", 10, 10)
    chain = [b.call(aten.add.Tensor, x, y)]
    chain.append(b.call(aten.mul.Tensor, chain[-1], x))
    chain.append(b.call(aten.relu.default, chain[-1]))
    end = b.call(aten.mm.default, b.call(aten.view.default, chain[-1], [10, 10]), w)
    joint = b.joint(b.call(aten.sum.default, end))
    fused = costs(joint, machine(launch_seconds=1e-9), fuse(joint))
    assert sum(fused[n].bytes for n in chain) == (2 + 1) * 100 * FLOAT
    separate = costs(joint, machine(launch_seconds=1e-9))
    assert sum(separate[n].bytes for n in chain) == (3 + 3 + 2) * 100 * FLOAT
    launched = costs(joint, machine(launch_seconds=1.0, memory_bytes_per_second=1e30), fuse(joint))
    assert sum(launched[n].seconds for n in chain) == pytest.approx(1.0)


def test_fusing_makes_nothing_slower():
    joint = captured_decoder(layers=2)
    hardware = machine(launch_seconds=1e-7)
    separate, fused = costs(joint, hardware), costs(joint, hardware, fuse(joint))
    assert sum(c.flops for c in fused.values()) == sum(c.flops for c in separate.values()) > 0
    assert sum(c.bytes for c in fused.values()) < sum(c.bytes for c in separate.values())
    assert sum(c.seconds for c in fused.values()) < sum(c.seconds for c in separate.values())


def test_a_bucket_of_inductor_is_made_for_all_ranks_and_written_by_one():
    # registers its ops
    bucketing = importlib.import_module("torch._inductor.fx_passes.bucketing")
    float32 = bucketing._ALL_DTYPES.index(torch.float32)
    b = Builder()
    shards = [b.input("w", 6), b.input("v", 2)]
    op = torch.ops.bucketing._pre_bucket_all_gather.default
    node = b.call(op, shards, 4, torch.float32, [float32, float32], 0)
    assert node.meta["val"].numel() == 4 * (6 + 2)
    assert cost_of(b, node).bytes == FLOAT * 2 * (6 + 2)
