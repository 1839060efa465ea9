"""The decision by block and op: to be read by people, edited, and followed by other graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graph_trainer.core.passes.plan_memory.solver import Block, Op
from graph_trainer.core.suggest import as_toml, did_you_mean
from graph_trainer.core.units import MIB
from graph_trainer.errors import PassError

_HEADER = """\
# What backward has of forward, by block and op. An op is kept in the blocks of `keep_in`; in others
# it is freed after forward and computed again in backward, with what it takes to do so, if backward
# needs it. Edit `keep_in` and give the file back:
#   [activation_checkpoint]
#   type = "file"
#   path = "this file"
# mib and milliseconds are of one block on one rank, and for reading only.
"""


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

    @classmethod
    def of(
        cls,
        blocks: Sequence[Block],
        saved: Mapping[str, Iterable[int]],
        parameters: Iterable[str] | None,
        offloaded: Iterable[str] = (),
    ) -> MemoryTable:
        """Make the table of the ops that each block saves, given by their numbers. It also lists
        ops that a block could save and none does."""
        kept: dict[tuple[str, str, int], list[str]] = {}
        sizes: dict[tuple[str, str, int], Op] = {}
        for block in blocks:
            chosen = set(saved[block.name])
            for number, op in enumerate(block.ops):
                if op.may_save and op.may_recompute and op.bytes:
                    key = (op.module, op.target, op.nth)
                    sizes.setdefault(key, op)
                    kept.setdefault(key, []).extend([block.name] if number in chosen else [])
        rows = (
            KeptOp(*key, tuple(names), sizes[key].bytes / MIB, sizes[key].nanoseconds / 1e6)
            for key, names in kept.items()
        )
        kept_whole = None if parameters is None else tuple(sorted(parameters))
        return cls(tuple(rows), kept_whole, tuple(offloaded))

    def saved(self, blocks: Sequence[Block]) -> dict[str, set[int]]:
        """Return, by block, the numbers of the ops whose results are saved. A PassError where the
        table has an op or a block that the graph does not have."""
        names = {block.name for block in blocks}
        known = {(op.module, op.target, op.nth) for block in blocks for op in block.ops}
        wrong = [
            f"{row.op} number {row.nth} of '{row.module or 'the block itself'}'"
            for row in self.rows
            if row.key not in known
        ]
        named = {name for row in self.rows for name in row.keep_in}.union(self.offloaded)
        wrong += sorted(named - names)
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            hint = did_you_mean(wrong[0], [*names], ". Did you mean '{}'?")
            raise PassError(
                f"activation_checkpoint.path: the table of what to keep is of another model: this "
                f"one has no {', '.join(wrong[:3])}{more}{hint}. Make a table for this model with "
                'activation_checkpoint.type = "budget"'
            )
        kept = {(name, row.key) for row in self.rows for name in row.keep_in}
        saved: dict[str, set[int]] = {}
        for block in blocks:
            keys = [(block.name, (op.module, op.target, op.nth)) for op in block.ops]
            saved[block.name] = {number for number, key in enumerate(keys) if key in kept}
        return saved

    def to_toml(self) -> str:
        """Write the table as TOML, with what it is for as comment."""
        lines = [_HEADER]
        if self.parameters is not None:
            lines.append(f"keep_unsharded = {as_toml(self.parameters)}\n")
        if self.offloaded:
            lines.append(f"offload_inputs_of = {as_toml(in_ranges(self.offloaded))}\n")
        if not self.rows:
            lines.append("activation = []  # the model has no numbered blocks\n")
        for row in self.rows:
            lines += [
                "[[activation]]",
                f"module = {as_toml(row.module)}",
                f"op = {as_toml(row.op)}",
                f"nth = {row.nth}",
                f"keep_in = {as_toml(in_ranges(row.keep_in))}",
                f"mib = {row.mib:.3f}",
                f"milliseconds = {row.milliseconds:.3f}\n",
            ]
        return "\n".join(lines)


def in_ranges(names: Sequence[str]) -> list[str]:
    """Write numbered names as ranges: layers.0, layers.1, layers.2 as layers.0-2."""
    ranges: list[tuple[str, str, str]] = []
    for name in names:
        digits = name.rpartition(".")[2]
        stem = name.removesuffix(digits)
        before = (stem, str(int(digits) - 1))
        if ranges and ranges[-1][::2] == before and digits == str(int(digits)):
            ranges[-1] = (stem, ranges[-1][1], digits)
        else:
            ranges.append((stem, digits, digits))
    return [f"{stem}{a}" if a == b else f"{stem}{a}-{b}" for stem, a, b in ranges]
