"""Splits of an all-to-all: the sizes differ from member to member, and must fit pair by pair."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import fx

from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.ops import argument
from graph_trainer.errors import VerificationError

MODULUS = 2**128

_SENT, _RECEIVED = "input_split_sizes", "output_split_sizes"


@dataclass(frozen=True, slots=True)
class Splits:
    """The splits of one rank's all-to-all."""

    sent: tuple[int, ...]
    """Number of rows to each member of the group, in group order."""
    received: tuple[int, ...]
    """Number of rows from each member, in group order."""

    def __str__(self) -> str:
        return f"sends {list(self.sent)} rows and receives {list(self.received)}"


def has_splits(node: fx.Node) -> bool:
    """Return whether a collective may send every member another number of rows."""
    return argument(node, _SENT) is not None


def splits_of(node: fx.Node, source: fx.Node, members: int) -> Splits | None:
    """Read the splits of an all-to-all that sends `source`; None where data decides them.

    Raises:
        VerificationError: there is not one size for each member of the group.
    """
    both = []
    for name, tensor in ((_SENT, source), (_RECEIVED, node)):
        sizes = argument(node, name)
        assert isinstance(sizes, (list, tuple))
        if not sizes:  # the op reads an empty list as equal sizes
            sizes = [tensors_of(tensor)[0].shape[0] // members] * members
        if not all(isinstance(size, int) for size in sizes):
            return None
        if len(sizes) != members:
            raise VerificationError(
                f"node '{node.name}' ({node.target}) has {name} = {list(sizes)}, and its group "
                f"has {members} members: give one size for each"
            )
        both.append(tuple(sizes))
    return Splits(*both)


def balance(splits: Splits, place: int, key: object) -> int:
    """Compute a number whose sum over the group tells whether the splits fit.

    The sum is 0 modulo MODULUS where all splits fit, and almost never otherwise; so the members
    need not send each other their splits. `place` is this rank's in the group; `key` identifies the
    all-to-all, with the same value on every member.
    """
    sent = sum(_mark(key, place, other, rows) for other, rows in enumerate(splits.sent))
    received = sum(_mark(key, other, place, rows) for other, rows in enumerate(splits.received))
    return (sent - received) % MODULUS


def _mark(key: object, sender: int, receiver: int, rows: int) -> int:
    text = repr((key, sender, receiver, rows))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
