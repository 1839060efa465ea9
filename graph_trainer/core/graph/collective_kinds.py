"""The one table of communication ops: what each kind costs, allocates and allows.

To support another op, add a row. All code of the package that depends on the kind of a collective
reads this table, by `graph.ops.collective_kind(node)` or by name. This module imports nothing of
the package, so that every module can import it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

IN_PLACE_NAMESPACE = "c10d"
"""The namespace of the ops behind `dist.all_reduce(tensor)` and similar functions. They write into
their arguments, and their schemas do not declare it."""
FUNCTIONAL_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
"""Ops that return their result, which is complete after a wait."""

_INPUTS = ("input", "inputs", "tensor", "tensors", "input_tensor", "input_tensors")

Ranks = tuple[int, ...]
"""Global ranks of a process group, in group order."""

ScratchBytes = Callable[[Sequence[int], Sequence[int]], int]
"""Scratch memory of a collective, in bytes, from the bytes of each tensor sent and received."""


class Effect(StrEnum):
    """What an op does to communication."""

    STARTS = "starts"
    WAITS = "waits"
    """Returns its input when the collective that makes it is complete."""
    NONE = "none"
    """The op is local, although its namespace is one of collectives."""


class Result(StrEnum):
    """How the result of one rank relates to what it sends.

    It decides how several collectives of a kind merge into one, as `bucketing.rewrite` does.
    """

    GATHERED = "gathered"
    """[rows, ...] of every rank -> [ranks * rows, ...], in the order of the ranks."""
    SCATTERED = "scattered"
    """[ranks * rows, ...] -> [rows, ...]: a part for each rank, in the order of the ranks."""
    SAME = "same"
    """[...] -> [...]: element by element, or of a size that follows from the arguments alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveKind:
    """One row of the table. The defaults are what is assumed of an op without a row."""

    ops: tuple[str, ...] = ()
    """Names without a namespace. The first is the plain op, which takes one tensor and returns a
    new one; the others write into a buffer or take several tensors."""
    shown: str = ""
    """The name in tables for people."""
    effect: Effect = Effect.STARTS
    result: Result = Result.SAME
    reduces: bool = False
    """Whether the result is a reduction over the ranks."""
    mergeable: bool = False
    """Whether one of the plain op can replace several: whether `bucket_collectives` and the
    columns of a plan's tables know the kind."""
    rounds: int = 1
    """How often the data passes the ring of ranks."""
    as_tree: bool = False
    """Whether a tree can replace the ring if the ranks are on several nodes."""
    pairwise: bool = False
    """Whether every pair of ranks exchanges messages, instead of a ring: a rank then sends to other
    nodes through its own network card alone."""
    cpu_bytes: ScratchBytes = lambda sent, received: 0
    """What `OrderedGloo` allocates from the collective's start to its wait."""
    paired: bool = False
    """Whether other ranks run another op at the same time (send and receive): the op has to run
    even if its result is unused."""
    inputs: tuple[str, ...] = _INPUTS
    """Arguments that are sent: their dtypes and element counts must agree across the group."""
    written: tuple[str, ...] = ()
    """Arguments that are written in place although the schema does not declare it."""
    agreed: tuple[str, ...] = ("reduce_op", "src")
    """Arguments that must agree across the group beside the inputs. The first one present is
    compared."""

    def link_bytes(self, input_bytes: int, output_bytes: int, ranks: int) -> float:
        """Return the bytes that pass each rank's link, from those that one rank sends and receives.

        All ranks but one forward each part once a round: (ranks - 1) / ranks of the larger side.
        """
        return self.rounds * ((ranks - 1) / ranks) * max(input_bytes, output_bytes)


_TABLE = (
    CollectiveKind(
        ops=(
            "all_gather_into_tensor",
            "all_gather_into_tensor_out",
            "all_gather_into_tensor_coalesced",
        ),
        shown="all-gather",
        result=Result.GATHERED,
        mergeable=True,
        # a copy for each rank of what is sent
        cpu_bytes=lambda sent, received: sum(received),
    ),
    CollectiveKind(
        ops=(
            "reduce_scatter_tensor",
            "reduce_scatter_tensor_out",
            "reduce_scatter_tensor_coalesced",
        ),
        shown="reduce-scatter",
        result=Result.SCATTERED,
        reduces=True,
        mergeable=True,
        # the parts received from all ranks, which are then summed
        cpu_bytes=lambda sent, received: sum(sent),
    ),
    CollectiveKind(
        ops=("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
        shown="all-reduce",
        reduces=True,
        mergeable=True,
        rounds=2,  # a reduce-scatter and an all-gather
        as_tree=True,
        # the parts received from all ranks, then a copy of their sum for each rank
        cpu_bytes=lambda sent, received: sum(sent),
    ),
    CollectiveKind(ops=("all_to_all_single",), shown="all-to-all", pairwise=True),
    CollectiveKind(ops=("broadcast", "broadcast_"), shown="broadcast"),
    CollectiveKind(ops=("isend",), shown="send", paired=True),
    CollectiveKind(ops=("irecv",), shown="receive", paired=True, written=("tensor",)),
    CollectiveKind(ops=("batch_p2p_ops",), shown="sends and receives", paired=True),
    CollectiveKind(ops=("wait_tensor",), shown="wait", effect=Effect.WAITS),
    CollectiveKind(ops=("_wrap_tensor_autograd", "check_for_nan"), effect=Effect.NONE),
)

KINDS = {op: kind for kind in _TABLE for op in kind.ops}
"""The row of every op, by its name without a namespace."""

UNKNOWN = CollectiveKind()
"""What is assumed of an op that has no row, in a namespace of collectives."""


def kind_named(name: str) -> CollectiveKind:
    """Return the row of an op by its name without a namespace, `UNKNOWN` if it has none."""
    return KINDS.get(name, UNKNOWN)


@functools.cache
def kind_of_op(qualified_name: str) -> CollectiveKind | None:
    """Return the row of an op, None for an op outside the namespaces of collectives.

    Args:
        qualified_name: the name in the op's schema, such as `_c10d_functional::all_reduce`.
    """
    namespace, _, name = qualified_name.partition("::")
    if namespace in FUNCTIONAL_NAMESPACES or namespace == IN_PLACE_NAMESPACE:
        return kind_named(name)
    return None


def mergeable_kinds() -> dict[str, str]:
    """Map the plain op of each kind that merges to the name that tables show."""
    return {kind.ops[0]: kind.shown for kind in KINDS.values() if kind.mergeable}


def shown_name(name: str) -> str:
    """Return the name of an op in tables; the name of the op itself if it has no row."""
    return kind_named(name).shown or name
