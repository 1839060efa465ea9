"""Apply a function to many items in several processes, within the cores and memory there are."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from graph_trainer.errors import GraphTrainerError
from graph_trainer.titan.device_memory import available_on_cpu

T = TypeVar("T")
R = TypeVar("R")

_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's sys/prctl.h."""

_work: tuple[Callable[[Any], Any], Sequence[Any]] | None = None
"""In a forked process: its function and all items, set once when the process begins."""


def usable_processes() -> int:
    """Return the number of processes that may compute at once: one for each core.

    Only Linux forks a process that has loaded torch, so elsewhere it is one.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def in_processes(
    function: Callable[[T], R],
    items: Sequence[T],
    processes: int,
    *,
    on_start: Callable[[T], None] = lambda item: None,
    on_end: Callable[[T, R], None] = lambda item, result: None,
) -> list[R]:
    """Apply a function to every item; return the results in the order of the items.

    This process does the first item. It then forks others for the rest, which start with
    everything that this one has loaded and captured. It forks as many as there are cores and
    memory for, where each is assumed to need the most that this process has needed. Results are
    pickled; functions and items are not.

    Args:
        processes: the most processes that compute at once.
        on_start, on_end: called in this process, in the order of the items, before the result of
            an item is waited for and after it.

    Raises:
        Exception: the error of the first item that has one.
        GraphTrainerError: a process was killed.
    """
    results: list[R] = []

    def here(item: T) -> None:
        on_start(item)
        results.append(function(item))
        on_end(item, results[-1])

    for item in items[:1]:
        here(item)
    rest = items[1:]
    number = min(processes, len(rest))
    if number > 1:
        number = min(number, available_on_cpu()[0] // _peak_bytes())
    if number <= 1:
        for item in rest:
            here(item)
        return results

    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(number, fork, _begin, (function, rest)) as pool:
        with warnings.catch_warnings():
            # Python warns of a fork beside other threads: those of the libraries are idle.
            warnings.simplefilter("ignore", DeprecationWarning)
            futures = [pool.submit(_apply, place) for place in range(len(rest))]
        try:
            for item, future in zip(rest, futures, strict=True):
                on_start(item)
                results.append(future.result())
                on_end(item, results[-1])
        except BrokenProcessPool:
            raise GraphTrainerError(_KILLED) from None
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, the items that have not begun
    return results


class Workers(Generic[T, R]):
    """Processes that apply a function to items which are submitted one by one.

    They are forked at the first item, with everything that this process has loaded, and each keeps
    what the function keeps. There are as many as cores and memory allow. Items and results are
    pickled. One process alone computes here.

    Args:
        processes: the most processes that compute at once.
    """

    def __init__(self, function: Callable[[T], R], processes: int) -> None:
        self._function = function
        self._number = max(1, min(processes, available_on_cpu()[0] // _LEAST_BYTES))
        self._pool: ProcessPoolExecutor | None = None
        self._items: dict[Future[R], T] = {}

    def __enter__(self) -> Workers[T, R]:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def busy(self) -> int:
        """Items that were submitted and whose results were not taken."""
        return len(self._items)

    @property
    def free(self) -> int:
        """Processes without an item."""
        return self._number - self.busy

    def submit(self, item: T) -> None:
        """Begin with an item.

        Raises:
            GraphTrainerError: a process was killed.
        """
        if self._number == 1:
            future: Future[R] = Future()
            future.set_result(self._function(item))
        else:
            if self._pool is None:
                fork = multiprocessing.get_context("fork")
                self._pool = ProcessPoolExecutor(self._number, fork, _begin, (self._function, ()))
            with warnings.catch_warnings():
                # Python warns of a fork beside other threads: those of the libraries are idle.
                warnings.simplefilter("ignore", DeprecationWarning)
                try:
                    future = self._pool.submit(_apply_to, item)
                except BrokenProcessPool:
                    raise GraphTrainerError(_KILLED) from None
        self._items[future] = item

    def next(self) -> tuple[T, R]:
        """Wait for the first result, and return it with its item.

        Raises:
            Exception: the error of the item.
            GraphTrainerError: a process was killed.
        """
        done, _ = wait(self._items, return_when=FIRST_COMPLETED)
        future = next(iter(done))
        try:
            return self._items.pop(future), future.result()
        except BrokenProcessPool:
            raise GraphTrainerError(_KILLED) from None


_LEAST_BYTES = 3 << 30
"""What a process that simulates a large graph needs at least."""

_KILLED = (
    "a process of this command was killed, most likely because memory ran out: run it on one core, "
    "where it forks no processes (taskset -c 0 graph-trainer ...)"
)


def _begin(function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    """Prepare a forked process."""
    global _work
    _work = function, items
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all processes of a terminal
    # A killed parent cannot end its processes, so Linux does.
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    gc.freeze()  # a collection that visits the parent's objects would copy their memory


def _apply(place: int) -> Any:
    assert _work is not None
    function, items = _work
    return function(items[place])


def _apply_to(item: Any) -> Any:
    assert _work is not None
    return _work[0](item)


def _peak_bytes() -> int:
    """Return the most memory that this process has had. Linux counts it in KiB."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
