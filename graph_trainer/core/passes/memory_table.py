"""What backward keeps, by block and op: decided by a plan of memory, or given by a user."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeptOp:
    """An op of the blocks, and where its results are kept."""

    module: str
    """FQN of its module below the block, "" for the block itself."""
    op: str
    nth: int
    """Which of the ops of this module and name it is, from 0."""
    keep_in: tuple[str, ...]
    """FQNs of the blocks, in order."""
    mib: float = 0.0
    """What keeping its results takes, in one block of one rank."""
    milliseconds: float = 0.0
    """What running it again takes."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.module, self.op, self.nth


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """What is kept of each block; and which parameters, where that is decided too."""

    rows: tuple[KeptOp, ...]
    parameters: tuple[str, ...] | None = None
    """FQNs of those that stay unsharded until backward; None where another pass decides."""
    offloaded: tuple[str, ...] = ()
    """FQNs of the blocks whose inputs wait in host memory for backward."""
