"""Seconds of collectives: properties on any machine, and figures on given ones."""

import itertools
import math

import pytest

from graph_trainer.core.simulation.collective_costs import collective_seconds, placement
from graph_trainer.core.simulation.hardware import known_hardware, load_hardware
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import collective

GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
KINDS = (GATHER, SCATTER, REDUCE, "all_to_all_single", "broadcast")
SIZES = (0, 1, 1 << 10, 1 << 20, 1 << 30)
NODE = range(8)
NODES = range(128)
PLACES = [(0, 1), NODE, (0, 8), NODES, (0, 1, 2, 9)]
EVERY = list(itertools.product(KINDS, SIZES))

MACHINES = [machine(), *map(load_hardware, known_hardware())]
on_all = pytest.mark.parametrize("hardware", MACHINES, ids=lambda h: h.name)


def seconds(hardware, ranks, numel, kind=GATHER):
    return collective_seconds(collective(kind, tuple(ranks), numel=numel), hardware)


def rising(values):
    return values == sorted(values)


@on_all
def test_more_bytes_take_longer(hardware):
    for kind, ranks in itertools.product(KINDS, PLACES):
        assert rising([seconds(hardware, ranks, n, kind) for n in SIZES]), (kind, ranks)
        assert seconds(hardware, ranks, SIZES[-2], kind) < seconds(hardware, ranks, SIZES[-1], kind)


@on_all
def test_more_ranks_take_longer(hardware):
    inside = [range(n) for n in range(2, 9)]
    whole_nodes = [range(8 * n) for n in (2, 3, 4, 5, 8, 16, 17)]
    one_of_each = [range(0, 8 * n, 8) for n in (2, 3, 4, 5, 8, 16, 17)]
    for (kind, numel), groups in itertools.product(EVERY, (inside, whole_nodes, one_of_each)):
        assert rising([seconds(hardware, group, numel, kind) for group in groups]), (kind, numel)


@on_all
def test_across_nodes_is_never_faster_than_inside(hardware):
    for (kind, numel), stride in itertools.product(EVERY, (2, 4, 8, 16)):
        across = seconds(hardware, range(0, 8 * stride, stride), numel, kind)
        assert across >= seconds(hardware, NODE, numel, kind), (kind, numel, stride)


@on_all
def test_a_group_of_one_takes_no_time_and_no_other_less_than_a_launch(hardware):
    for kind, numel in EVERY:
        assert seconds(hardware, (3,), numel, kind) == 0.0
        assert seconds(hardware, (0, 1), numel, kind) >= hardware.collective_seconds


@on_all
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(hardware):
    launch = hardware.collective_seconds
    for ranks, numel in itertools.product(PLACES, SIZES):
        parts = seconds(hardware, ranks, numel, SCATTER) + seconds(hardware, ranks, numel, GATHER)
        both = seconds(hardware, ranks, numel, REDUCE)
        assert both - launch == pytest.approx(parts - 2 * launch)


def test_bandwidth_is_what_nccl_tests_calls_bus_bandwidth():
    hardware = machine(node_latency_seconds=0, network_latency_seconds=0)
    size = 4 << 28  # bytes of 1 << 28 float32
    assert seconds(hardware, NODE, 1 << 28) == pytest.approx(7 / 8 * size / 100e9)
    all_cards = 8 * hardware.network_bytes_per_second
    assert seconds(hardware, range(16), 1 << 28) == pytest.approx(15 / 16 * size / all_cards)
    one_card = hardware.network_bytes_per_second
    assert seconds(hardware, (0, 8), 1 << 28) == pytest.approx(1 / 2 * size / one_card)


def test_links_that_reach_half_take_twice_as_long():
    full, half = (machine(node_latency_seconds=0, link_efficiency=part) for part in (1.0, 0.5))
    assert seconds(half, NODE, 1 << 28) == pytest.approx(2 * seconds(full, NODE, 1 << 28))


def test_nodes_do_not_outrun_the_links_inside_them():
    hardware = machine(network_bytes_per_second=50e9, node_latency_seconds=0,
                       network_latency_seconds=0)  # fmt: skip
    across, size = seconds(hardware, range(16), 1 << 28), 4 << 28
    assert across == pytest.approx(15 / 16 * size / hardware.node_bytes_per_second)


def test_small_messages_on_many_ranks_do_not_go_round_the_ring():
    hardware = machine()
    ring = 112 * hardware.node_latency_seconds + 15 * hardware.network_latency_seconds
    tree = 3 * hardware.node_latency_seconds + 4 * hardware.network_latency_seconds
    small = 1
    assert tree <= seconds(hardware, NODES, small) < ring / 2


def test_large_messages_use_all_cards_of_a_node():
    hardware = machine()
    size = 4 << 28
    one_card = 127 / 128 * size / hardware.network_bytes_per_second
    assert one_card / 8 < seconds(hardware, NODES, 1 << 28) < one_card / 7


def test_an_all_to_all_sends_through_the_card_of_each_rank():
    hardware = machine()
    size, one_card = 4 << 28, hardware.network_bytes_per_second
    assert seconds(hardware, NODES, 1 << 28, "all_to_all_single") > 127 / 128 * size / one_card


@pytest.mark.parametrize(
    "ranks, expected",
    [
        (range(8), (1, 8, 8)),
        (range(16), (2, 8, 8)),
        (range(0, 64, 8), (8, 1, 1)),
        (range(7), (1, 7, 7)),
        (range(9), (2, 1, 8)),
        ((3, 9, 10, 22, 23, 23 + 8), (4, 1, 2)),
        ((7, 8), (2, 1, 1)),
    ],
)
def test_ranks_are_placed_one_after_the_other(ranks, expected):
    assert placement(tuple(ranks), 8) == expected
    assert placement(tuple(reversed(ranks)), 8) == expected


def test_a_lone_rank_on_a_second_node_makes_its_card_the_bottleneck():
    hardware = machine(node_latency_seconds=0, network_latency_seconds=0)
    size, one_card = 4 << 28, hardware.network_bytes_per_second
    assert seconds(hardware, range(9), 1 << 28) == pytest.approx(8 / 9 * size / one_card)


def test_an_uneven_group_waits_for_its_largest_node():
    """Eight ranks on one node need three rounds among themselves, whoever sits elsewhere."""
    hardware = machine()
    inside = seconds(hardware, range(8), 0)
    assert seconds(hardware, range(9), 0) >= inside + hardware.network_latency_seconds
    assert inside == pytest.approx(math.log2(8) * hardware.node_latency_seconds)
