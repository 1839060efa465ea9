"""Read the table of what backward keeps that `MemoryTable.to_toml` wrote and a user may edit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, FiniteFloat, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from graph_trainer.core.passes.plan_memory.table import KeptOp, MemoryTable
from graph_trainer.errors import ConfigError
from graph_trainer.titan.strict import Strict, first_problem

_BLOCK = re.compile(r"(?:.*\.)?\d+", re.DOTALL)
_RANGE = re.compile(r"((?:.*\.)?)(0|[1-9]\d{0,4})-(0|[1-9]\d{0,4})", re.DOTALL)


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
    """Read what `MemoryTable.to_toml` wrote, parsed.

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
