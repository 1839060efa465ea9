"""A graph as it is scheduled: nodes by place, with what a schedule may know of them.

Ranks of one group must issue the same collectives in the same order. A schedule that decides by
simulated time and memory gives them the same order only if both are the same on each rank. What
differs from rank to rank is left out or replaced:

- A rank may store fewer rows of a parameter than others, or none. Preparing a shard to be gathered
  costs nothing, and counts as the padded bytes that are sent. Nodes after a reduction cost nothing
  and have as many elements as the ranks receive.
- The links of a group are those of the group that begins with rank 0: whether a group lies within
  one machine or a parallel group across two must not change the order.
- A parameter that is gathered along one axis after another makes every group one of the following
  kind: `fuse_chained_all_gathers` gathers such parameters at once.
- Groups over which anything but parameters and gradients is communicated may join ranks that
  compute different things, as tensor parallelism over an uneven number of heads does. The
  collectives over them keep their order, whatever the simulated time is (`Kind.OTHER`).

Ranks along all other groups compute on tensors of the same shapes, each on a batch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import fx

from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.simulation.op_costs import Cost


class Kind(Enum):
    """What a schedule may do with a node."""

    PLAIN = "plain"
    """Computes; may run earlier."""
    FREE = "free"
    """Takes no time and no memory; may also run later."""
    TAIL = "tail"
    """Between a reduction and the gradients that the graph returns; may run later."""
    WAIT = "wait"
    """Waits for a collective; may run later."""
    GATHER = "gather"
    """Starts a gather of parameters; may start earlier."""
    REDUCTION = "reduction"
    """Starts a reduction of gradients; may start earlier."""
    OTHER = "other"
    """Starts another collective; keeps its order among nodes of this kind; may start earlier."""
    FIXED = "fixed"
    """Keeps its place."""


@dataclass(slots=True)
class LaunchGroup:
    """What starts one gather or reduction: the nodes that prepare it, and the collective."""

    places: list[int]
    backward: bool
    bytes: int
    """What the collective sends and receives."""
    scratch_bytes: int
    """Bytes that preparing it takes at most, beside what is counted node by node."""

    @property
    def start(self) -> int:
        """The place of the collective."""
        return self.places[-1]


@dataclass(slots=True, eq=False)
class Stored:
    """One storage that the graph allocates. Equal to itself alone."""

    bytes: int
    born: int
    """The place of the node that allocates it."""
    last: int
    """The place of the last node that uses it."""
    readers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class ScheduleGraph:
    """The nodes of a graph by place. Lists have one entry a place."""

    nodes: list[fx.Node]
    kind: list[Kind]
    reads: list[set[int]]
    """What must run before: what a node reads, and what it may not overtake."""
    seconds: list[float]
    """Simulated time; of a collective the time on its group."""
    local: list[bool]
    """Whether other ranks may not have the node: it prepares a shard, or is a view of the rows of
    a gradient that this rank stores."""
    heavy: list[bool]
    """Whether the node is a matrix product or attention."""
    backward: list[bool]
    group: dict[int, tuple[int, ...]]
    """By collective, the ranks of its group."""
    issuer: dict[int, int]
    """By wait, the collective that it waits for."""
    makes: list[list[Stored]]
    keeps_alive: list[list[Stored]]
    """What stays allocated while a node is deferred: what it reads, or its collective does."""
    left: list[tuple[int, list[int]]]
    """The peak, and how many bytes fewer are alive at every place: as the ops run one by one, and
    as they run fused."""
    issued: list[Collective]
    cost: dict[fx.Node, Cost]
    """What this rank's nodes cost: for remarks alone, never for a decision."""
    gathers: list[LaunchGroup]
    reductions: list[LaunchGroup]
    others: list[int]
    """The places of kind `OTHER`."""
