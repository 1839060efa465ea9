"""The sequence of collectives that one rank issues, with what other ranks must agree on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graph_trainer.core.analysis.collectives import Entry, collective_of, issued
from graph_trainer.core.graph.annotations import module_of
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    collective_kind,
    is_collective,
    is_getitem,
    is_wait,
    schema_of,
    subgraphs,
)

# Namespaces whose ops only compute, whatever their names.
_COMPUTE = {"aten", "graph_trainer", "inductor", "prim", "prims", "torchtitan"}
# Modules of the functions that compute with sizes.
_ARITHMETIC = {"_operator", "math", "torch"}


@dataclass(frozen=True, slots=True)
class Issued:
    """One collective in the sequence that a rank issues; or an op that may be a collective."""

    entry: Entry
    """What the other ranks of its group must agree on."""
    waited_after: int | None
    """How many collectives are issued before the wait for it; None without a wait."""
    line: str
    """The text of the collective in messages, with module and node."""
    where: str = ""
    """Module and node alone."""

    @property
    def ranks(self) -> Ranks:
        """The global ranks of its group."""
        return self.entry[1]


Sequence = list[Issued]
"""What one rank issues, in order."""


def waited_text(issued: Issued) -> str:
    """Describe when a collective is waited for."""
    after = issued.waited_after
    return "never waited for" if after is None else f"waited for when {after} are issued"


def issued_by(joint: JointGraph, world_size: int) -> Sequence:
    """List what the rank that captured `joint` issues. Linear in nodes.

    An unknown op counts as communication among all ranks that ends before the op returns. Errors
    are those of `collectives`.
    """
    all_ranks = tuple(range(world_size))
    sequence = []
    for node, waited_after in issued(joint.graph, may_communicate):
        if is_collective(node):
            c = collective_of(node, joint.ranks_of, waited_after)
            sequence.append(Issued(c.entry(), waited_after, c.describe(), c.where))
        else:
            where = f"in module '{module_of(node)}' (node {node.name})"
            line = f"{node.target}, an unknown op, which may communicate, {where}"
            entry: Entry = (str(node.target), all_ranks, (), "")
            sequence.append(Issued(entry, waited_after, line, where))
    return sequence


def may_communicate(node: fx.Node) -> bool:
    """Return whether a node is a collective, or an unknown op that may be one."""
    if node.op in ("placeholder", "get_attr", "output") or is_getitem(node) or is_wait(node):
        return False
    if is_collective(node):
        return True
    schema = schema_of(node)
    if schema is not None:
        return collective_kind(node) is None and schema.name.split("::")[0] not in _COMPUTE
    if next(subgraphs(node), None) is not None:
        return False  # the nodes of its subgraphs are checked one by one
    return getattr(node.target, "__module__", "") not in _ARITHMETIC
