"""Collectives that send more than one round of messages, and what waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_POLL_SECONDS = 1e-4
"""How often a wait looks for rounds that it can start, while any are left to start."""

Rounds = Iterator[tuple[dist.Work, bool]]
"""A collective: starts a round of messages, yields it and whether another one follows, and goes on
when that round is over."""


class StartedCollective:
    """A collective under way, from its first round on."""

    def __init__(self, group: dist.ProcessGroup, rounds: Rounds) -> None:
        self.group = group
        self._rounds = rounds
        self.failure: Exception | None = None
        """Why it cannot go on although its round is over."""
        self.round: dist.Work | None
        """The round of messages under way; None where the result is in place."""
        self.round, self.has_more = next(rounds)

    def is_over(self) -> bool:
        """Return whether its round is over: the last one, or one that failed."""
        work = self.round
        return work is None or bool(self.failure) or work.is_completed() and not self.has_more

    def go_on(self, after: dist.Work | None) -> None:
        """Start the next round, or put the result in place, unless another thread has done so.

        Keeps a failure for whoever waits for the collective.
        """
        if after is None or self.round is not after or self.failure:
            return
        try:
            after.wait()
            with torch.no_grad():
                self.round, self.has_more = next(self._rounds, (None, False))
        except Exception as error:
            self.failure = error


class LaterRounds:
    """The collectives of a process that have another round to start.

    Whoever waits for any collective starts these rounds too. Ranks may so wait for the same
    collectives in different orders: none stands still because another one waits for something else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two threads of a program may wait
        self._collectives: list[StartedCollective] = []

    def add(self, collectives: Iterable[StartedCollective]) -> None:
        with self._lock:
            self._collectives += [each for each in collectives if each.has_more]

    def wait(self, collective: StartedCollective, timeout: timedelta) -> None:
        """Wait until the result of a collective is in place.

        Raises:
            RuntimeError: it failed, or one that its group started before and that it waits for.
        """
        until = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
        while True:
            with self._lock:
                # the second rounds of a group start in the order of the first
                left = (c for c in self._collectives if c.has_more and c.group is collective.group)
                first = next(left) if collective.has_more else collective
                work = first.round
            if work is None:
                return
            while self._collectives and not work.is_completed() and time.monotonic() < until:
                self.go_on()
                time.sleep(_POLL_SECONDS)
            work.wait(timeout)
            with self._lock:
                first.go_on(work)
            if first.failure:
                raise first.failure

    def go_on(self) -> None:
        """Start each round that can start."""
        with self._lock:
            standing = set()
            for each in self._collectives:
                if each.group not in standing and each.round and each.round.is_completed():
                    each.go_on(each.round)
                if each.has_more:
                    standing.add(each.group)
            self._collectives = [each for each in self._collectives if each.has_more]


class RoundsWork(dist.Work):
    """Collectives under way. Their results are in place once they were waited for."""

    def __init__(
        self,
        collectives: list[StartedCollective],
        later_rounds: LaterRounds,
        sent: list[torch.Tensor] | None = None,
        results: list[torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._collectives = collectives
        self._later_rounds = later_rounds
        self._sent = sent  # gloo may drop them sooner, at a moment that nobody can predict
        self._results = results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for each in self._collectives:
            self._later_rounds.wait(each, timeout)
        self._sent = None
        return True

    def is_completed(self) -> bool:
        self._later_rounds.go_on()
        if not all(each.is_over() for each in self._collectives):
            return False
        for each in self._collectives:
            each.go_on(each.round)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done: its value are the results. Waits for them."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future
