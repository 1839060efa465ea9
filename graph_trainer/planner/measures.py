"""Sizes and times as a person reads them: in a unit that follows the size, one for a column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from graph_trainer.core.units import GIB, KIB, MIB

_UNITS: dict[str, tuple[tuple[str, float], ...]] = {
    "bytes": (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1)),
    "seconds": (("s", 1), ("ms", 1e-3), ("µs", 1e-6)),
    "count": (("", 1),),
}


class Measure(NamedTuple):
    """A unit and how many places stand after the point."""

    unit: str
    scale: float
    """Bytes or seconds of one."""
    places: int

    def digits(self, value: float) -> str:
        """Format a value without the unit."""
        return f"{value / self.scale:,.{self.places}f}"

    def text(self, value: float) -> str:
        """Format a value with the unit: '16.28 GiB'."""
        return f"{self.digits(value)} {self.unit}".rstrip()


def measure(kind: str, values: Iterable[float], significant: int = 4) -> Measure:
    """Choose the unit of values that stand together, by the largest.

    Args:
        kind: "bytes", "seconds" or "count".
        significant: the digits of the largest value, of which few stand after the point.
    """
    largest = max(map(abs, values), default=0.0)
    units = _UNITS[kind]
    unit, scale = next((scale for scale in units if largest >= scale[1]), units[-1])
    if kind == "count" or unit == "B":
        return Measure(unit, scale, 0)
    before = int(math.log10(max(1.0, largest / scale))) + 1
    return Measure(unit, scale, min(3 if unit == "s" else 2, max(0, significant - before)))


def size(num_bytes: float, among: Sequence[float] = ()) -> str:
    """Format one size, '36.7 GiB', or one among others that it stands with, '36.66 GiB'."""
    return measure("bytes", among or [num_bytes], 4 if among else 3).text(num_bytes)


def duration(seconds: float, among: Sequence[float] = ()) -> str:
    """Format one time, '959 ms', or one among others."""
    return measure("seconds", among or [seconds], 4 if among else 3).text(seconds)
