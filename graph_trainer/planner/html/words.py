"""What the page calls things, and how it writes sizes and times."""

from __future__ import annotations

from graph_trainer.core.analysis.collective_purpose import Traffic
from graph_trainer.core.simulation.op_costs import Kind
from graph_trainer.planner.trace import WAIT

TRAFFIC = {
    Traffic.UNSHARD: "gathers parameters",
    Traffic.REDUCE_GRAD: "reduces gradients",
    Traffic.TENSOR_PARALLEL: "tensor parallelism",
    Traffic.OTHER: "other communication",
}

# What a slice may be: kinds of compute, kinds of communication, a wait.
KINDS = {
    Kind.MATMUL.value: "matmuls",
    Kind.ATTENTION.value: "attention",
    Kind.MEMORY.value: "memory-bound",
    **{traffic.value: title for traffic, title in TRAFFIC.items()},
    WAIT: "compute waits",
}


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them: '12.3 ms'."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:,.1f} ms"
    return f"{seconds * 1e6:,.1f} µs"
