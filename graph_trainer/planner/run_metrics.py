"""Measure what a run needs and issues, where a measurement is exact and cheap."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graph_trainer.core.graph.collective_kinds import FUNCTIONAL_NAMESPACES, Effect, kind_named
from graph_trainer.core.torch_private import TorchDispatchMode

WARM_UP = 3
"""Steps that are not timed: the first captures, and the second is slowed down by counting."""
WATCHED_STEP = 2
"""The step in which collectives and the bytes that the graph makes are counted."""
_STEPS_KEPT = 1000


@dataclass(slots=True, kw_only=True)
class Measured:
    """The measurements of one rank. None: not measured."""

    sees_memory: bool
    """Whether `made_bytes` can be measured with the backend."""
    peak_bytes: int | None = None
    """The most bytes that the device's allocator had given out at once."""
    reserved_bytes: int | None = None
    """The most bytes that the allocator had taken from the device."""
    needed_bytes: int | None = None
    """The most bytes of the device that were taken, by whatever program."""
    made_bytes: int | None = None
    """The most bytes alive at once in tensors that the graph made; see `LiveStorages`."""
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    step_seconds: float | None = None
    """Median."""
    steps_timed: int = 0
    """The number of steps after warm-up, at most the latest 1,000."""
    issued: dict[str, int] | None = None
    """Collectives of one microbatch, by kind."""


class IssuedCollectives(TorchDispatchMode):
    """While entered: counts the collectives that are started, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in FUNCTIONAL_NAMESPACES and kind_named(name).effect is Effect.STARTS:
            kind = name.removesuffix("_out").removesuffix("_")  # Inductor's names of the same op
            self.count[kind] = self.count.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


class StepTimes:
    """Seconds of the latest steps, measured on the device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: deque[tuple[Any, Any]] = deque(maxlen=_STEPS_KEPT)
        self.steps = 0
        """The number of all steps, warm-up included."""

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """While entered: one step."""
        start = self._now()
        yield
        self.steps += 1
        if self.steps > WARM_UP:
            self._spans.append((start, self._now()))

    @property
    def timed(self) -> int:
        """The number of steps that the median is of."""
        return len(self._spans)

    def median(self) -> float | None:
        """Return the median seconds of a step; None where all steps were warm-up."""
        if not self._spans:
            return None
        if self._on_cuda:
            torch.cuda.synchronize()
            return statistics.median(a.elapsed_time(b) / 1e3 for a, b in self._spans)
        return statistics.median(b - a for a, b in self._spans)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
