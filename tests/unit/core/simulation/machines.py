"""Hardware in round numbers, GPUs that are not there, and random graphs to play on them."""

from dataclasses import fields, replace
from types import SimpleNamespace

import torch
from hypothesis import strategies as st

from graph_trainer.core.graph.annotations import Phase
from graph_trainer.core.simulation.hardware import Hardware, Host, Protocol
from graph_trainer.core.units import GIB
from graph_trainer.testing import Builder
from tests.unit.graphs import aten, c10d

GROUPS = {"a": (0, 1), "b": (0, 2)}
"""The process groups of random graphs, by name."""

INSTANT = Host(**{f.name: 0.0 for f in fields(Host)})
"""A host that takes no time."""

_OF_PROTOCOLS = {field.name for field in fields(Protocol)} - {"name"}


def protocol(**changes):
    """A protocol with round latencies, no time for a launch, and the whole of every link."""
    values = {
        "name": "round",
        "base_seconds": 0.0,
        "node_latency_seconds": 1e-6,
        "network_latency_seconds": 5e-6,
    }
    return Protocol(**(values | changes))


def machine(**changes):
    """A machine on which everything takes a round number of seconds, and no launch any.

    Args:
        changes: of the machine, or of its one protocol.
    """
    of_protocol = {key: changes.pop(key) for key in _OF_PROTOCOLS & changes.keys()}
    values = {
        "name": "round",
        "device": "cuda",
        "memory_gib": 1.0,
        "memory_reserved_gib": 0.0,
        "memory_bytes_per_second": 1e9,
        "compute_units": 1,
        "compute_capability": 9.0,
        "memory_latency_seconds": 0.0,
        "peak_flops": {"float32": 1e9, "bfloat16": 4e9},
        "matmul_efficiency": 0.5,
        "attention_efficiency": 0.25,
        "memory_efficiency": 1.0,
        "launch_seconds": 0.0,
        "power_watts": 100,
        "power_limit_watts": 100,
        "power_idle_watts": 10,
        "speed_spread": 0.0,
        "devices_per_node": 8,
        "node_bytes_per_second": 100e9,
        "node_efficiency": 1.0,
        "network_bytes_per_second": 10e9,
        "network_efficiency": 1.0,
        "host_bytes_per_second": 1e9,
        "host_efficiency": 1.0,
        "host_memory_gib": 8.0,
        "shared_links": (),
        "protocols": (protocol(**of_protocol),),
        "collective_compute_share": 0.0,
        "host": INSTANT,
    }
    return Hardware(**(values | changes))


def changed(hardware, **changes):
    """The same machine with other values; those of protocols go to every one."""
    of_protocol = {key: changes.pop(key) for key in _OF_PROTOCOLS & changes.keys()}
    protocols = tuple(replace(entry, **of_protocol) for entry in hardware.protocols)
    return replace(hardware, protocols=protocols, **changes)


def same_seconds(seconds, **changes):
    """A machine on which every collective takes `seconds`."""
    return machine(
        base_seconds=seconds,
        node_latency_seconds=0.0,
        network_latency_seconds=0.0,
        node_bytes_per_second=1e300,
        network_bytes_per_second=1e300,
        **changes,
    )


def has(monkeypatch, name, gib, major=9, minor=0):
    """Make this a machine with a GPU of that name."""
    found = SimpleNamespace(name=name, total_memory=int(gib * GIB), major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)


_OPS = ("add", "mul", "relu", "transpose", "mm", "sum", "start", "wait")

_numbers = st.integers(0, 99)
steps = st.lists(
    st.tuples(st.sampled_from(_OPS), _numbers, _numbers, st.sampled_from(Phase)),
    min_size=1,
    max_size=25,
)
"""What `random_graph` makes nodes of."""


def random_graph(program):
    """Elementwise ops, views, matmuls and collectives that are waited for sooner or later."""
    b = Builder()
    values = [b.input("x", 4, 4), b.input("y", 4, 4)]
    under_way = []
    for op, one, two, phase in program:
        x, y = values[one % len(values)], values[two % len(values)]
        if op == "start":
            group = "ab"[two % 2]
            under_way.append(b.call(c10d.all_reduce.default, x, "sum", group, phase=phase))
        elif op == "wait":
            if under_way:
                started = under_way.pop(one % len(under_way))
                values.append(b.call(c10d.wait_tensor.default, started, phase=phase))
        elif op == "sum":
            row = b.call(aten.sum.dim_IntList, x, [1], True, phase=phase)
            values.append(b.call(aten.expand.default, row, [4, 4], phase=phase))
        elif op in ("relu", "transpose"):
            called = aten.relu.default if op == "relu" else aten.t.default
            values.append(b.call(called, x, phase=phase))
        else:
            called = {"add": aten.add.Tensor, "mul": aten.mul.Tensor, "mm": aten.mm.default}[op]
            values.append(b.call(called, x, y, phase=phase))
    values += [b.call(c10d.wait_tensor.default, n) for n in under_way]
    return b.joint(b.call(aten.sum.default, values[-1]))
