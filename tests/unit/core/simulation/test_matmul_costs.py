"""Products by tiles and waves."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from graph_trainer.core.simulation.hardware import known_hardware, load_hardware
from graph_trainer.core.simulation.matmul_costs import Product, product_of, product_time
from graph_trainer.core.simulation.op_costs import costs
from graph_trainer.core.simulation.simulate import simulate
from graph_trainer.testing import Builder
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import aten

BF16 = torch.bfloat16
GPUS = [name for name in sorted(known_hardware()) if load_hardware(name).device == "cuda"]
LARGE = 8192


def units(num, **changes):
    """A machine with compute units, whose memory is not in the way."""
    fast = {"memory_bytes_per_second": 1e30, "peak_flops": {"float32": 1e9, "bfloat16": 1e12}}
    return machine(compute_units=num, **(fast | changes))


def dense(rows, columns, depth, dtype=BF16, batch=1):
    return Product(batch, batch * rows, columns, depth, dtype)


def grouped(groups, rows, columns, depth, dtype=BF16):
    """Products of groups of so many rows each."""
    return Product(groups, groups * rows, columns, depth, dtype, is_grouped=True)


def seconds(product, hardware):
    return product_time(product, hardware).seconds


def usual_seconds(product, hardware):
    """The time without tiles."""
    usable = hardware.flops(product.dtype) * hardware.clock * hardware.matmul_efficiency
    return 2 * product.rows * product.columns * product.depth / usable


# The tiles of a result of 1,000 x 1,000, and their waves on 10 units, counted by hand. A tile does
# its own multiplications, and 18 more for each row and column.
BY_HAND = {
    (256, 128): (4 * 8, 4, 32768 + 18 * 384),
    (128, 256): (8 * 4, 4, 32768 + 18 * 384),
    (128, 128): (8 * 8, 7, 16384 + 18 * 256),
    (256, 64): (4 * 16, 7, 16384 + 18 * 320),
    (64, 256): (16 * 4, 7, 16384 + 18 * 320),
    (128, 64): (8 * 16, 13, 8192 + 18 * 192),
    (64, 128): (16 * 8, 13, 8192 + 18 * 192),
    (64, 64): (16 * 16, 26, 4096 + 18 * 128),
}


@pytest.mark.parametrize("latency", [0.0, 1e-3])
def test_tiles_and_waves_as_counted_by_hand(latency):
    hardware = units(10, memory_latency_seconds=latency)
    # 8,192 x 8,192 has 64 * 32 tiles of 128 x 256: 205 waves, which take its time as before
    large = 2 * LARGE**3 / (1e12 * hardware.matmul_efficiency)
    multiplication = (large / 205 - 2 * latency) / (LARGE * (32768 + 18 * 384))
    depth = 500
    times = []
    for num, waves, work in BY_HAND.values():
        assert math.ceil(num / 10) == waves
        times.append(waves * (depth * work * multiplication + 2 * latency))
    assert seconds(dense(1000, 1000, depth), hardware) == pytest.approx(min(times))


@pytest.mark.parametrize("name", GPUS)
def test_a_large_square_product_takes_the_time_that_the_efficiency_says(name):
    hardware = load_hardware(name)
    large, larger = dense(LARGE, LARGE, LARGE), dense(2 * LARGE, 2 * LARGE, 2 * LARGE)
    assert product_time(large, hardware) == (pytest.approx(usual_seconds(large, hardware)), 1)
    # the efficiency has the idle units of the large product's last wave, of tiles of 128 x 256
    waves = 64 * 32 / hardware.compute_units
    usual, idle = usual_seconds(larger, hardware), waves / math.ceil(waves)
    assert 0.97 * idle * usual < seconds(larger, hardware) < 1.03 * usual


def test_one_unit_has_no_tiles():
    hardware = load_hardware("cpu")
    for product in (dense(1, 1000, 70), grouped(64, 3, 1000, 70), dense(5, 6, 7, torch.float32)):
        usual = pytest.approx(usual_seconds(product, hardware))
        assert product_time(product, hardware) == (usual, 1)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("groups", [0, 8])
def test_more_rows_columns_or_depth_take_no_less(name, groups):
    hardware = load_hardware(name)
    sizes = (1, 16, 64, 65, 128, 129, 200, 256, 257, 512, 1000, 1024, 1500, 4096, 5000)
    usual = (16, 200, 2048)
    if groups:  # small groups have another kernel, which may be slower
        sizes, usual = sizes[5:], usual[1:]
    for place in range(3):
        for others in itertools.product(usual, repeat=2):
            shapes = [(*others[:place], size, *others[place:]) for size in sizes]
            of = [grouped(groups, *shape) if groups else dense(*shape) for shape in shapes]
            times = [seconds(product, hardware) for product in of]
            assert times == sorted(times), (place, others)


def test_small_and_narrow_products_are_less_efficient():
    hardware = load_hardware("h100-sxm")

    def efficiency(product):
        return usual_seconds(product, hardware) / seconds(product, hardware)

    assert 0.97 < efficiency(dense(LARGE, LARGE, LARGE)) < 1.03
    assert efficiency(dense(LARGE, LARGE, 64)) < 0.6  # waits as long as it multiplies
    assert efficiency(dense(16, LARGE, LARGE)) < 0.3  # rows of a tile are empty
    assert efficiency(dense(1024, 1024, 1024)) < 0.7  # smaller tiles, so that all units have some
    one_wave, next_wave = (dense(128 * 12, 256 * 11 + more, LARGE) for more in (0, 64))
    assert efficiency(next_wave) < 0.8 * efficiency(one_wave)


def test_few_tiles_share_their_dot_products_among_units():
    hardware = units(64)
    few, many = dense(128, 128, LARGE), dense(4096, 4096, LARGE)
    assert (product_time(few, hardware).kernels, product_time(many, hardware).kernels) == (2, 1)
    slow_memory = units(64, memory_bytes_per_second=1.0)  # partial results would take longer
    assert product_time(few, slow_memory).kernels == 1
    assert seconds(few, hardware) < seconds(few, slow_memory) / 8


@pytest.mark.parametrize("name", ["h100-sxm", "b200"])
def test_a_group_that_ends_inside_a_tile_takes_the_whole_tile(name):
    hardware = load_hardware(name)
    full, one_more, next_full = (grouped(64, rows, 2048, 2048) for rows in (1536, 1537, 1792))
    assert seconds(full, hardware) < seconds(one_more, hardware) == seconds(next_full, hardware)
    one_group = replace(full, rows=full.rows + 1)  # only one of 64 groups has a row more
    assert seconds(one_group, hardware) < 1.05 * seconds(full, hardware)


def test_groups_take_the_tiles_of_pytorchs_kernel():
    work = {(64, 128): 8192 + 18 * 192, (128, 256): 32768 + 18 * 384}
    large = 2 * LARGE**3 / (1e12 * units(7).matmul_efficiency)
    multiplication = large / 293 / (LARGE * work[128, 256])  # 2,048 tiles on 7 units: 293 waves
    depth = 500
    for capability, rows, tile, tiles, waves in (
        (9.0, 100, (64, 128), 24 * 2 * 10, 69),
        (9.0, 129, (128, 256), 24 * 2 * 5, 35),
        (10.0, 100, (128, 256), 24 * 2 * 5, 35),
        (10.0, 300, (128, 256), 24 * 4 * 5, 69),
    ):
        assert math.ceil(tiles / 7) == waves > tiles / 7
        hardware = units(7, compute_capability=capability)
        found = product_time(grouped(24, rows, 1280, depth), hardware)
        expected = waves * depth * work[tile] * multiplication
        assert found == (pytest.approx(expected), 2), (capability, rows)


@pytest.mark.parametrize(
    ("capability", "dtype"), [(8.0, BF16), (0.0, BF16), (9.0, torch.float32), (9.0, torch.float16)]
)
def test_elsewhere_groups_run_one_after_another(capability, dtype):
    hardware = units(10, compute_capability=capability, launch_seconds=1.0)
    found = product_time(grouped(24, 100, 1280, 500, dtype), hardware)
    assert found == (pytest.approx(24 * 1.0 + 1.0), 24 + 1)  # and the offsets are copied
    one = dense(100, 1280, 500, dtype)
    free = units(10, compute_capability=capability)
    all_groups = seconds(grouped(24, 100, 1280, 500, dtype), free)
    assert all_groups == pytest.approx(24 * seconds(one, free))


def test_float32_takes_the_speed_of_float32():
    hardware = load_hardware("h100-sxm")
    ratio = hardware.flops(BF16) / hardware.flops(torch.float32)
    router = dense(16384, 64, 2048, torch.float32)
    assert seconds(router, hardware) > 0.5 * ratio * seconds(replace(router, dtype=BF16), hardware)


def call_of(op, *shapes, **kwargs):
    b = Builder()
    return b.call(op, *(b.input(f"x{i}", *s, dtype=BF16) for i, s in enumerate(shapes)), **kwargs)


def grouped_call(b, a, b_, groups):
    offs = b.input("offs", groups, dtype=torch.int32)
    left, right = b.input("a", *a, dtype=BF16), b.input("b", *b_, dtype=BF16)
    return b.call(aten._grouped_mm.default, left, right, offs)


def test_the_product_that_an_op_computes():
    assert product_of(call_of(aten.mm.default, (3, 5), (5, 7))) == dense(3, 7, 5)
    assert product_of(call_of(aten.addmm.default, (7,), (3, 5), (5, 7))) == dense(3, 7, 5)
    assert product_of(call_of(aten.bmm.default, (4, 3, 5), (4, 5, 7))) == dense(3, 7, 5, batch=4)
    added = call_of(aten.baddbmm.default, (4, 3, 7), (4, 3, 5), (4, 5, 7))
    assert product_of(added) == dense(3, 7, 5, batch=4)
    assert product_of(call_of(aten.relu.default, (3, 5))) is None
    rows = grouped_call(Builder(), (64, 16), (4, 16, 32), 4)
    assert product_of(rows) == grouped(4, 16, 32, 16)
    summed = grouped_call(Builder(), (16, 64), (64, 32), 4)
    assert product_of(summed) == grouped(4, 16, 32, 64 / 4)
    columns = grouped_call(Builder(), (4, 16, 32), (32, 64), 4)
    assert product_of(columns) == grouped(4, 16, 16, 32)


def test_experts_are_slower_than_one_product_of_all_rows():
    """Two runs that differ in this term alone."""
    hardware = load_hardware("h100-sxm")
    steps = []
    for experts in (1, 64):
        b = Builder()
        if experts == 1:
            x = b.input("x", 6400, 2048, dtype=BF16)
            node = b.call(aten.mm.default, x, b.input("w", 2048, 4096, dtype=BF16))
        else:
            node = grouped_call(b, (6400, 2048), (experts, 2048, 4096), experts)
        found = simulate(b.joint(b.call(aten.sum.default, node)), hardware)
        steps.append((found.costs[node].flops, found.timeline.step_seconds))
    assert steps[0][0] == steps[1][0]
    assert steps[1][1] > 1.2 * steps[0][1]


def test_a_node_takes_at_least_the_launches_of_its_kernels():
    b = Builder()
    node = grouped_call(b, (64, 16), (4, 16, 32), 4)
    joint = b.joint(b.call(aten.sum.default, node))
    found = costs(joint, units(10, launch_seconds=1.0))[node]
    assert (found.launches, found.seconds) == (2, pytest.approx(2.0))
