"""A block as the solver and the table see it: its ops, their costs, what may be done with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx


@dataclass(frozen=True, slots=True)
class Op:
    """An op of a block: a node with the waits for it and the results taken out of its tuple."""

    module: str
    """FQN of its module below the block, "" for the block itself."""
    target: str
    nth: int
    """Which of the ops of this module and target it is, from 0."""
    bytes: int
    """What keeping its results for backward takes."""
    nanoseconds: int
    """What running it again takes."""
    reads: tuple[int, ...]
    """Numbers of the block's ops that it reads."""
    is_needed: bool
    """Whether backward reads a result of it."""
    may_save: bool
    """Whether it makes storages of its own that may be kept."""
    may_recompute: bool


@dataclass(frozen=True, slots=True)
class Block:
    """The forward of one block, as a solver sees it. Equal blocks have equal `ops`."""

    name: str
    ops: tuple[Op, ...]
    nodes: list[list[fx.Node]] = field(repr=False)
    """The nodes of each op."""
