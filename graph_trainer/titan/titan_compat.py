"""What torchtitan asks of torch that this torch does not have or does only in part, lent for a
while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from graph_trainer.core.sharding.process_groups import groups_made
from graph_trainer.core.torch_private import set_process_group_timeout


@contextlib.contextmanager
def process_group_timeouts() -> Iterator[None]:
    """Let torchtitan shorten time-outs after the first step, also those of groups that passes made.

    torchtitan 0.3.0 calls torch.distributed.set_timeout, which torch 2.13 does not have yet, for
    the groups of its meshes and then for that of the world, None.
    """
    own = getattr(dist, "set_timeout", None)
    set_one = own or set_process_group_timeout

    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        for each in (group, *(groups_made() if group is None else ())):
            set_one(timeout, each)

    dist.set_timeout = set_timeout  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if own is None:
            del dist.set_timeout  # type: ignore[attr-defined]
        else:
            dist.set_timeout = own  # type: ignore[attr-defined]
