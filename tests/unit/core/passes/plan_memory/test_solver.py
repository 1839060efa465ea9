"""The solver's choices are the best there are, found by trying all of them."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_trainer.core.passes.plan_memory import solver
from graph_trainer.core.passes.plan_memory.solver import Choice, Op, between, frontier, solve
from graph_trainer.core.units import MIB
from graph_trainer.errors import PassError
from tests.examples import examples


@st.composite
def blocks(draw):
    """Ops that read earlier ones; each may be kept or may run again, some both."""
    ops = []
    for number in range(draw(st.integers(1, 6))):
        earlier = st.sets(st.integers(0, number - 1), max_size=2) if number else st.just(set())
        may_save, may_recompute = draw(st.sampled_from([(1, 1), (1, 1), (1, 0), (0, 1)]))
        ops.append(
            Op(
                module="",
                target="op",
                nth=number,
                bytes=draw(st.integers(0, 5)) * MIB * may_save,
                nanoseconds=draw(st.integers(0, 5)) * 1000,
                reads=tuple(sorted(draw(earlier))),
                is_needed=draw(st.booleans()),
                may_save=bool(may_save),
                may_recompute=bool(may_recompute),
            )
        )
    return tuple(ops)


def nanoseconds(ops, saved):
    """What backward takes with these ops kept; None where it lacks something."""
    again, stack = set(), [i for i, op in enumerate(ops) if op.is_needed]
    while stack:
        number = stack.pop()
        if number in saved or number in again:
            continue
        if not ops[number].may_recompute:
            return None
        again.add(number)
        stack += ops[number].reads
    return sum(ops[i].nanoseconds for i in again)


def every_choice(ops):
    for picked in product([False, True], repeat=len(ops)):
        saved = frozenset(i for i, each in enumerate(picked) if each)
        if all(ops[i].may_save for i in saved):
            seconds = nanoseconds(ops, saved)
            if seconds is not None:
                yield Choice(sum(ops[i].bytes for i in saved), seconds, saved)


@given(blocks(), st.sampled_from([0.0, 1.0, 300.0, 1000.0, 2500.0, 1e9]))
@examples(60)
def test_no_choice_is_better_at_any_price(ops, price):
    found = solve(ops, mib=price, nanoseconds=1.0)
    assert found.nanoseconds == nanoseconds(ops, found.saved)

    def value(choice):
        return choice.nanoseconds + price * choice.bytes / MIB

    # up to what breaks ties
    assert value(found) <= min(value(c) for c in every_choice(ops)) + 1e-2


@given(blocks())
@examples(40)
def test_the_frontier_has_every_corner_of_the_hull(ops):
    found = frontier(ops)
    everything = list(every_choice(ops))
    assert found[0].bytes == min(c.bytes for c in everything)
    assert found[-1].nanoseconds == min(c.nanoseconds for c in everything)
    slopes = [(a.nanoseconds - b.nanoseconds) / (b.bytes - a.bytes)
              for a, b in zip(found, found[1:], strict=False)]  # fmt: skip
    assert slopes == sorted(slopes, reverse=True) and all(slope > 0 for slope in slopes)
    for choice in everything:  # none lies below the line of two neighbours
        for a, b in zip(found, found[1:], strict=False):
            if a.bytes <= choice.bytes <= b.bytes:
                share = (choice.bytes - a.bytes) / (b.bytes - a.bytes)
                line = a.nanoseconds + share * (b.nanoseconds - a.nanoseconds)
                assert choice.nanoseconds >= line - 1e-6


@given(blocks(), st.sampled_from([0, MIB, 2 * MIB]))
@examples(25)
def test_between_two_corners_are_the_fastest_of_their_bytes(ops, apart):
    everything = list(every_choice(ops))
    corners = frontier(ops)
    for low, high in zip(corners, corners[1:], strict=False):
        found = between(ops, low, high, apart)
        assert found[-1] == high
        for less, more in zip([low, *found], found, strict=False):
            assert less.bytes < more.bytes and less.nanoseconds > more.nanoseconds
        for choice in found:
            fastest = min(c.nanoseconds for c in everything if c.bytes <= choice.bytes)
            assert choice.nanoseconds == fastest


def test_a_solver_out_of_time_says_so(monkeypatch):
    monkeypatch.setattr(solver, "SECONDS_OF_ONE_SOLUTION", 0.0)
    ops = tuple(Op("", "op", i, MIB, 10, tuple(range(i)), True, True, True) for i in range(40))
    with pytest.raises(PassError, match="found no best choice for a block of 40 ops"):
        solve(ops, mib=3.0, nanoseconds=1.0)
