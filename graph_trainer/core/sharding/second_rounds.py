"""All-reduces of two rounds: the second starts once the first is over, whoever waits for what."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

EXIT_SECONDS = 1.0
"""How long a process that ends waits for a thread of a group. One that frees a tensor or a
`dist.Work` needs the interpreter's lock, and aborts the process if the interpreter has ended by
then; one that waits for a rank that has gone may wait for long.
"""


class SecondRounds:
    """The thread that starts the second rounds of a group, in the order of the first ones.

    It does not depend on who waits for what: ranks may wait for their collectives in different
    orders, in several threads, or for something else altogether.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], dist.Work], Future[Any]] | None]
        self._waiting = queue.SimpleQueue()
        thread = threading.Thread(target=_start_each, args=(self._waiting,), daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, self._waiting)

    def start(self, start: Callable[[], dist.Work]) -> _SecondRound:
        second = _SecondRound()
        self._waiting.put((start, second.started))
        return second


def _start_each(
    waiting: queue.SimpleQueue[tuple[Callable[[], dist.Work], Future[Any]] | None],
) -> None:
    while (item := waiting.get()) is not None:
        start, started = item
        try:
            with torch.inference_mode():
                started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
        del item, start, started  # or they would live until the next collective


class _SecondRound:
    """The second round of an all-reduce, which starts once the first one is over."""

    def __init__(self) -> None:
        self.started: Future[dist.Work] = Future()

    def wait(self, timeout: timedelta) -> None:
        start = time.monotonic()
        try:
            work = self.started.result(timeout.total_seconds() or None)
        except TimeoutError:
            raise RuntimeError(f"Timed out: an all-reduce took longer than {timeout}") from None
        rest = timeout - timedelta(seconds=time.monotonic() - start)
        work.wait(max(rest, timedelta(milliseconds=1)) if timeout else timeout)

    def is_completed(self) -> bool:
        if not self.started.done():
            return False
        return self.started.exception() is not None or self.started.result().is_completed()


def _end(thread: threading.Thread, waiting: queue.SimpleQueue[Any]) -> None:
    waiting.put(None)
    if thread is not threading.current_thread():  # which may free the group
        thread.join(EXIT_SECONDS)
