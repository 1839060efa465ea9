"""Run the parts of a long command in several processes, within the memory there is."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

from graph_trainer.errors import GraphTrainerError
from graph_trainer.titan.device_memory import available_on_cpu

T = TypeVar("T")
R = TypeVar("R")


def usable_processes() -> int:
    """Return the number of processes that may compute at once: one for each core.

    Only Linux forks a process that has loaded torch, so elsewhere it is one.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def in_processes(
    task: Callable[[T], R],
    items: Sequence[T],
    processes: int,
    *,
    first_alone: bool = True,
    on_start: Callable[[T], None] = lambda item: None,
    on_end: Callable[[T, R], None] = lambda item, result: None,
) -> list[R]:
    """Apply a task to every item; return the results in the order of the items.

    Other processes are forked, which have what this one has loaded and captured, as far as there
    are cores, items and memory: one is taken to need the most that this one has had. What a task
    leaves in a process remains there; its result is pickled. An item whose process is killed is
    done here.

    Args:
        processes: the most processes, this one included.
        first_alone: this process does the first item before others begin, so that its memory is
            known. Leave it out where this one has done as much before.
        on_start, on_end: called in this process, before and after each item, one at a time.

    Raises:
        Exception: the error of the first item that has one, as without other processes.
    """
    results: dict[int, R] = {}
    errors: dict[int, Exception] = {}
    lost: list[int] = []
    lock = threading.Lock()  # the callbacks print whole lines, in order
    places = iter(range(len(items)))  # each is taken once, by whichever process is free

    def work(do: Callable[[int], R], at_most: int) -> None:
        for _ in range(at_most):
            with lock:
                place = None if errors else next(places, None)
                if place is None:
                    return
                on_start(items[place])
            try:
                results[place] = do(place)
            except _Ended:
                lost.append(place)
                return
            except Exception as error:
                errors[place] = error
                return
            with lock:
                on_end(items[place], results[place])

    def here(place: int) -> R:
        return task(items[place])

    done = 1 if first_alone else 0
    work(here, done)
    number = min(processes, len(items) - done) - 1
    if number > 0:
        number = min(number, available_on_cpu()[0] // _peak_bytes())
    workers = [_Worker(here) for _ in range(number)]
    threads = [threading.Thread(target=work, args=(w, len(items)), daemon=True) for w in workers]
    try:
        for thread in threads:
            thread.start()
        work(here, len(items))
        for thread in threads:
            thread.join()
        if not errors:
            places = iter(sorted(lost))
            work(here, len(items))
    finally:  # Ctrl-C too
        for worker in workers:
            worker.end()
    if errors:
        raise errors[min(errors)]
    return [results[place] for place in range(len(items))]


class Aside:
    """Forked processes that each do one task with what this process has when it begins.

    Args:
        processes: how many compute at once at most, this one included. Where that, or the memory,
            allows no other, a task is done here at once.
    """

    def __init__(self, processes: int) -> None:
        self._most = processes - 1
        self._workers: list[_Worker] = []
        self._awaited: set[_Worker] = set()

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.end()

    def begin(self, task: Callable[[], R]) -> Callable[[], R]:
        """Begin a task; return what waits for its result and returns that.

        Raises:
            Exception: of the task, by either.
            GraphTrainerError: by the latter, where the process was killed.
        """
        at_work = sum(not worker.is_done() for worker in self._awaited)
        if at_work >= min(self._most, available_on_cpu()[0] // _peak_bytes()):
            done = task()
            return lambda: done
        worker = _Worker(lambda place: task(), most=1)
        worker.begin(0)
        self._workers.append(worker)
        self._awaited.add(worker)

        @functools.cache
        def result() -> R:
            self._awaited.remove(worker)
            try:
                return cast(R, worker.result())
            except _Ended:
                raise GraphTrainerError(
                    "a process of this command was killed, most likely as memory ran out; on one "
                    "core it starts no others: taskset -c 0 graph-trainer ..."
                ) from None

        return result


class _Ended(Exception):
    """Raised for an item whose process has ended."""


class _Worker:
    """A forked process that does the items whose places it is sent, at most so many."""

    def __init__(self, do: Callable[[int], Any], most: int = sys.maxsize) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        serving = (do, most, other, self._connection)
        self.process = context.Process(target=_serve, args=serving, daemon=True)
        with warnings.catch_warnings():
            # of other threads: those of the libraries wait, and the progress line is not used there
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        other.close()

    def __call__(self, place: int) -> Any:
        """Return the result of an item; see `result`."""
        self.begin(place)
        return self.result()

    def begin(self, place: int) -> None:
        """Begin an item. Where the process has ended, `result` says so."""
        with contextlib.suppress(OSError):
            self._connection.send(place)

    def is_done(self) -> bool:
        """Tell whether a result can be had, or the process has ended."""
        return self._connection.poll()

    def result(self) -> Any:
        """Wait for the result of the item that was begun.

        Raises:
            _Ended: the process has ended.
            Exception: of the task.
        """
        try:
            result, error = self._connection.recv()
        except (EOFError, OSError):
            raise _Ended from None
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.terminate()
        self.process.join()


def _serve(
    do: Callable[[int], Any], most: int, connection: Connection, others_end: Connection
) -> None:
    """Do items until the other process ends, or ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal
    gc.freeze()  # what was made before the fork: to look through it for cycles copies its memory
    others_end.close()  # the fork has copied it: while it is open here, no end of it is seen
    with contextlib.suppress(EOFError, BrokenPipeError):
        for _ in range(most):
            place = connection.recv()
            try:
                connection.send((do(place), None))
            except Exception as error:
                connection.send((None, error))


def _peak_bytes() -> int:
    """Return the most memory that this process has had. Linux counts it in KiB."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
