"""Which collectives really run, as the process groups themselves tell the profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graph_trainer.core.sharding.ordered_gloo import BACKEND

Issued = dict[str, int]
T = TypeVar("T")

# What a backend calls the collectives of a graph. The names of nccl are those that its source gives
# its events; no run on GPUs has confirmed them yet.
_EVENTS: dict[str, dict[str, str | None]] = {
    BACKEND: {
        "all_gather_into_tensor": f"{BACKEND}:all_gather",
        "reduce_scatter_tensor": f"{BACKEND}:reduce_scatter",
        "all_reduce": f"{BACKEND}:all_reduce",
        "all_to_all_single": None,  # gloo's own, of which the backend's gathers consist too
    },
    "nccl": {
        "all_gather_into_tensor": "nccl:_all_gather_base",
        "reduce_scatter_tensor": "nccl:_reduce_scatter_base",
        "all_reduce": "nccl:all_reduce",
        "all_to_all_single": "nccl:all_to_all",
    },
}


def count_issued(step: Callable[..., T], *args: Any, **kwargs: Any) -> tuple[T, Issued]:
    """Run a step; what it returned, and how often each collective was started meanwhile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = step(*args, **kwargs)
    # not profile.events(), which builds a tree of all operators: as long as the step itself
    names = (event.name() for event in profile.profiler.kineto_results.events())
    return result, dict(Counter(n for n in names if n.startswith(tuple(f"{b}:" for b in _EVENTS))))


def expected_events(kinds: Mapping[str, int]) -> Issued:
    """What `count_issued` finds on this launch's backend if a graph's collectives all run.

    Args:
        kinds: how many collectives of each kind the graph has.
    """
    events = _EVENTS[_backend()]
    expected: Counter[str] = Counter()
    for kind, count in kinds.items():
        if (event := events[kind]) is not None:
            expected[event] += count
    return dict(expected)


def _backend() -> str:
    """The backend of the device that ranks compute on: "cpu:gloo,cuda:nccl" has two."""
    configured = str(dist.get_backend_config())
    return "nccl" if torch.accelerator.is_available() and "nccl" in configured else BACKEND
