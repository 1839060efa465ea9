"""Whose turn it is: the orders in which benchmarks step what they compare."""

from __future__ import annotations

from collections.abc import Sequence


def orders(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The names once a round, with places and predecessors that change from round to round.

    Merely rotating a list leaves everybody behind the same neighbour, so what is rotated is a
    zigzag (0, 1, -1, 2, -2, ...): in as many rounds as there are names everyone has each place
    once, and follows each other name once (where their number is odd, half of them twice).
    """
    count = len(names)
    zigzag = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(count)]
    return [[names[(start + step) % count] for step in zigzag] for start in range(rounds)]
