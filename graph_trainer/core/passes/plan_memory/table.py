"""From the choices of a plan of memory to its table, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from graph_trainer.core.passes.memory_table import KeptOp, MemoryTable
from graph_trainer.core.passes.plan_memory.solver import Block, Op
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.core.units import MIB
from graph_trainer.errors import PassError


def table_of(
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
    return MemoryTable(tuple(rows), kept_whole, tuple(offloaded))


def saved_ops(table: MemoryTable, blocks: Sequence[Block]) -> dict[str, set[int]]:
    """Return, by block, the numbers of the ops whose results are saved. A PassError where the
    table has an op or a block that the graph does not have."""
    names = {block.name for block in blocks}
    known = {(op.module, op.target, op.nth) for block in blocks for op in block.ops}
    wrong = [
        f"{row.op} number {row.nth} of '{row.module or 'the block itself'}'"
        for row in table.rows
        if row.key not in known
    ]
    named = {name for row in table.rows for name in row.keep_in}.union(table.offloaded)
    wrong += sorted(named - names)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        hint = did_you_mean(wrong[0], [*names], ". Did you mean '{}'?")
        raise PassError(
            "PassConfig.memory_table: the table of what to keep is of another model: this "
            f"one has no {', '.join(wrong[:3])}{more}{hint}. Make a table for this model with "
            'PassConfig.activation_policy = "budget"'
        )
    kept = {(name, row.key) for row in table.rows for name in row.keep_in}
    saved: dict[str, set[int]] = {}
    for block in blocks:
        keys = [(block.name, (op.module, op.target, op.nth)) for op in block.ops]
        saved[block.name] = {number for number, key in enumerate(keys) if key in kept}
    return saved
