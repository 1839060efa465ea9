"""Seconds of collectives: properties on any machine, and figures on given ones."""

import itertools
from dataclasses import replace

import pytest

from graph_trainer.core.simulation.collective_costs import (
    collective_parts,
    collective_seconds,
    placement,
)
from graph_trainer.core.simulation.hardware import Link, known_hardware, load_hardware
from tests.unit.core.simulation.machines import changed, machine, protocol
from tests.unit.graphs import collective

GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
EXCHANGE = "all_to_all_single"
KINDS = (GATHER, SCATTER, REDUCE, EXCHANGE, "broadcast")
SIZES = (0, 1, 1 << 10, 1 << 20, 1 << 30)
NODE = range(8)
NODES = range(128)
PLACES = [(0, 1), NODE, (0, 8), NODES, (0, 1, 2, 9)]
EVERY = list(itertools.product(KINDS, SIZES))

MACHINES = [machine(), *map(load_hardware, known_hardware())]
on_all = pytest.mark.parametrize("hardware", MACHINES, ids=lambda h: h.name)


def seconds(hardware, ranks, numel, kind=GATHER):
    return collective_seconds(collective(kind, tuple(ranks), numel=numel), hardware)


def parts(hardware, ranks, numel, kind=GATHER):
    return collective_parts(collective(kind, tuple(ranks), numel=numel), hardware)


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
        assert seconds(hardware, (0, 1), numel, kind) >= min(
            entry.base_seconds for entry in hardware.protocols
        )


@on_all
def test_an_all_reduce_takes_at_most_a_reduce_scatter_and_an_all_gather(hardware):
    for ranks, numel in itertools.product(PLACES, SIZES):
        both = seconds(hardware, ranks, numel, SCATTER) + seconds(hardware, ranks, numel, GATHER)
        assert seconds(hardware, ranks, numel, REDUCE) <= both
        for entry in hardware.protocols:  # as a ring exactly that, with one launch less
            ring = replace(entry, tree_latency_seconds=None, tree_bandwidth_share=None)
            alone = replace(hardware, protocols=(replace(ring, sends_pairs=True),))
            both = sum(seconds(alone, ranks, numel, kind) for kind in (SCATTER, GATHER))
            launch = entry.base_seconds
            assert seconds(alone, ranks, numel, REDUCE) == pytest.approx(both - launch)


def test_bandwidth_is_what_nccl_tests_calls_bus_bandwidth():
    hardware = machine(node_latency_seconds=0, network_latency_seconds=0)
    size = 4 << 28  # bytes of 1 << 28 float32
    assert seconds(hardware, NODE, 1 << 28) == pytest.approx(7 / 8 * size / 100e9)
    all_cards = 8 * hardware.network_bytes_per_second
    assert seconds(hardware, range(16), 1 << 28) == pytest.approx(15 / 16 * size / all_cards)
    one_card = hardware.network_bytes_per_second
    assert seconds(hardware, (0, 8), 1 << 28) == pytest.approx(1 / 2 * size / one_card)


@pytest.mark.parametrize("link, ranks", [("node", NODE), ("network", (0, 8))])
def test_a_link_that_reaches_half_takes_twice_as_long(link, ranks):
    full = machine(node_latency_seconds=0, network_latency_seconds=0)
    half = replace(full, **{f"{link}_efficiency": 0.5})
    for kind in KINDS:
        longer = seconds(half, ranks, 1 << 28, kind)
        assert longer == pytest.approx(2 * seconds(full, ranks, 1 << 28, kind))


def test_nodes_do_not_outrun_the_links_inside_them():
    hardware = machine(network_bytes_per_second=50e9, node_latency_seconds=0,
                       network_latency_seconds=0)  # fmt: skip
    across, size = seconds(hardware, range(16), 1 << 28), 4 << 28
    assert across == pytest.approx(15 / 16 * size / hardware.node_bytes_per_second)


def test_a_ring_waits_for_every_rank_and_a_tree_for_its_depth():
    """By hand, for 128 ranks on 16 nodes, without bytes."""
    ring = machine()
    assert seconds(ring, NODES, 0) == pytest.approx(112 * 1e-6 + 15 * 5e-6)
    assert seconds(ring, NODES, 0, REDUCE) == pytest.approx(2 * (112 * 1e-6 + 15 * 5e-6))
    tree = machine(tree_latency_seconds=9e-6, tree_bandwidth_share=0.5)
    assert seconds(tree, NODES, 0) == seconds(ring, NODES, 0)  # libraries have trees for sums
    assert seconds(tree, NODES, 0, REDUCE) == pytest.approx(2 * (7 * 1e-6 + 4 * 9e-6))
    assert seconds(tree, NODE, 0, REDUCE) == seconds(ring, NODE, 0, REDUCE)
    size, cards = 4 << 28, 8 * ring.network_bytes_per_second
    large = seconds(changed(tree, tree_bandwidth_share=1.0), NODES, 1 << 28, REDUCE)
    assert large == pytest.approx(2 * (7 * 1e-6 + 4 * 9e-6) + 2 * size / cards)


def test_hosts_post_the_messages_of_a_ring_that_spans_nodes():
    slow = machine(post_seconds=3e-6)
    assert seconds(slow, NODE, 0) == seconds(machine(), NODE, 0)
    assert seconds(slow, NODES, 0) == pytest.approx(112 * 3e-6 + 15 * 5e-6)


def test_with_one_rank_of_each_node_a_step_takes_as_long_as_in_a_tree():
    alone = machine(tree_latency_seconds=9e-6, tree_bandwidth_share=1.0)
    assert seconds(alone, range(0, 128, 8), 0) == pytest.approx(15 * 9e-6)
    assert seconds(machine(), range(0, 128, 8), 0) == pytest.approx(15 * 5e-6)


QUICK = protocol(name="quick", bandwidth_share=0.25, node_latency_seconds=1e-6)
WIDE = protocol(name="wide", bandwidth_share=1.0, node_latency_seconds=9e-6)


@pytest.mark.parametrize("order", [(QUICK, WIDE), (WIDE, QUICK)])
def test_the_fastest_protocol_is_taken(order):
    """Seven steps; the bytes with which both take as long are 7/8 of 21.3 MB."""
    both = machine(protocols=order)
    small, large = 1 << 10, 1 << 28
    assert seconds(both, NODE, small) == seconds(machine(protocols=(QUICK,)), NODE, small)
    assert seconds(both, NODE, large) == seconds(machine(protocols=(WIDE,)), NODE, large)
    latency = 7 * (9e-6 - 1e-6)
    even = latency / ((1 / 0.25 - 1) / both.node_bytes_per_second)  # bytes over a link
    numel = even / 4 * 8 / 7
    for share, latency in ((0.9, 7e-6), (1.1, 63e-6)):
        found = parts(both, NODE, int(share * numel))
        assert found.latency_seconds == pytest.approx(latency)


def test_a_protocol_may_have_a_limit_of_its_own():
    limits = {"node_limit_bytes_per_second": 50e9, "network_limit_bytes_per_second": 20e9}
    limited, free = machine(**limits), machine()
    for ranks, limit in ((NODE, 50e9), (NODES, 20e9)):
        transfer = parts(limited, ranks, 1 << 28).transfer_seconds
        assert transfer == pytest.approx((1 - 1 / len(ranks)) * (4 << 28) / limit)
        assert transfer > parts(free, ranks, 1 << 28).transfer_seconds


@pytest.mark.parametrize(
    "kind, ranks, link",
    [
        (GATHER, NODE, Link.NODE),
        (GATHER, (0, 8), Link.NETWORK),
        (GATHER, NODES, Link.NETWORK),
        (REDUCE, NODES, Link.NETWORK),
        (EXCHANGE, NODE, Link.NODE),
        (EXCHANGE, range(16), Link.NETWORK),
    ],
)
def test_a_collective_names_its_link(kind, ranks, link):
    found = parts(machine(), ranks, 1 << 28, kind)
    assert found.link == link == parts(machine(), ranks, 0, kind).link
    whole = seconds(machine(), ranks, 1 << 28, kind)
    assert whole == found.latency_seconds + found.transfer_seconds
    faster = machine(**{f"{link}_bytes_per_second": 1e12})
    assert parts(faster, ranks, 1 << 28, kind).transfer_seconds < found.transfer_seconds


def test_cards_that_outrun_the_links_of_a_node_leave_those_to_bound_a_ring():
    wide, wider = (machine(network_bytes_per_second=speed) for speed in (50e9, 100e9))
    ring, pair = range(16), (0, 8)
    assert parts(wide, ring, 1 << 28) == parts(wider, ring, 1 << 28)
    slower = machine(network_bytes_per_second=50e9, node_bytes_per_second=50e9)
    assert (
        parts(slower, ring, 1 << 28).transfer_seconds > parts(wide, ring, 1 << 28).transfer_seconds
    )
    assert parts(slower, pair, 1 << 28) == parts(wide, pair, 1 << 28)


def test_large_messages_use_all_cards_of_a_node():
    hardware = machine()
    size = 4 << 28
    one_card = 127 / 128 * size / hardware.network_bytes_per_second
    assert one_card / 8 < seconds(hardware, NODES, 1 << 28) < one_card / 7


def test_an_all_to_all_sends_to_other_nodes_through_the_card_of_each_rank():
    """Half of the bytes leave a node of two, 120 of 128 parts one of sixteen."""
    hardware = machine(node_latency_seconds=0, network_latency_seconds=0)
    size, one_card = 4 << 28, hardware.network_bytes_per_second
    for ranks, part in ((range(16), 8 / 16), (NODES, 120 / 128), ((0, 8), 1 / 2)):
        found = seconds(hardware, ranks, 1 << 28, EXCHANGE)
        assert found == pytest.approx(part * size / one_card)
    inside = seconds(hardware, NODE, 1 << 28, EXCHANGE)
    assert inside == pytest.approx(7 / 8 * size / hardware.node_bytes_per_second)


def test_an_all_to_all_is_a_message_to_each_rank():
    hardware = machine(post_seconds=2e-6)
    assert seconds(hardware, NODE, 0, EXCHANGE) == pytest.approx(7 * 1e-6)
    assert seconds(hardware, range(16), 0, EXCHANGE) == pytest.approx(14 * 2e-6 + 5e-6)


def test_pairs_do_not_use_every_protocol():
    ring_only = replace(QUICK, sends_pairs=False)
    both, wide = machine(protocols=(ring_only, WIDE)), machine(protocols=(WIDE,))
    assert seconds(both, NODE, 8, EXCHANGE) == seconds(wide, NODE, 8, EXCHANGE)
    assert seconds(both, NODE, 8) < seconds(wide, NODE, 8)


@pytest.mark.parametrize("ranks", [NODE, range(16)], ids=["node", "nodes"])
def test_an_uneven_all_to_all_ends_with_its_slowest_pair(ranks):
    hardware = machine(node_latency_seconds=0, network_latency_seconds=0)
    even = collective(EXCHANGE, tuple(ranks), numel=1 << 20)
    share = even.input_bytes // len(ranks)

    def longer(**sizes):
        found = collective_seconds(replace(even, **sizes), hardware)
        return found / collective_seconds(even, hardware)

    assert longer(largest_split_bytes=share) == 1
    assert longer(output_bytes=3 * even.output_bytes) == pytest.approx(3)
    assert longer(input_bytes=3 * even.input_bytes) == pytest.approx(3)
    assert longer(output_bytes=0) == 1
    assert longer(largest_split_bytes=5 * share) == pytest.approx(5)


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
    """A chain of eight ranks on one node takes seven steps, whoever sits elsewhere."""
    hardware = machine(tree_latency_seconds=2e-6, tree_bandwidth_share=1.0)
    assert seconds(hardware, range(9), 0, REDUCE) == pytest.approx(2 * (7 * 1e-6 + 2e-6))


def test_nccl_takes_another_protocol_for_each_size():
    """A node of H100: 4.2 us in 7 steps at half of the bandwidth, 13.3 at 0.92, 23.8 at all."""
    hardware = load_hardware("h100-sxm")
    bases = [
        next(e for e in hardware.protocols if e.name == name) for name in ("LL", "LL128", "Simple")
    ]
    latencies = [e.base_seconds + 7 * e.node_latency_seconds for e in bases]
    assert latencies == pytest.approx([10.8e-6, 27.3e-6, 32.2e-6])
    found = [parts(hardware, NODE, numel).latency_seconds for numel in (1, 1 << 22, 1 << 28)]
    assert found == pytest.approx([10.8e-6, 27.3e-6, 32.2e-6])
