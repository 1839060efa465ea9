"""Byte units, and how sizes are written for a person."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def unit_of(num_bytes: float) -> tuple[str, int]:
    """Choose the unit for a table of sizes.

    Returns:
        "GiB" or "MiB", and the bytes of one.
    """
    return ("GiB", GIB) if num_bytes >= GIB else ("MiB", MIB)


def format_bytes(num_bytes: float) -> str:
    """Format bytes in the largest unit that fits: "64.5 GiB", "12 B"."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def gib(num_bytes: float) -> str:
    """Format bytes as GiB, without the unit: three significant digits below 1, else two places."""
    return f"{num_bytes / GIB:,.3g}" if num_bytes < GIB else f"{num_bytes / GIB:,.2f}"
