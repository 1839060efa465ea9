"""The best choices for one block at every price of memory, found by HiGHS."""

# The idea: a block's choice is an integer program, small enough to solve exactly. It is solved for
# the two ends (fewest bytes, least time) and then for the price of memory at which the ends have
# equal value: a better choice at this price is a corner of the convex hull, and the two sides of it
# are searched in the same way; if there is none, the two ends are neighbours.

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
    """The bytes of its results, if they are kept for backward."""
    nanoseconds: int
    """The time of running it again."""
    reads: tuple[int, ...]
    """Indices of the block's ops that it reads."""
    is_needed: bool
    """Whether backward reads a result of it."""
    may_save: bool
    """Whether it allocates storages that may be kept."""
    may_recompute: bool


@dataclass(frozen=True, slots=True)
class Block:
    """The forward of one block. Equal blocks have equal `ops`."""

    name: str
    ops: tuple[Op, ...]
    nodes: list[list[str]] = field(repr=False)
    """The names of each op's nodes, the same in every copy of the graph."""


class Choice(NamedTuple):
    """The ops that a block keeps, and their cost."""

    bytes: int
    nanoseconds: int
    """The time to recompute the other ops."""
    saved: frozenset[int]
    """Indices of the ops that are kept."""


def frontier(ops: Sequence[Op]) -> list[Choice]:
    """Return the choices that are best at some price of memory, the fewest bytes first.

    Each one keeps more bytes than the one before, saves time, and saves less time a byte: the
    corners of the convex hull of all choices. With many equal blocks, a mix of two neighbours is
    within one block of the optimum for any number of bytes.

    Raises:
        PassError: the solver found no optimum in its time, or is not installed.
    """
    # of the choices with the fewest bytes the fastest one, and the other way round
    fewest_bytes = solve(ops, mib=1.0).bytes
    smallest = solve(ops, nanoseconds=1.0, most_bytes=fewest_bytes)
    least_time = solve(ops, nanoseconds=1.0).nanoseconds
    fastest = solve(ops, mib=1.0, most_nanoseconds=least_time)
    choices = [smallest]

    def refine(low: Choice, high: Choice) -> None:
        """Add the choices after `low`, up to `high`; those between are below their line."""
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

    refine(smallest, fastest)
    return choices


def between(ops: Sequence[Op], low: Choice, high: Choice, min_distance: float) -> list[Choice]:
    """Return the choices after `low` up to `high`, each the fastest within its bytes.

    For the one block that gets a part of the step between two corners, so that a memory limit is
    used up. Raises as `frontier` does.

    Args:
        min_distance: the bytes between two choices, at least. 1 KiB is the minimum, because the
            solver's bounds are not exact to the byte.
    """
    distance = max(min_distance, KIB)
    choices = [high]
    while True:
        most_bytes = int(choices[-1].bytes - distance)
        if most_bytes <= low.bytes:
            break
        fastest = solve(ops, nanoseconds=1.0, most_bytes=most_bytes)
        if fastest.nanoseconds >= low.nanoseconds:
            break
        if fastest.nanoseconds == choices[-1].nanoseconds:
            choices.pop()  # it keeps a result that can be recomputed in no time
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
    """Minimize a sum of MiB and nanoseconds, each with its weight, with a bound on one of them.

    An integer program with two variables for each op, whether it is kept and whether it is
    recomputed. A result that backward reads is one of the two, and so is each input of an op that
    is recomputed. Raises as `frontier` does.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise PassError(
            f"planning memory needs scipy, which is not installed ({error}): pip install scipy"
        ) from error
    # variable i is 1 if op i is kept, variable num_ops + i is 1 if it is recomputed
    num_ops = len(ops)
    sizes = [op.bytes / MIB for op in ops] + [0.0] * num_ops
    times = [0.0] * num_ops + [float(op.nanoseconds) for op in ops]
    # rows of a sparse matrix: each sum of variables must be at least its lower bound
    lower_bounds: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    coefficients: list[int] = []

    def add_constraint(lower_bound: int, terms: dict[int, int]) -> None:
        for variable, coefficient in terms.items():
            rows.append(len(lower_bounds))
            columns.append(variable)
            coefficients.append(coefficient)
        lower_bounds.append(lower_bound)

    for index, op in enumerate(ops):
        if op.is_needed:
            add_constraint(1, {index: 1, num_ops + index: 1})
        if op.may_recompute:
            for source in op.reads:
                add_constraint(0, {source: 1, num_ops + source: 1, num_ops + index: -1})
    constraints = []
    if lower_bounds:
        shape = (len(lower_bounds), 2 * num_ops)
        matrix = coo_array((coefficients, (rows, columns)), shape=shape).tocsr()
        constraints.append(LinearConstraint(matrix, lb=lower_bounds))
    if most_bytes is not None:
        constraints.append(LinearConstraint([sizes], ub=most_bytes / MIB))
    if most_nanoseconds is not None:
        constraints.append(LinearConstraint([times], ub=most_nanoseconds))
    cost = [mib * size + nanoseconds * time for size, time in zip(sizes, times, strict=True)]
    largest = max(1.0, *cost)
    may_be_one = [op.may_save for op in ops] + [op.may_recompute for op in ops]
    result = milp(
        [coefficient / largest for coefficient in cost],
        integrality=[1] * (2 * num_ops),
        bounds=Bounds(0, may_be_one),
        constraints=constraints,
        options={"time_limit": SECONDS_OF_ONE_SOLUTION, "mip_rel_gap": 0.0},
    )
    if result.status != 0:
        raise PassError(
            f"planning memory: the solver found no best choice for a block of {num_ops} ops: "
            f"{result.message}. Use another PassConfig.activation_policy, such as 'full'"
        )
    # drop ops that backward does not need at this choice, which the solver may keep
    saved = {index for index in range(num_ops) if result.x[index] > 0.5}
    needed: set[int] = set()
    stack = [index for index, op in enumerate(ops) if op.is_needed]
    while stack:
        index = stack.pop()
        if index in needed:
            continue
        needed.add(index)
        if index not in saved:
            stack += ops[index].reads
    return Choice(
        bytes=sum(ops[index].bytes for index in needed & saved),
        nanoseconds=sum(ops[index].nanoseconds for index in needed - saved),
        saved=frozenset(needed & saved),
    )
