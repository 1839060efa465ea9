"""What a run really needs and issues, where that can be measured honestly and cheaply."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graph_trainer.core.analysis.collective_kinds import (
    FUNCTIONAL_NAMESPACES,
    Effect,
    kind_named,
)
from graph_trainer.core.capture.subclasses import unwrap
from graph_trainer.core.runtime.live_storages import LiveStorages
from graph_trainer.core.torch_private import TorchDispatchMode

WARM_UP = 3
"""Steps whose time does not count: the first captures, the second is watched."""
WATCHED_STEP = 2
"""The step in which collectives and what the graph makes are counted, which slows it down."""
_STEPS_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank measured. None: not measured."""

    peak_bytes: int | None
    """The most bytes that the device's allocator had given out at once."""
    reserved_bytes: int | None
    """The most bytes that it had taken from the device."""
    made_bytes: int | None
    """The most bytes at once that the graph had made and tensors held; see `LiveStorages`."""
    sees_memory: bool
    """Whether `made_bytes` can be measured with the backend."""
    parameter_bytes: int
    gradient_bytes: int | None
    optimizer_bytes: int
    step_seconds: float | None
    """Median."""
    steps_timed: int
    """Behind those of warm-up."""
    issued: dict[str, int] | None
    """Collectives of one microbatch, by kind."""


class IssuedCollectives(TorchDispatchMode):
    """While it is entered: the collectives that are really started, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in FUNCTIONAL_NAMESPACES and kind_named(name).effect is Effect.STARTS:
            kind = name.removesuffix("_out").removesuffix("_")  # as Inductor calls them
            self.count[kind] = self.count.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


class Watch:
    """Counts, in one microbatch, the collectives that are issued and the bytes that live.

    Arguments:
        sees_memory: whether what runs allocates op by op. Inductor's code does not.
    """

    def __init__(self, sees_memory: bool) -> None:
        self.sees_memory = sees_memory
        self.issued: dict[str, int] | None = None
        self.made_bytes: int | None = None
        """The most bytes at once that the step had made and held."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While entered: count."""
        live = LiveStorages()
        with live if self.sees_memory else contextlib.nullcontext(), IssuedCollectives() as issued:
            yield
        self.issued = issued.count
        self.made_bytes = live.peak_bytes if self.sees_memory else None


class StepTimes:
    """Seconds of the latest steps, as the device sees them: nothing waits for the clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: deque[tuple[Any, Any]] = deque(maxlen=_STEPS_KEPT)
        self.steps = 0
        """All that were timed, warm-up included."""

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
        """Those of which the median is."""
        return len(self._spans)

    def median(self) -> float | None:
        """Seconds of a step; None where all were warm-up."""
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


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' elements on this rank."""
    return sum(part.numel() * part.itemsize for t in tensors for part in unwrap(t)[0])


def optimizer_state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of all tensors that optimizers keep of their parameters on this rank."""
    return local_bytes(
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
