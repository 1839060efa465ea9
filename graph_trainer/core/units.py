"""Units, and the format of sizes in texts for people."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3
NANOSECONDS = 10**9
"""Nanoseconds of a second."""


def gib(num_bytes: float) -> str:
    """Format bytes as GiB, without the unit: three significant digits below 1, else two places."""
    return f"{num_bytes / GIB:,.3g}" if num_bytes < GIB else f"{num_bytes / GIB:,.2f}"
