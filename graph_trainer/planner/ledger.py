"""The ledger: the graph after every pass, simulated on one rank and some hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from graph_trainer.core.analysis.collective_purpose import Traffic, traffic_of
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.core.passes.pipeline import pass_by_pass
from graph_trainer.core.passes.report import PassRun
from graph_trainer.core.simulation.simulate import Simulation

_NO_PASS = PassRun("", 0.0)


@dataclass(frozen=True, slots=True)
class Volume:
    """A number of collectives and the bytes that they move."""

    count: int = 0
    bytes: int = 0
    """The larger of what each reads and writes on this rank, summed."""

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.count + other.count, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow(PassRun):
    """A pass and the graph after it, simulated; the first row is the graph as captured."""

    nodes: int
    collectives: dict[tuple[str, str, Traffic], Volume]
    """By kind, phase and purpose."""
    peak_bytes: int
    """The most bytes alive at once on this rank, the caller's tensors included."""
    step_seconds: float
    """Forward, loss and backward of one microbatch."""
    exposed_seconds: dict[Traffic, float]
    host_wait_seconds: float
    """The seconds that compute waits for the host to issue its next node."""

    @property
    def exposed(self) -> float:
        """The seconds that compute waits for communication, in all."""
        return sum(self.exposed_seconds.values())


def ledger(
    joint: JointGraph,
    passes: PassConfig,
    simulate: Callable[[JointGraph], Simulation],
    *,
    on_pass: Callable[[str], None] | None = None,
    agreement: Agreement | None = None,
) -> tuple[list[LedgerRow], Simulation]:
    """Run the passes on a graph, in place, and simulate it after each that changed anything.

    A step that needs more than the limit is not refused.

    Returns:
        the rows, first that of the graph as captured; and the simulation of the last graph.
    """
    rows: list[LedgerRow] = []
    for run in pass_by_pass(joint, passes, on_pass=on_pass, agreement=agreement, refuses=False):
        if not rows or run.changed:
            simulation = simulate(joint)
            row = row_of(simulation)
        remarks = (*run.remarks, *filter(None, [run.verified]))
        rows.append(replace(row, **asdict(run) | {"remarks": remarks}))
    return rows, simulation


def row_of(simulation: Simulation, run: PassRun = _NO_PASS) -> LedgerRow:
    """Compute the row of a simulated graph after a pass. Linear in collectives."""
    traffic = traffic_of(simulation.collectives, dict(simulation.joint.gradients()))
    volumes: dict[tuple[str, str, Traffic], Volume] = {}
    for c in simulation.collectives:
        key = (c.kind, c.phase.value if c.phase else "", traffic[c.node])
        moved = Volume(1, max(c.input_bytes, c.output_bytes))
        volumes[key] = volumes.get(key, Volume()) + moved
    return LedgerRow(
        **asdict(run),
        nodes=sum(1 for _ in compute_nodes(simulation.joint.graph)),
        collectives=volumes,
        peak_bytes=simulation.memory.peak_bytes,
        step_seconds=simulation.timeline.step_seconds,
        exposed_seconds=simulation.timeline.exposed_seconds(),
        host_wait_seconds=simulation.timeline.host_wait_seconds,
    )
