"""The best choices for one block at every price of memory, found by HiGHS."""

# The idea: a block's choice is an integer program, small enough to solve exactly. It is solved for
# the two ends (fewest bytes, least time) and then for the price of memory at which the ends are
# worth the same: a better choice there is a corner of the convex hull, and the two sides of it are
# searched again; none there means that the two ends are neighbours.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graph_trainer.core.units import KIB, MIB
from graph_trainer.errors import PassError

SECONDS_OF_ONE_SOLUTION = 10.0


@dataclass(frozen=True, slots=True)
class Op:
    """An op of a block: a node with the waits for it and the results taken out of its tuple."""

    module: str
    """FQN of its module below the block, "" for the block itself."""
    target: str
    nth: int
    """Which of the ops of this module and target it is, from 0."""
    bytes: int
    """What keeping its results for backward takes."""
    nanoseconds: int
    """What running it again takes."""
    reads: tuple[int, ...]
    """Numbers of the block's ops that it reads."""
    is_needed: bool
    """Whether backward reads a result of it."""
    may_save: bool
    """Whether it makes storages of its own that may be kept."""
    may_recompute: bool


@dataclass(frozen=True, slots=True)
class Block:
    """The forward of one block. Equal blocks have equal `ops`."""

    name: str
    ops: tuple[Op, ...]
    nodes: list[list[str]] = field(repr=False)
    """The names of each op's nodes, the same in every copy of the graph."""


class Choice(NamedTuple):
    """What a block keeps, and what that costs."""

    bytes: int
    nanoseconds: int
    """To recompute the rest."""
    saved: frozenset[int]
    """Numbers of the ops that are kept."""


def frontier(ops: Sequence[Op]) -> list[Choice]:
    """Return the choices that are best at some price of memory, the fewest bytes first.

    Each next one keeps more bytes, saves time, and saves less time a byte than the one before: the
    corners of the convex hull of all choices. With many equal blocks, a mix of two neighbours is
    within one block of the best there is for any number of bytes. A PassError where the solver
    found no optimum in its time, or is not installed.
    """
    fewest = solve(ops, mib=1.0)
    least = solve(ops, nanoseconds=1.0, most_bytes=fewest.bytes)
    quickest = solve(ops, nanoseconds=1.0)
    fastest = solve(ops, mib=1.0, most_nanoseconds=quickest.nanoseconds)
    choices = [least]

    def refine(low: Choice, high: Choice) -> None:
        """Add what is above `low`, up to `high`: a choice between lies below their line."""
        if high.bytes <= low.bytes or high.nanoseconds >= low.nanoseconds:
            return
        price = (low.nanoseconds - high.nanoseconds) / (high.bytes - low.bytes)
        middle = solve(ops, mib=price * MIB, nanoseconds=1.0)

        def value(choice: Choice) -> float:
            return choice.nanoseconds + price * choice.bytes

        if value(middle) < value(low) - 1.0 and middle.saved not in (low.saved, high.saved):
            refine(low, middle)
            refine(middle, high)
        else:
            choices.append(high)

    refine(least, fastest)
    return choices


def between(ops: Sequence[Op], low: Choice, high: Choice, apart: float) -> list[Choice]:
    """Return choices from `low`, without it, to `high`: each the fastest with so many bytes.

    For the one block that gets a part of a step, so that a memory limit is used to the end. Two
    choices are `apart` bytes apart at least; and 1 KiB, as the solver's bounds are not exact to the
    byte. Errors are those of `frontier`.
    """
    choices = [high]
    while (most := int(choices[-1].bytes - max(apart, KIB))) > low.bytes:
        fastest = solve(ops, nanoseconds=1.0, most_bytes=most)
        if fastest.nanoseconds >= low.nanoseconds:
            break
        if fastest.nanoseconds == choices[-1].nanoseconds:
            choices.pop()  # kept something that costs nothing to make again
        choices.append(fastest)
    return choices[::-1]


def solve(
    ops: Sequence[Op],
    *,
    mib: float = 0.0,
    nanoseconds: float = 0.0,
    most_bytes: int | None = None,
    most_nanoseconds: int | None = None,
) -> Choice:
    """Minimize a sum of MiB and nanoseconds, each with its weight, one of them bounded.

    An integer program with two variables an op, whether it is kept and whether it is recomputed: a
    result that backward reads is one of the two, and so is each input of what is recomputed. Errors
    are those of `frontier`.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise PassError(
            f"planning memory needs scipy, which is not installed ({error}): pip install scipy"
        ) from error
    number = len(ops)
    sizes = [op.bytes / MIB for op in ops] + [0.0] * number
    times = [0.0] * number + [float(op.nanoseconds) for op in ops]
    rows: list[tuple[float, list[tuple[int, int]]]] = []  # at least, of a sum of variables
    for place, op in enumerate(ops):
        if op.is_needed:
            rows.append((1, [(place, 1), (number + place, 1)]))
        for read in op.reads if op.may_recompute else ():
            rows.append((0, [(read, 1), (number + read, 1), (number + place, -1)]))
    constraints = []
    if rows:
        entries = [(row, *entry) for row, (_, sums) in enumerate(rows) for entry in sums]
        row, column, value = zip(*entries, strict=True)
        matrix = coo_array((value, (row, column)), shape=(len(rows), 2 * number)).tocsr()
        constraints.append(LinearConstraint(matrix, lb=[least for least, _ in rows]))
    if most_bytes is not None:
        constraints.append(LinearConstraint([sizes], ub=most_bytes / MIB))
    if most_nanoseconds is not None:
        constraints.append(LinearConstraint([times], ub=most_nanoseconds))
    cost = [mib * size + nanoseconds * time for size, time in zip(sizes, times, strict=True)]
    largest = max(1.0, *cost)
    result = milp(
        [each / largest for each in cost],
        integrality=[1] * (2 * number),
        bounds=Bounds(0, [*(op.may_save for op in ops), *(op.may_recompute for op in ops)]),
        constraints=constraints,
        options={"time_limit": SECONDS_OF_ONE_SOLUTION, "mip_rel_gap": 0.0},
    )
    if result.status != 0:
        raise PassError(
            f"planning memory: the solver found no best choice for a block of {number} ops: "
            f"{result.message}. Use another PassConfig.activation_policy, such as 'full'"
        )
    # a choice without what it keeps and backward never comes to
    saved = {i for i in range(number) if result.x[i] > 0.5}
    used: set[int] = set()
    stack = [place for place, op in enumerate(ops) if op.is_needed]
    while stack:
        place = stack.pop()
        if place not in used:
            used.add(place)
            stack += ops[place].reads if place not in saved else ()
    return Choice(
        sum(ops[i].bytes for i in used & saved),
        sum(ops[i].nanoseconds for i in used - saved),
        frozenset(used & saved),
    )
