"""What the members of an all-to-all send each other: unlike sizes, of which any two must fit."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.ops import argument
from graph_trainer.errors import VerificationError

MODULUS = 2**128

_SENT, _RECEIVED = "input_split_sizes", "output_split_sizes"


@dataclass(frozen=True, slots=True)
class Splits:
    """The all-to-all of one rank."""

    sent: tuple[int, ...]
    """Rows to each member of the group, in group order."""
    received: tuple[int, ...]
    """Rows from each."""

    def __str__(self) -> str:
        return f"sends {list(self.sent)} rows and receives {list(self.received)}"


def has_splits(node: fx.Node) -> bool:
    """Whether a collective may send every member another number of rows."""
    return argument(node, _SENT) is not None


def splits_of(node: fx.Node, source: fx.Node, members: int) -> Splits | None:
    """The splits of an all-to-all of `source`; None where data decides them.

    Raises:
        VerificationError: not one for each member of the group.
    """
    both = []
    for name, tensor in ((_SENT, source), (_RECEIVED, node)):
        sizes = argument(node, name)
        assert isinstance(sizes, (list, tuple))
        if not sizes:  # as the op reads it: the same to all
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


def first_mismatch(splits: Mapping[int, Splits], speaks: Sequence[int]) -> tuple[int, int] | None:
    """Two ranks of which the second does not expect what the first sends it; None if all fit.

    Arguments:
        splits: by rank whose graph was read.
        speaks: by place in the group, which of them speaks for the member there.
    """
    places: dict[int, list[int]] = defaultdict(list)
    for place, rank in enumerate(speaks):
        places[rank].append(place)
    for one, two in itertools.product(splits, repeat=2):
        sent = {splits[one].sent[place] for place in places[two]}
        expected = {splits[two].received[place] for place in places[one]}
        if len(sent | expected) > 1:
            return one, two
    return None


def balance(splits: Splits, own: int, key: object) -> int:
    """A number that the members of a group can add up without telling each other their splits:
    the sum is 0 modulo MODULUS where all fit, and hardly ever else.

    Arguments:
        own: this rank's place in the group.
        key: which all-to-all it is; the same on every member.
    """
    sent = sum(_mark(key, own, other, rows) for other, rows in enumerate(splits.sent))
    received = sum(_mark(key, other, own, rows) for other, rows in enumerate(splits.received))
    return (sent - received) % MODULUS


def _mark(key: object, sender: int, receiver: int, rows: int) -> int:
    text = repr((key, sender, receiver, rows))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
