"""What limits a step: the same step with a tenth less power, bandwidth, network or host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from graph_trainer.core.simulation.hardware import Hardware, Host
from graph_trainer.planner.plan import Limit, Plan

_LESS = 0.1


def limits_of(plan: Plan) -> tuple[Limit, ...]:
    """Time a plan's step on its hardware with a tenth less of one thing at a time.

    Memory is not simulated again. Linear in nodes.

    Returns:
        the changes, the one after which the step takes longest first.
    """
    limits = []
    for what, change, hardware in _slower(plan.hardware):
        longer = plan.retimed(hardware).step_seconds / plan.step_seconds - 1
        limits.append(Limit(what, change, longer))
    return tuple(sorted(limits, key=lambda limit: -limit.longer))


def _slower(hardware: Hardware) -> Iterator[tuple[str, str, Hardware]]:
    """Yield what may limit a step, the change, and the hardware with less of it."""
    less, part = 1 - _LESS, f"{_LESS:.0%}"
    if hardware.device != "cpu":
        yield (
            "power, which sets the clock of matmuls",
            f"{part} less power",
            replace(hardware, power_limit_watts=less * hardware.power_limit_watts),
        )
    yield (
        "memory bandwidth",
        f"{part} less memory bandwidth",
        replace(hardware, memory_bytes_per_second=less * hardware.memory_bytes_per_second),
    )
    yield (
        "the network",
        f"{part} less bandwidth between devices",
        replace(
            hardware,
            node_bytes_per_second=less * hardware.node_bytes_per_second,
            network_bytes_per_second=less * hardware.network_bytes_per_second,
        ),
    )
    seconds = {f.name: (1 + _LESS) * getattr(hardware.host, f.name) for f in fields(Host)}
    yield "the host", f"a host {part} slower", replace(hardware, host=Host(**seconds))
