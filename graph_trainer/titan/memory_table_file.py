"""The file with the table of what backward keeps: written by a run, to be edited, and read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, FiniteFloat, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from graph_trainer.core.passes.memory_table import KeptOp, MemoryTable
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.remedies import as_toml
from graph_trainer.titan.strict import Strict, first_problem

_BLOCK = re.compile(r"(?:.*\.)?\d+", re.DOTALL)
_RANGE = re.compile(r"((?:.*\.)?)(0|[1-9]\d{0,4})-(0|[1-9]\d{0,4})", re.DOTALL)


_HEADER = """\
# What backward has of forward, by block and op. An op is kept in the blocks of `keep_in`; in others
# it is freed after forward and computed again in backward, with what it takes to do so, if backward
# needs it. Edit `keep_in` and give the file back:
#   [activation_checkpoint]
#   type = "file"
#   path = "this file"
# mib and milliseconds are of one block on one rank, and for reading only.
"""


def memory_table_to_toml(table: MemoryTable) -> str:
    """Write the table as TOML, with what it is for as comment."""
    lines = [_HEADER]
    if table.parameters is not None:
        lines.append(f"keep_unsharded = {as_toml(table.parameters)}\n")
    if table.offloaded:
        lines.append(f"offload_inputs_of = {as_toml(in_ranges(table.offloaded))}\n")
    if not table.rows:
        lines.append("activation = []  # the model has no numbered blocks\n")
    for row in table.rows:
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


def from_ranges(ranges: Sequence[str]) -> list[str]:
    """List the blocks that `in_ranges` wrote, layers.0-2 as layers.0, layers.1, layers.2.

    Raises:
        PydanticCustomError: a name or a range that is not one of blocks.
    """
    names = []
    for entry in ranges:
        match = _RANGE.fullmatch(entry)
        if match and int(match[2]) <= int(match[3]):
            names += [f"{match[1]}{number}" for number in range(int(match[2]), int(match[3]) + 1)]
        elif not match and _BLOCK.fullmatch(entry):
            names.append(entry)
        else:
            raise PydanticCustomError(
                "blocks",
                "'{name}' is not a block; write a block as layers.7, several as layers.0-7",
                {"name": entry},
            )
    return names


_Blocks = Annotated[list[str], AfterValidator(from_ranges)]


class _Activation(Strict):
    module: str
    op: str
    nth: Annotated[int, Field(ge=0)]
    keep_in: _Blocks
    mib: FiniteFloat = 0.0
    milliseconds: FiniteFloat = 0.0


class _Table(Strict):
    activation: list[_Activation]
    keep_unsharded: list[str] | None = None
    offload_inputs_of: _Blocks = []

    @model_validator(mode="after")
    def _check_twice(self) -> _Table:
        first: dict[tuple[str, str, int], int] = {}
        for number, row in enumerate(self.activation):
            earlier = first.setdefault((row.module, row.op, row.nth), number)
            if earlier != number:
                same = f"activation.{number} is the same op as activation.{earlier}"
                raise PydanticCustomError("twice", f"{same}; take one out")
        return self


def memory_table_of(table: Mapping[str, Any], where: str) -> MemoryTable:
    """Read what `memory_table_to_toml` wrote, parsed.

    Args:
        where: the key and the file, for messages.

    Raises:
        ConfigError: a key or a value that a table does not have.
    """
    try:
        checked = _Table.model_validate(table)
    except ValidationError as error:
        keys = (*_Table.model_fields, *_Activation.model_fields)
        raise ConfigError(
            f"{where}: {first_problem(error, keys)}. Entries are counted from 0. A run with "
            'activation_checkpoint.type = "budget" writes such a file'
        ) from error
    rows = (
        KeptOp(row.module, row.op, row.nth, tuple(row.keep_in), row.mib, row.milliseconds)
        for row in checked.activation
    )
    kept = checked.keep_unsharded
    parameters = None if kept is None else tuple(kept)
    return MemoryTable(tuple(rows), parameters, tuple(checked.offload_inputs_of))
