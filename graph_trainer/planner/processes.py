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
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

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
            raise GraphTrainerError(
                "a process of this command was killed, most likely because memory ran out: run it "
                "on one core, where it forks no processes (taskset -c 0 graph-trainer ...)"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, the items that have not begun
    return results


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


def _peak_bytes() -> int:
    """Return the most memory that this process has had. Linux counts it in KiB."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
