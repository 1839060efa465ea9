"""The results that backward keeps, by block and op, from a plan of memory or a user's file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeptOp:
    """An op of the blocks, and the blocks in which its results are kept."""

    module: str
    """FQN of its module below the block, "" for the block itself."""
    op: str
    nth: int
    """Which of the ops of this module and name it is, from 0."""
    keep_in: tuple[str, ...]
    """FQNs of the blocks, in order."""
    mib: float = 0.0
    """MiB of its results, in one block of one rank."""
    milliseconds: float = 0.0
    """The time of running it again."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.module, self.op, self.nth


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """The ops of blocks and the parameters that are kept until backward."""

    rows: tuple[KeptOp, ...]
    parameters: tuple[str, ...] | None = None
    """FQNs of parameters that stay unsharded until backward; None if another pass decides."""
    offloaded: tuple[str, ...] = ()
    """FQNs of the blocks whose inputs are kept in host memory until backward."""
