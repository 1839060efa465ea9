"""What torchtitan asks of torch that this torch does not have, lent for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from graph_trainer.compat import set_process_group_timeout


@contextlib.contextmanager
def process_group_timeouts() -> Iterator[None]:
    """Let torchtitan shorten time-outs after the first step.

    torchtitan 0.3.0 calls torch.distributed.set_timeout, which torch 2.13 does not have yet.
    """
    if hasattr(dist, "set_timeout"):
        yield
        return

    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        set_process_group_timeout(timeout, group)

    dist.set_timeout = set_timeout  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del dist.set_timeout  # type: ignore[attr-defined]
