"""Kernels of ops that launch several or move rows."""

import importlib
import operator

import pytest
import torch

from graph_trainer.core.simulation.fusion import NO_FUSION, fuse
from graph_trainer.core.simulation.op_costs import CostKind, costs
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.testing import Builder
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import aten

FLOAT, INDEX, SECTOR = 4, 8, 32
BF16, INT64 = torch.bfloat16, torch.int64
MANY = 3_000_000  # rows of 16 bytes and more: a table that no cache keeps


def cost_of(b, node, hardware=None, fusion=None):
    """The cost of one node of a graph that ends with it."""
    several = isinstance(node.meta["val"], tuple)
    first = b.call(operator.getitem, node, 0) if several else node
    joint = b.joint(b.call(aten.sum.default, first))
    fusion = NO_FUSION if fusion is None else fusion(joint)
    return costs(joint, hardware or machine(), fusion)[node]


def sort_of(*shape, dtype=INT64):
    def call(b):
        return b.call(aten.sort.default, b.input("x", *shape, dtype=dtype))

    return call


def add_rows(rows=1000, columns=256, indices=6000, dtype=BF16, fresh=True, accumulate=True):
    """Rows that are added to, or written over, rows of a table of zeros or of an input."""

    def call(b):
        table = b.input("t", rows, columns, dtype=dtype)
        index = b.input("index", indices, dtype=INT64)
        values = b.input("values", indices, columns, dtype=dtype)
        if fresh:
            table = b.call(aten.zeros_like.default, table)
        return b.call(aten.index_put.default, table, [index], values, accumulate)

    return call


def scatter_add_of_torchtitan(b):
    importlib.import_module("torchtitan.ops.scatter_add")  # registers the op
    table, values = b.input("t", 1000, 256), b.input("values", 6000, 256)
    index = b.call(aten.expand.default, b.input("index", 6000, 1, dtype=INT64), [-1, 256])
    return b.call(torch.ops.torchtitan.deterministic_scatter_add.default, table, index, values)


def embedding_backward(tokens):
    def call(b):
        gradient, index = b.input("g", tokens, 64), b.input("i", tokens, dtype=INT64)
        return b.call(aten.embedding_dense_backward.default, gradient, index, 1000, -1, False)

    return call


def offsets(b, op=aten.cumsum.default, **how):
    return b.call(op, b.input("counts", 64, dtype=INT64), 0, **how)


def topk(sorted_):
    return lambda b: b.call(aten.topk.default, b.input("x", 100, 64), 6, -1, True, sorted_)


def radix_sort(bits):
    """Clear, count and sum; then clear and move for each 8 bits."""
    return 3 + 2 * -(-bits // 8)


SORTED_ADD = 3 + 1 + radix_sort(10) + 1  # index arithmetic, arange, sort by 1,000 rows, addition

LAUNCHES = {
    "elementwise": (lambda b: b.call(aten.relu.default, b.input("x", 8)), 1),
    "product": (lambda b: b.call(aten.mm.default, b.input("x", 8, 8), b.input("w", 8, 8)), 1),
    "long sort": (sort_of(98304), 1 + radix_sort(64)),
    "long sort of int32": (sort_of(98304, dtype=torch.int32), 1 + radix_sort(32)),
    "several long sorts": (sort_of(10, 5000), 1 + radix_sort(64) + radix_sort(4) + 1),
    "many long sorts": (sort_of(200, 5000), 1 + 11),
    "short sorts": (sort_of(200, 50), 4),
    "topk": (topk(False), 1),
    "topk in order": (topk(True), 2),
    "cumsum": (offsets, 2),
    "cumsum of another dtype": (lambda b: offsets(b, dtype=torch.int32), 3),
    "cumsum of rows": (lambda b: b.call(aten.cumsum.default, b.input("x", 10, 64), 1), 1),
    "rows written": (add_rows(accumulate=False), 1),
    "rows written into a copy": (add_rows(accumulate=False, fresh=False), 2),
    "rows added": (add_rows(), SORTED_ADD),
    "rows added to a copy": (add_rows(fresh=False), 1 + SORTED_ADD),
    "torchtitan's scatter_add": (scatter_add_of_torchtitan, 1 + 6 + SORTED_ADD),
    "embedding backward": (embedding_backward(5000), 1 + 1 + radix_sort(10) + 7 + 2),
    "embedding backward of few": (embedding_backward(3000), 2),
    "histogram": (lambda b: b.call(aten.histc.default, b.input("x", 100), 8, 0, 8), 2),
    "allocation": (lambda b: b.call(aten.new_empty.default, b.input("x", 8), [1000]), 0),
    "view": (lambda b: b.call(aten.view.default, b.input("x", 8), [2, 4]), 0),
}


@pytest.mark.parametrize(("call", "launches"), LAUNCHES.values(), ids=LAUNCHES)
def test_launches(call, launches):
    b = Builder()
    # each kernel takes a launch and no more
    hardware = machine(launch_seconds=1.0, memory_bytes_per_second=1e30)
    found = cost_of(b, call(b), hardware)
    assert (found.launches, found.seconds) == (launches, pytest.approx(float(launches)))
    assert (found.kind is CostKind.FREE) == (launches == 0)


def test_a_repetition_launches_a_cumsum_and_a_kernel():
    b = Builder()
    counts = b.input("counts", 8, dtype=INT64)
    node = b.call(aten.repeat_interleave.Tensor, counts, output_size=100)
    assert cost_of(b, node).launches == 3


def test_a_fused_group_is_launched_once():
    b = Builder()
    x = b.input("x", 100)
    chain = [b.call(aten.relu.default, x)]
    chain.append(b.call(aten.neg.default, chain[-1]))
    joint = b.joint(b.call(aten.sum.default, chain[-1]))
    assert sum(c.launches for c in costs(joint, machine()).values()) == 3
    assert sum(c.launches for c in costs(joint, machine(), fuse(joint)).values()) == 1


@pytest.mark.parametrize("call", [sort_of(98304), add_rows(), offsets], ids=["sort", "add", "scan"])
def test_a_cpu_calls_each_op_once(call):
    b = Builder()
    found = cost_of(b, call(b), machine(device="cpu", launch_seconds=1.0))
    assert found.launches == 1 and found.seconds < 2.0


def rows_of(columns, picks=1000, table=MANY, op=aten.index.Tensor):
    """Rows of a table by number."""

    def call(b):
        source, index = b.input("t", table, columns), b.input("i", picks, dtype=INT64)
        if op is aten.index.Tensor:
            return b.call(op, source, [index])
        if op is aten.gather.default:
            index = b.call(aten.unsqueeze.default, index, 1)
            index = b.call(aten.expand.default, index, [-1, columns])
            return b.call(op, source, 0, index)
        return b.call(op, source, 0, index)

    return call


@pytest.mark.parametrize("op", [aten.index.Tensor, aten.index_select.default, aten.gather.default])
@pytest.mark.parametrize(("columns", "sectors"), [(4, 1), (8, 1), (9, 2), (256, 32)])
def test_a_row_is_read_in_whole_sectors(op, columns, sectors):
    b = Builder()
    found = cost_of(b, rows_of(columns, op=op)(b))
    assert found.bytes == 1000 * (sectors * SECTOR + columns * FLOAT + INDEX)


def test_rows_of_a_small_table_are_read_once():
    b = Builder()
    found = cost_of(b, rows_of(8, picks=100_000, table=64)(b))
    assert found.bytes == 64 * 8 * FLOAT + 100_000 * (8 * FLOAT + INDEX)


def test_numbers_within_rows_are_read_in_sectors_of_their_own():
    b = Builder()
    x, index = b.input("x", MANY, 8), b.input("i", MANY, 2, dtype=INT64)
    found = cost_of(b, b.call(aten.gather.default, x, 1, index))
    assert found.bytes == MANY * 2 * (SECTOR + FLOAT + INDEX)


def test_rows_in_no_order_are_slower_than_rows_in_order():
    b = Builder()
    scattered = cost_of(b, rows_of(256)(b))
    b = Builder()
    in_order = cost_of(b, b.call(aten.clone.default, b.input("x", 1000, 256)))
    assert scattered.bytes == in_order.bytes + 1000 * INDEX
    assert scattered.seconds > 1.2 * in_order.seconds


def test_a_write_in_place_moves_what_it_writes_and_no_more():
    b = Builder()
    table, index = b.input("t", 2048, 100_000), b.input("i", 2048, 1, dtype=INT64)
    values = b.input("v", 2048, 1)
    found = cost_of(b, b.call(aten.scatter_add_.default, table, 1, index, values))
    assert found.bytes == 2048 * (INDEX + FLOAT + 2 * SECTOR)  # reads and writes one sector each
    b = Builder()
    table, index = b.input("t", 2048, 100_000), b.input("i", 2048, 1, dtype=INT64)
    values = b.input("v", 2048, 1)
    copied = cost_of(b, b.call(aten.scatter_add.default, table, 1, index, values))
    assert copied.bytes == found.bytes + 2 * 2048 * 100_000 * FLOAT


def test_a_table_with_another_reader_is_copied_before_it_is_written():
    launches = []
    for others in (0, 1):
        b = Builder()
        node = add_rows(accumulate=False)(b)
        for _ in range(others):
            b.call(aten.relu.default, node.args[0])
        launches.append(cost_of(b, node).launches)
    assert launches == [1, 2]


def test_a_sort_moves_keys_and_numbers_once_for_each_digit():
    b = Builder()
    count = 98304
    found = cost_of(b, sort_of(count)(b))
    assert found.bytes == count * (INDEX + INDEX + 8 * 2 * (INDEX + INDEX))


def test_rows_of_one_number_wait_for_each_other():
    slow = machine(memory_bytes_per_second=1e30, memory_latency_seconds=1.0, compute_units=2)
    times = []
    for rows in (6000, 1000, 100):
        b = Builder()
        times.append(cost_of(b, add_rows(rows=rows)(b), slow).seconds)
    # 2 blocks of columns for each changed row, or for each 4 numbers; 32 blocks at a time
    expected = [-(-2 * 1500 // 32) * (2 + 1), -(-2 * 1000 // 32) * (2 + 6), -(-2 * 100 // 32) * 62]
    assert times == pytest.approx(expected)


@pytest.mark.parametrize(
    ("dtype", "capability", "is_sorted"),
    [(BF16, 8.0, True), (BF16, 9.0, False), (torch.float32, 8.0, False)],
)
def test_a_compiler_adds_rows_without_sorting_where_the_chip_can(dtype, capability, is_sorted):
    b = Builder()
    hardware = machine(compute_capability=capability)
    found = cost_of(b, add_rows(dtype=dtype)(b), hardware, fuse)
    assert found.launches == (SORTED_ADD if is_sorted else 1)


def test_torchtitans_scatter_add_sorts_in_compiled_code_too():
    b = Builder()
    assert cost_of(b, scatter_add_of_torchtitan(b), fusion=fuse).launches == 1 + 6 + SORTED_ADD


def test_a_mask_is_no_index():
    b = Builder()
    table, mask = b.input("t", 100, 8), b.input("m", 100, dtype=torch.bool)
    node = b.call(aten.index_put.default, table, [mask], b.input("v"))
    assert cost_of(b, node).launches == 1


def test_a_step_that_sorts_more_launches_and_takes_longer():
    """Two runs that differ in this term alone."""
    hardware = machine(launch_seconds=1e-3, memory_bytes_per_second=1e30)
    steps = []
    for shape in ((4000,), (5000,)):
        b = Builder()
        keys = b.call(operator.getitem, sort_of(*shape)(b), 0)
        steps.append(simulate(b.joint(b.call(aten.sum.default, keys)), hardware))
    short, long = (step.timeline.step_seconds for step in steps)
    assert long - short == pytest.approx((20 - 4) * 1e-3)
