"""A step with copies to host memory: what it needs on device and host, and how long it takes."""

from collections import Counter

import pytest
import torch

from graph_trainer.core.analysis.memory import Category
from graph_trainer.core.graph.annotations import set_offload
from graph_trainer.core.graph.host_copies import OFFLOAD, RELOAD, WAIT_COPY, is_host_copy
from graph_trainer.core.passes.offload_activations import (
    OffloadActivationsOptions,
    offload_activations,
)
from graph_trainer.core.simulation.op_costs import CostKind
from graph_trainer.core.simulation.simulate import OtherMemory, simulate
from graph_trainer.core.simulation.timeline import COMPUTE, FROM_HOST, TO_HOST
from graph_trainer.testing import Builder
from tests.unit.core.simulation.machines import machine
from tests.unit.graphs import BACKWARD, LOSS, aten

BYTES = 4 * 1000


def steps(*program):
    """A graph of kernels of a second each, between which copies start and end.

    "x" makes a value and "c" computes; "out", "stored", "back" and "again" are a value's copies.
    """
    b = Builder()
    x = value = b.input("x", 1000)
    made = {}
    for step in program:
        if step in ("x", "c"):
            value = b.call(aten.tanh.default, value)
            made["c"] = value
            made.setdefault(step, value)
        elif step == "out":
            made[step] = b.call(OFFLOAD, made["x"])
        elif step == "stored":
            made[step] = b.call(WAIT_COPY, made["out"], made["x"])
        elif step == "back":
            device = torch.device("cpu")
            made[step] = b.call(RELOAD, made["stored"], device, phase=BACKWARD)
        else:
            made[step] = b.call(WAIT_COPY, made["back"], made["stored"], phase=BACKWARD)
    read = made.get("again", made["x"])
    last = b.call(aten.mul.Tensor, value, read, phase=BACKWARD)
    return b.joint(b.call(aten.sum.default, last, phase=BACKWARD)), x


def simulated(*program, link_seconds=1.0, device="cuda", **other):
    joint, _ = steps(*program)
    hardware = machine(
        device=device,
        memory_bytes_per_second=2 * BYTES,
        host_bytes_per_second=BYTES / link_seconds,
    )
    return simulate(joint, hardware, OtherMemory(**other))


PLAIN = simulated("x", "c", "c", "c").timeline.step_seconds
AWAY = ("x", "out", "c", "stored", "c", "c", "back", "c", "again")


@pytest.mark.parametrize(
    ("program", "link_seconds", "idle"),
    [
        (AWAY, 1.0, 0.0),
        (AWAY, 1.5, 1.0),  # half a second at each wait
        (("x", "out", "stored", "c", "c", "c", "c", "back", "again"), 1.0, 2.0),
        (("x", "out", "c", "c", "c", "c", "stored", "back", "again"), 3.0, 3.0),
    ],
)
def test_a_copy_runs_beside_compute_and_compute_waits_for_a_slow_link(program, link_seconds, idle):
    found = simulated(*program, link_seconds=link_seconds).timeline
    plain = simulated(*(step for step in program if step in ("x", "c"))).timeline
    assert found.copy_wait_seconds == pytest.approx(idle)
    assert found.step_seconds == pytest.approx(plain.step_seconds + idle)
    assert found.busy[TO_HOST] == found.busy[FROM_HOST] == pytest.approx(link_seconds)
    assert found.busy[COMPUTE] == pytest.approx(plain.busy[COMPUTE])
    assert not found.exposed, "nothing is communicated between ranks"


def test_copies_of_one_direction_follow_each_other_and_the_directions_do_not():
    b = Builder()
    x = b.input("x", 1000)
    two = [b.call(OFFLOAD, x) for _ in range(2)]
    stored = [b.call(WAIT_COPY, n, x) for n in two]
    back = [b.call(RELOAD, n, torch.device("cpu")) for n in (two[0], stored[0])]
    done = [b.call(WAIT_COPY, n, s) for n, s in zip(back, stored, strict=True)]
    joint = b.joint(b.total(*done))
    hardware = machine(host_bytes_per_second=BYTES, host_efficiency=0.5)
    events = {e.node: e for e in simulate(joint, hardware).timeline.events}
    assert [(events[n].start, events[n].seconds) for n in two] == [(0.0, 2.0), (2.0, 2.0)]
    assert [events[n].start for n in back] == [4.0, 6.0]
    assert {events[n].stream for n in back} == {FROM_HOST}


def test_a_copy_takes_nothing_of_the_compute_units():
    joint, _ = steps(*AWAY)
    shared = machine(memory_bytes_per_second=2 * BYTES, host_bytes_per_second=BYTES,
                     collective_compute_share=0.5)  # fmt: skip
    assert simulate(joint, shared).timeline.step_seconds == pytest.approx(
        simulated(*AWAY).timeline.step_seconds
    )


def test_a_value_is_on_the_device_until_its_copy_is_complete_and_again_from_the_copy_back():
    joint, x = steps(*AWAY)
    memory = simulate(joint, machine()).memory
    order = list(joint.graph.nodes)
    (stored, again) = (i for i, n in enumerate(order) if n.target is WAIT_COPY)
    (back,) = (i for i, n in enumerate(order) if n.target is RELOAD)
    copied = order[again].args[0]
    spans = {s.node: (s.born, s.last, s.bytes) for s in memory.storages}
    source = next(n.args[0] for n in order if n.target is OFFLOAD)
    assert spans[source] == (order.index(source), stored, BYTES)
    assert spans[copied] == (back, again + 1, BYTES)
    assert not any(n.target is OFFLOAD for n in spans), "host memory is not the device's"
    assert memory.host_bytes == 4096, "pinned memory comes in powers of two"
    assert simulated("x", "c", "c").memory.host_bytes == 0


def test_on_a_cpu_host_memory_is_the_devices_and_copies_are_kernels():
    found, plain = simulated(*AWAY, device="cpu"), simulated("x", "c", "c", "c", "c", device="cpu")
    assert found.memory.host_bytes == BYTES
    assert found.memory.peak_bytes >= plain.memory.peak_bytes
    copies = [s for s in found.memory.storages if s.node.target is OFFLOAD]
    assert [(s.bytes, s.category) for s in copies] == [(BYTES, Category.ACTIVATIONS)]
    starts = [n for n in found.costs if n.target in (OFFLOAD, RELOAD)]
    assert all(found.costs[n].seconds == pytest.approx(1.0) for n in starts)
    assert not {TO_HOST, FROM_HOST} & found.timeline.busy.keys()
    assert found.timeline.copy_wait_seconds == 0


@pytest.mark.parametrize("fused", [False, True])
def test_copies_are_never_fused_and_what_is_copied_is_stored(fused):
    found = simulated(*AWAY, fused=fused)
    nodes = [n for n in found.costs if is_host_copy(n)]
    assert Counter(found.costs[n].kind for n in nodes) == {CostKind.HOST_COPY: 2, CostKind.FREE: 2}
    made = {s.node for s in found.memory.storages}
    (source,) = (n.args[0] for n in nodes if n.target is OFFLOAD)
    assert source in made and next(n for n in nodes if n.target is RELOAD) in made


def blocks(number, size=256):
    """A value a block that backward reads, and a loss with a large scratch value."""
    b = Builder()
    value, w, made = b.input("x", size, 4), b.parameter("w", 4, 4), []
    for i in range(number):
        value = b.call(aten.mm.default, value, w, module=f"layers.{i}")
        made.append(value)
    big = b.call(aten.cat.default, [value] * (2 * number), phase=LOSS)
    loss = b.total(big, phase=LOSS)
    grad = b.call(aten.neg.default, value, phase=BACKWARD)
    for i in reversed(range(number)):
        how = {"phase": BACKWARD, "module": f"layers.{i}"}
        grad = b.call(aten.neg.default, grad, **how)
        grad = b.call(aten.mul.Tensor, grad, made[i], **how)
    weight = b.call(aten.new_zeros.default, grad, [4, 4], phase=BACKWARD)
    for node in made[:-1]:
        set_offload(node)
    return b.joint(loss, w=weight), size * 4 * 4


def test_the_predicted_peak_falls_by_what_is_away_at_the_peak():
    joint, size = blocks(6)
    fast, slow = (machine(host_bytes_per_second=speed) for speed in (1e12, 1e3))
    before = simulate(joint, fast)
    offload_activations(joint, OffloadActivationsOptions(min_bytes=0))
    after = simulate(joint, fast)
    # at the peak, in the loss, the copy of the last but one is not waited for yet
    assert before.memory.peak_bytes - after.memory.peak_bytes == 4 * size
    assert after.memory.host_bytes == 5 * size
    assert before.timeline.step_seconds <= after.timeline.step_seconds
    assert after.timeline.step_seconds == pytest.approx(before.timeline.step_seconds, rel=1e-3)
    assert simulate(joint, slow).timeline.step_seconds > 5 * after.timeline.step_seconds
