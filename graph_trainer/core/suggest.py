"""Suggest the known name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(
    name: str, known: Iterable[str], count: int = 3, cutoff: float | None = None
) -> list[str]:
    """Find the known names that look like `name`; case, "-" and "_" make no difference.

    Args:
        count: how many names to return at most.
        cutoff: how alike two names must be, from 0 to 1; None for a default by length, and for
            names that begin with `name`, however long.

    Returns:
        The names, the most similar first, in front of them those that begin with `name`.
    """
    by_folded = {k.lower().replace("-", "_"): k for k in known}
    folded = name.lower().replace("-", "_")
    longer: list[str] = []
    if cutoff is None:
        if len(name) > 1:
            longer = sorted((key for key in by_folded if key.startswith(folded)), key=len)
        # One wrong letter in "8b" is half the name.
        cutoff = 0.5 if len(name) <= 3 else 0.6
    close = difflib.get_close_matches(folded, by_folded, n=count, cutoff=cutoff)
    return [by_folded[match] for match in dict.fromkeys(longer + close)][:count]


def did_you_mean(
    name: str,
    known: Iterable[str],
    text: str = "; did you mean '{}'?",
    otherwise: str = "",
    cutoff: float | None = None,
) -> str:
    """Format the one known name nearest to `name` for a message.

    Args:
        text: the message's part, with "{}" for the name.
        otherwise: what to return where no known name is like `name`.
        cutoff: as for `nearest`.
    """
    close = nearest(name, known, 1, cutoff)
    return text.format(close[0]) if close else otherwise
