"""Replay the random numbers of a recomputation: activation checkpointing runs forward again.

Eager checkpointing restores the state of the random generator before it runs a block again,
so that dropout drops the same values. A graph has no such state: a repeated draw would give
other numbers. Here a draw is known to be a repetition by the restored generator state, and it
reuses the values of the first draw; later draws keep their position in the random stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate

from graph_trainer.core.graph.annotations import (
    copy_annotations,
    tensors_of,
)
from graph_trainer.core.graph.last_writes import LastWrites
from graph_trainer.core.graph.ops import (
    OpOverload,
    is_random,
    schema_of,
    subgraphs,
    written_arguments,
)
from graph_trainer.core.torch_private import TorchDispatchMode
from graph_trainer.errors import CaptureError

# Seeds that mark positions in the random stream during capture, far from a user's seed: the high
# bits count draws, the low bits higher-order ops since the last draw.
_FIRST_MARK = 0x6772_6170_6800_0000
_PER_DRAW = 1 << 20

# Keys that torch.fx.traceback.annotate writes on a node; removed when capture ends.
_CUSTOM, _DRAW, _RUN_AGAIN = "custom", "random_draw", "run_again"


class RandomDraws(TorchDispatchMode):
    """Write onto every random node of a trace on fake tensors which draw of the step it is.

    Fake ops draw nothing, so the CPU generator can count: its seed advances at each random op,
    checkpointing saves and restores it with the generator's state, and the state from before the
    trace is restored at the end.

    Draws within the subgraphs of a higher-order op are not seen here: the op is only marked
    where a recomputation runs it again.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, tuple[str, int]] = {}
        self._next_mark = _FIRST_MARK
        self._higher_order: set[int] = set()

    def __enter__(self) -> RandomDraws:
        self._state_before = torch.get_rng_state()
        self._move_to(_FIRST_MARK)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_rng_state(self._state_before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not isinstance(func, OpOverload):
            return self._run_higher_order(func, args, kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or _has_own_generator(
            func._schema, args, kwargs or {}
        ):
            return func(*args, **(kwargs or {}))
        mark = self._place() // _PER_DRAW * _PER_DRAW
        if mark not in self._drawn:
            self._next_mark += _PER_DRAW
            self._drawn[mark] = (str(func), self._next_mark)
        name, following = self._drawn[mark]
        if name != str(func):
            raise CaptureError(
                f"a recomputation draws random numbers with {func} where forward drew with "
                f"{name}; what is recomputed must draw as forward did"
            )
        self._move_to(following)
        with annotate({_DRAW: mark}):
            return func(*args, **(kwargs or {}))

    def _run_higher_order(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = self._place()
        again = place in self._higher_order
        self._higher_order.add(place)
        self._move_to(place + 1)
        if not again:
            return op(*args, **kwargs)
        with annotate({_RUN_AGAIN: True}):
            return op(*args, **kwargs)

    def _place(self) -> int:
        return torch.random.default_generator.initial_seed()

    def _move_to(self, mark: int) -> None:
        torch.random.default_generator.manual_seed(mark)


def _has_own_generator(
    schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Tell whether an op draws from a generator of the user. Checkpointing does not restore its
    state, so a recomputation draws other numbers in eager too."""
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    return any(
        isinstance(value, torch.Generator)
        # the dispatcher makes a new wrapper of the default generator, known by its seed: a mark
        and value.initial_seed() != torch.random.default_generator.initial_seed()
        for value in given.values()
    )


def share_repeated_draws(graph: fx.Graph) -> None:
    """Let every repeated draw reuse the values of the first. Linear in nodes.

    Raises:
        CaptureError: a recomputation runs a higher-order op that draws within its subgraphs.
    """
    first: dict[int, fx.Node] = {}
    repeated: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        if _pop(node, _RUN_AGAIN):
            _check_draws_nothing(node)
        mark = _pop(node, _DRAW)
        if mark is None or not is_random(node):
            continue
        if first.setdefault(mark, node) is not node:
            repeated.append((first[mark], node))
    if not repeated:
        return
    writes = LastWrites(graph)
    kept: dict[fx.Node, fx.Node] = {}
    for original, again in repeated:
        if original not in kept:
            kept[original] = _values_of(graph, original, writes)
        if written_arguments(again):
            with graph.inserting_before(again):
                copy = graph.call_function(
                    torch.ops.aten.copy_.default, (again.args[0], kept[original])
                )
            copy.meta = dict(again.meta)
            again.replace_all_uses_with(copy)
        else:
            again.replace_all_uses_with(kept[original])
        graph.erase_node(again)


def _pop(node: fx.Node, key: str) -> Any:
    custom = dict(node.meta.get(_CUSTOM) or {})
    value = custom.pop(key, None)
    if value is not None:
        node.meta[_CUSTOM] = custom
    return value


def _check_draws_nothing(node: fx.Node) -> None:
    """Refuse a higher-order op that is run again and would draw other numbers than before."""
    for module in subgraphs(node):
        for inner in module.graph.nodes:
            _pop(inner, _RUN_AGAIN)
            _check_draws_nothing(inner)
    if is_random(node) and schema_of(node) is None:
        raise CaptureError(
            f"a recomputation runs {node.target} again (node '{node.name}'), which draws random "
            "numbers within its subgraphs and would draw others than forward did: draw outside "
            "of it, or leave it out of activation checkpointing"
        )


def _values_of(graph: fx.Graph, draw: fx.Node, writes: LastWrites) -> fx.Node:
    """Return the node whose value stays what `draw` drew: a clone where it is written later."""
    values = tensors_of(draw)
    if len(values) != 1:
        return draw  # dropout with its mask, attention: no op writes into their results
    if writes.between(draw, None, draw) is None and not written_arguments(draw):
        return draw
    with graph.inserting_after(draw):
        clone = graph.call_function(torch.ops.aten.clone.default, (draw,))
    clone.meta = {"val": draw.meta["val"]}
    copy_annotations(draw, clone)
    return clone
