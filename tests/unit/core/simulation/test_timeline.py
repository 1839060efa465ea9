"""A step simulated on streams."""

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given

from graph_trainer.core.analysis.collective_purpose import Traffic
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.annotations import Role
from graph_trainer.core.graph.host_copies import OFFLOAD, WAIT_COPY
from graph_trainer.core.simulation.hardware import Link
from graph_trainer.core.simulation.op_costs import Cost, CostKind, costs
from graph_trainer.core.simulation.timeline import (
    COMPUTE,
    COPIES_IN,
    describe_ranks,
    play,
    stream_names,
    stretched,
)
from graph_trainer.testing import Builder
from tests.examples import examples
from tests.unit.core.simulation.machines import GROUPS, machine, random_graph, same_seconds, steps
from tests.unit.graphs import aten, c10d, collective


class Steps(Builder):
    """A graph of compute nodes of a second each, and collectives on named groups."""

    def __init__(self):
        super().__init__()
        self.x = self.input("x", 4)

    def compute(self, source=None):
        return self.call(aten.relu.default, source or self.x)

    def start(self, group="a", **how):
        return self.call(c10d.all_reduce.default, self.x, "sum", group, **how)

    def wait(self, started):
        return self.call(c10d.wait_tensor.default, started)

    def played(self, *, collective_seconds=0.0, hardware=None):
        joint = self.joint(self.call(aten.sum.default, self.x))
        free = Cost(CostKind.FREE, 0.0, 0, 0)
        second = Cost(CostKind.MEMORY, 1.0, 0, 0)
        cost = {n: second if n.target is aten.relu.default else free for n in joint.graph.nodes}
        joint.groups = GROUPS
        return play(joint, collectives(joint), cost, hardware or same_seconds(collective_seconds))


A, B = (describe_ranks(GROUPS[name]) for name in "ab")


# In a program "c" computes, "v" is a view, "a" and "b" start a collective on that group, and a
# number waits for the node at that place. Of each exposed wait: its place, that of the node that
# it delays, and the seconds.
PROGRAMS = {
    "hidden": ("a c c c 0 c", 3.0, 4.0, []),
    "a wait blocks": ("c a c 1 c", 2.5, 4.5, [(3, 4, 1.5)]),
    "nothing to delay": ("a 0", 2.0, 2.0, [(1, None, 2.0)]),
    "waits in a row delay one node": ("a a 0 1 v c", 2.0, 5.0, [(2, 5, 2.0), (3, 5, 2.0)]),
    "one stream a group": ("a a 0 1", 2.0, 4.0, [(2, None, 2.0), (3, None, 2.0)]),
    "groups overlap": ("a b 0 1", 2.0, 2.0, [(2, None, 2.0)]),
    "never waited for": ("a c", 5.0, 5.0, []),
    "waited for twice": ("a 0 0", 2.0, 2.0, [(1, None, 2.0)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_takes_and_where_it_waits(name):
    program, collective_seconds, step_seconds, exposed = PROGRAMS[name]
    b, nodes, program = Steps(), [], program.split()
    for step in program:
        if step.isdigit():
            nodes.append(b.wait(nodes[int(step)]))
        elif step in "ab":
            nodes.append(b.start(step))
        else:
            nodes.append(b.compute() if step == "c" else b.call(aten.t.default, b.x))
    found = b.played(collective_seconds=collective_seconds)
    assert found.step_seconds == step_seconds
    place = {None: None} | {node: i for i, node in enumerate(nodes)}
    assert [(place[e.wait], place[e.delayed], e.seconds) for e in found.exposed] == exposed
    assert all(place[e.collective.node] == int(program[place[e.wait]]) for e in found.exposed)


def test_a_wait_does_not_delay_the_copies_of_its_bucket():
    b = Steps()
    wait = b.wait(b.start(role=Role.UNSHARD, parameter="v, w"))
    b.call(aten.relu.default, wait, role=Role.UNSHARD, parameter="v")
    delayed = b.compute()
    found = b.played(collective_seconds=2.0)
    assert [(e.wait, e.delayed, e.seconds) for e in found.exposed] == [(wait, delayed, 2.0)]
    assert found.step_seconds == 4.0 and found.exposed_seconds() == {Traffic.UNSHARD: 2.0}


def test_communication_uses_a_part_of_the_device():
    b = Steps()
    b.start()
    b.compute()
    b.compute()
    hardware = same_seconds(1.0, collective_compute_share=0.5)
    found = b.played(hardware=hardware)
    lengths = [e.seconds for e in found.events if e.stream == COMPUTE]
    assert lengths == [1.5, 1.0]  # half of the first is done when the collective is


@pytest.mark.parametrize("seconds, communicating, takes", [
    (1.0, 0.0, 1.0), (1.0, -1.0, 1.0), (1.0, 2.0, 2.0), (1.0, 5.0, 2.0), (1.0, 1.0, 1.5),
])  # fmt: skip
def test_a_kernel_is_stretched_while_anything_is_communicated(seconds, communicating, takes):
    assert stretched(seconds, communicating, machine(collective_compute_share=0.5)) == takes


def test_groups_with_one_short_name_are_two_streams():
    groups = [(0, 1, 2, 3, 9), (0, 1, 4, 5, 9), (0, 1, 6, 7, 9), (0, 1)]
    names = stream_names([collective(ranks=ranks) for ranks in [*groups, *groups]])
    assert list(names) == groups and len(set(names.values())) == len(groups)
    assert all(len(name) < 40 for name in names.values())
    assert describe_ranks(tuple(range(4096))) == "4096 ranks 0, 1, ... 4095"


@examples(40, suppress_health_check=list(HealthCheck))
@given(program=steps)
def test_of_every_step(program):
    joint = random_graph(program)
    joint.groups = GROUPS
    found = collectives(joint)
    hardware = same_seconds(3e-7)
    cost = costs(joint, hardware)
    timeline = play(joint, found, cost, hardware)
    nodes = list(joint.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}

    streams = defaultdict(list)
    for event in timeline.events:
        streams[event.stream].append(event)
    for name, events in streams.items():
        end = 0.0  # in order, one at a time, each as soon as it can
        for event in events:
            assert event.start == pytest.approx(max(end, timeline.starts[place[event.node]]))
            end = event.start + event.seconds
        assert [e.node for e in events] == [n for n in nodes if n in {e.node for e in events}]
        assert timeline.busy[name] == pytest.approx(sum(e.seconds for e in events))
        assert events[-1].start + events[-1].seconds <= timeline.step_seconds + 1e-12

    computing = [n for n in nodes if cost[n].seconds]
    assert [e.node for e in streams[COMPUTE]] == computing
    exposed = sum(e.seconds for e in timeline.exposed)
    at_end = timeline.busy.get(COMPUTE, 0.0) + exposed  # everything is waited for
    assert timeline.step_seconds == pytest.approx(at_end)
    assert timeline.step_seconds >= max(timeline.busy.values(), default=0.0) - 1e-12
    assert sum(timeline.exposed_seconds().values()) == pytest.approx(exposed)

    assert len(timeline.starts) == len(nodes) and timeline.starts == sorted(timeline.starts)
    begins = {e.node: e.start for e in timeline.events}
    assert all(begins[n] == timeline.starts[place[n]] for n in computing)
    ends = {e.node: e.start + e.seconds for e in timeline.events}
    for each in timeline.exposed:
        after = [n for n in computing if place[n] > place[each.wait]]
        assert each.delayed is (after[0] if after else None) and each.seconds > 0
        if each.delayed is not None:
            assert begins[each.delayed] >= ends[each.collective.node] - 1e-12


def copying(shared_links):
    """A GPU that sends 8 bytes to host memory while a collective across nodes moves its bytes,
    each for a second."""
    b = Steps()
    b.wait(b.start("b"))
    copy = b.call(OFFLOAD, b.x)
    b.wait(b.start("b"))
    b.call(WAIT_COPY, copy, b.x)
    hardware = machine(
        devices_per_node=1,
        node_latency_seconds=0.0,
        network_latency_seconds=0.0,
        network_bytes_per_second=16.0,
        shared_links=shared_links,
    )
    joint = b.joint(b.call(aten.sum.default, b.x))
    joint.groups = GROUPS
    free = Cost(CostKind.FREE, 0.0, 0, 0)
    cost = dict.fromkeys(joint.graph.nodes, free)
    cost[copy] = Cost(CostKind.HOST_COPY, 0.0, 0, 10**9)
    return play(joint, collectives(joint), cost, hardware)


def test_transfers_over_one_link_take_turns():
    assert copying(()).step_seconds == pytest.approx(2.0)
    assert copying((Link.NETWORK, Link.HOST)).step_seconds == pytest.approx(3.0)


def test_two_groups_share_a_network_card_and_not_their_latencies():
    b = Steps()
    started = [b.start("a"), b.start("b")]
    for node in started:
        b.wait(node)
    apart = {"devices_per_node": 1, "network_bytes_per_second": 16.0, "base_seconds": 0.5}
    hardware = machine(node_latency_seconds=0.0, network_latency_seconds=0.0, **apart)
    assert b.played(hardware=hardware).step_seconds == pytest.approx(0.5 + 1.0 + 1.0)


@pytest.mark.parametrize(("kernels", "beside", "alone"), [(4, 4.0, 5.0), (2, 4.0, 4.0)])
def test_what_a_gather_sends_is_copied_beside_compute(kernels, beside, alone):
    """A copy of a second and a gather of three, and kernels of a second until the wait for it."""
    b = Steps()
    copy = b.compute()
    gather = b.call(c10d.all_gather_into_tensor.default, copy, 2, "a")
    for _ in range(kernels):
        b.compute()
    b.wait(gather)
    joint = b.joint(b.call(aten.sum.default, b.x))
    free, second = Cost(CostKind.FREE, 0.0, 0, 0), Cost(CostKind.MEMORY, 1.0, 0, 0)
    cost = {n: second if n.target is aten.relu.default else free for n in joint.graph.nodes}
    joint.groups = GROUPS
    found = [
        play(joint, collectives(joint), cost, same_seconds(3.0), copied_beside=of)
        for of in ({copy: gather}, {})
    ]
    assert [timeline.step_seconds for timeline in found] == [beside, alone]
    assert [timeline.busy.get(COPIES_IN, 0.0) for timeline in found] == [1.0, 0.0]
    assert found[0].busy[COMPUTE] == kernels
