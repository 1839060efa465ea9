"""The decision by block and op: to be read by people, edited, and followed by other graphs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph_trainer.core.passes.plan_memory.block import Block, Op
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.core.units import MIB
from graph_trainer.errors import ConfigError, PassError

_BLOCK = re.compile(r"(?:.*\.)?\d+", re.DOTALL)
_RANGE = re.compile(r"((?:.*\.)?)(0|[1-9]\d{0,4})-(0|[1-9]\d{0,4})", re.DOTALL)
_OFFLOADED = "offload_inputs_of"
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
class Row:
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

    rows: tuple[Row, ...]
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
        """Make the table of what is saved of each block, by the numbers of its ops.

        Args:
            saved: by block. Ops of which there is a choice and that no block saves are listed too.
        """
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
            Row(*key, tuple(names), sizes[key].bytes / MIB, sizes[key].nanoseconds / 1e6)
            for key, names in kept.items()
        )
        kept_whole = None if parameters is None else tuple(sorted(parameters))
        return cls(tuple(rows), kept_whole, tuple(offloaded))

    def saved(self, blocks: Sequence[Block]) -> dict[str, set[int]]:
        """Return the numbers of the ops that are saved of each block.

        Raises:
            PassError: an op or a block of the table is none of the graph's.
        """
        names = {block.name for block in blocks}
        known = {(op.module, op.target, op.nth) for block in blocks for op in block.ops}
        wrong = [_called(row) for row in self.rows if row.key not in known]
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
        keys: dict[str, set[tuple[str, str, int]]] = {name: set() for name in names}
        for row in self.rows:
            for name in row.keep_in:
                keys[name].add(row.key)
        return {
            block.name: {
                number
                for number, op in enumerate(block.ops)
                if (op.module, op.target, op.nth) in keys[block.name]
            }
            for block in blocks
        }

    def to_toml(self) -> str:
        """Write the table as TOML, with what it is for as comment."""
        lines = [_HEADER]
        if self.parameters is not None:
            lines.append(f"keep_unsharded = {_strings(self.parameters)}\n")
        if self.offloaded:
            lines.append(f"offload_inputs_of = {_strings(in_ranges(self.offloaded))}\n")
        if not self.rows:
            lines.append("activation = []  # the model has no numbered blocks\n")
        for row in self.rows:
            lines += [
                "[[activation]]",
                f"module = {_string(row.module)}",
                f"op = {_string(row.op)}",
                f"nth = {row.nth}",
                f"keep_in = {_strings(in_ranges(row.keep_in))}",
                f"mib = {row.mib:.3f}",
                f"milliseconds = {row.milliseconds:.3f}\n",
            ]
        return "\n".join(lines)

    @classmethod
    def from_toml(cls, table: Mapping[str, Any], where: str) -> MemoryTable:
        """Read what `to_toml` wrote, parsed.

        Args:
            where: the key and the file, for messages.

        Raises:
            ConfigError: a key or a value that a table does not have.
        """
        entries = table.get("activation")
        _refuse_unknown(table, ("activation", "keep_unsharded", _OFFLOADED), where)
        if not isinstance(entries, list):
            raise ConfigError(
                f"{where}: activation is {entries!r}; a table of what to keep has [[activation]] "
                'entries: take the file that a run with activation_checkpoint.type = "budget" wrote'
            )
        rows = tuple(_row(entry, number, where) for number, entry in enumerate(entries, start=1))
        numbers: dict[tuple[str, str, int], int] = {}
        for number, row in enumerate(rows, start=1):
            if numbers.setdefault(row.key, number) != number:
                raise ConfigError(
                    f"{where}: [[activation]] number {number} is {_called(row)}, as number "
                    f"{numbers[row.key]} is; take one of them out"
                )
        kept = table.get("keep_unsharded")
        if kept is not None and not _is_strings(kept):
            raise ConfigError(f"{where}: keep_unsharded is {kept!r}; write a list of parameters")
        away = _blocks(table.get(_OFFLOADED, []), f"{where}: {_OFFLOADED}")
        return cls(rows, None if kept is None else tuple(kept), away)


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


def from_ranges(ranges: Iterable[str]) -> list[str]:
    """Read what `in_ranges` wrote.

    Raises:
        ValueError: something else.
    """
    names = []
    for each in ranges:
        match = _RANGE.fullmatch(each)
        if match is None and not _BLOCK.fullmatch(each):
            raise ValueError(each)
        stem, first, last = match.groups() if match else (each, "0", "0")
        if int(last) < int(first):
            raise ValueError(each)
        numbers = range(int(first), int(last) + 1)
        names += [f"{stem}{number}" for number in numbers] if match else [each]
    return names


def _row(entry: Any, number: int, where: str) -> Row:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: [[activation]] number {number} is {entry!r}; not a table")
    _refuse_unknown(entry, Row.__slots__, f"{where}: [[activation]] number {number}")
    values = {"mib": 0.0, "milliseconds": 0.0, **entry}
    for key, wanted, holds in (
        ("module", "a name", lambda v: isinstance(v, str)),
        ("op", "a name", lambda v: isinstance(v, str)),
        ("nth", "a number from 0", lambda v: type(v) is int and v >= 0),
        ("mib", "a number", lambda v: type(v) in (int, float) and math.isfinite(v)),
        ("milliseconds", "a number", lambda v: type(v) in (int, float) and math.isfinite(v)),
    ):
        if not holds(values.get(key)):
            raise ConfigError(
                f"{where}: {key} of [[activation]] number {number} is {values.get(key)!r}; it must "
                f"be {wanted}"
            )
    place = f"{where}: keep_in of [[activation]] number {number}"
    return Row(**values | {"keep_in": _blocks(values.get("keep_in"), place)})


def _blocks(value: Any, place: str) -> tuple[str, ...]:
    if not _is_strings(value):
        raise ConfigError(f'{place} is {value!r}; write a list of blocks such as "layers.0-7"')
    try:
        return tuple(from_ranges(value))
    except ValueError as error:
        raise ConfigError(
            f"{place} has '{error}'; write a block as layers.7, several as layers.0-7"
        ) from None


def _refuse_unknown(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            hint = did_you_mean(key, known, "; did you mean {}?")
            raise ConfigError(f"{where} has the key {key}, which no table has{hint}")


def _called(row: Row) -> str:
    return f"{row.op} number {row.nth} of '{row.module or 'the block itself'}'"


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _string(value: str) -> str:
    """Quote a string as in JSON, which in TOML escapes one more character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _strings(values: Iterable[str]) -> str:
    return f"[{', '.join(map(_string, values))}]"
