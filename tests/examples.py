"""How many examples a hypothesis test tries: a tenth where HYPOTHESIS_PROFILE is "fast"."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings


def examples(count: int, **more: Any) -> settings:
    """Settings for `count` examples in the full run, without a deadline; `more` goes to them."""
    fast = os.environ.get("HYPOTHESIS_PROFILE") == "fast"
    return settings(max_examples=max(3, count // 10) if fast else count, deadline=None, **more)
