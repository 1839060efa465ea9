"""Let the ranks that run one graph together make the same decisions: they exchange values."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from graph_trainer.core.ordering.members import REMEDY
from graph_trainer.core.torch_private_groups import default_store
from graph_trainer.errors import CollectiveError, VerificationError

_GLOO = re.compile(r"gloo/(transport|rendezvous)|Application timeout caused pair closure")
_FAILURE = "graph_trainer/failure"
_ERROR_SHOWN = 4000  # every rank receives as much from each

T = TypeVar("T")


class Agreement:
    """The ranks of a process group, by default the default one, that decide together on a graph.

    All of them must call its methods equally often and in the same order. Code that may raise on
    one rank must run in `errors_sent`, so that the others do not wait for that rank. If no other
    rank answers (no process group, a group of one, fake ranks), nothing is communicated.
    """

    is_apart = False
    """Whether there are other ranks that do not take part, so that work that needs them is refused.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._received_failure = False

    @property
    def ranks(self) -> list[int]:
        """The members, by their ranks in the world."""
        if not dist.is_initialized():
            return [0]
        return [dist.get_rank()] if self._is_alone() else dist.get_process_group_ranks(self._group)

    def gather(self, mine: T, doing: str = "capture the step") -> list[T]:
        """Return the value of every member, by their order in `ranks`. One small exchange.

        Args:
            doing: what a rank with an error could not do, for the message.

        Raises:
            VerificationError: on every rank, with the error of another rank; or members call this
                at different points of their work.
            CollectiveError: another rank has ended, or did not arrive (gloo).
        """
        messages = self._exchange(("", mine))
        ranks = self.ranks
        for rank, (error_text, _) in zip(ranks, messages, strict=True):
            if error_text:
                self._received_failure = True
                raise VerificationError(f"rank {rank} could not {doing}: {error_text}")
        values: list[Any] = [value for _, value in messages]
        kinds = [type(value).__name__ for value in values]
        for rank, kind in zip(ranks, kinds, strict=True):
            if kind != kinds[0]:
                # one rank has finished its passes while a pass of another rank exchanges a number
                self._received_failure = True
                raise VerificationError(
                    f"ranks are at different points of the pass pipeline: rank {ranks[0]} "
                    f"exchanges its {kinds[0]}, and rank {rank} its {kind}. {REMEDY}"
                )
        return values

    def all_reduce_max(self, number: int) -> int:
        """Return the largest int of all members. One small exchange."""
        return max(self.gather(number))

    def same(self, value: object) -> bool:
        """Return whether all members call this with a value of the same `repr`. Two exchanges."""
        number = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
        largest = self.all_reduce_max(number)
        smallest = -self.all_reduce_max(-number)
        return largest == smallest

    @contextlib.contextmanager
    def errors_sent(self, doing: str = "capture the step") -> Iterator[None]:
        """Inside, send an error of this rank to the other members before it is raised.

        Sends nothing if another member has failed or ended, because no member waits for this one
        then. If this rank is apart, publishes the error with `doing`, for ranks that later miss
        this one.
        """
        try:
            yield
        except Exception as error:
            error_text = f"{type(error).__name__}: {error}"[:_ERROR_SHOWN]
            if self.is_apart:
                publish_failure(f"could not {doing} again, {error_text}")
            elif not self._received_failure:
                # members that wait elsewhere receive nothing: this error is the one to raise
                with contextlib.suppress(CollectiveError):
                    self._exchange((error_text, None))
            raise

    def _is_alone(self) -> bool:
        """Return whether no other rank answers."""
        group = self._group
        return (
            not dist.is_initialized()
            or dist.get_world_size(group) == 1
            or dist.get_backend(group) == "fake"
        )

    def _exchange(self, mine: T) -> list[T]:
        if self._is_alone():
            return [mine]
        values: list[Any] = [None] * len(self.ranks)
        try:
            dist.all_gather_object(values, mine, group=self._group)
        except RuntimeError as error:
            if not is_collective_failure(error):
                raise
            self._received_failure = True
            place = "the exchange of decisions between ranks"
            raise CollectiveError(place, reason_of(error)) from error
        return values


class OneRank(Agreement):
    """A rank that decides without others, also if there are process groups; see `is_apart`."""

    def __init__(self, *, is_apart: bool = False) -> None:
        super().__init__()
        self.is_apart = is_apart

    def _is_alone(self) -> bool:
        return True


def is_collective_failure(error: RuntimeError) -> bool:
    """Return whether an error means that a collective could not complete."""
    return isinstance(error, dist.DistError) or bool(_GLOO.search(str(error)))


def reason_of(error: RuntimeError) -> str:
    """Return the message of the backend on one line."""
    return " ".join(str(error).split())[:500]


def publish_failure(text: str) -> None:
    """Publish why this rank ends, or waits for the others, whose collectives will then fail."""
    if dist.is_initialized() and dist.get_backend() != "fake":
        default_store().set(_FAILURE, f"rank {dist.get_rank()} {text}")


def withdraw_failure() -> None:
    """Take back what a rank has published, when the other ranks have arrived."""
    if dist.is_initialized() and dist.get_backend() != "fake":
        default_store().delete_key(_FAILURE)


def published_failure() -> str:
    """Return the text that an ended rank has published with `publish_failure`; "" if none has."""
    try:
        store = default_store()
        return store.get(_FAILURE).decode() if store.check([_FAILURE]) else ""
    except dist.DistError:  # the ended rank hosted the store; that rank shows its error itself
        return ""
