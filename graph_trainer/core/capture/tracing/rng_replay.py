"""Replay the random numbers of a recomputation: activation checkpointing runs forward again.

Eager checkpointing restores the state of the random generator before it runs a block again,
so that dropout drops the same values. A graph has no such state: a repeated draw would give
other numbers, so it reuses the values of the first draw.
"""

# The idea: fake ops draw nothing, so during capture the generator's state is free to count. Its
# seed is a mark of ours, the number of draws so far, and moves on with every random op. Where
# checkpointing restores the state, the seed is an earlier mark again: a draw whose mark has been
# drawn before repeats that draw. The mark is noted on the node of the trace; afterwards
# `share_repeated_draws` replaces each repeated draw by the values of the first. So later draws keep
# their position in the random stream of the step, as in eager.

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate

from graph_trainer.core.capture.refusals.side_effects import user_line
from graph_trainer.core.graph.annotations import copy_annotations, module_of, tensors_of, value_of
from graph_trainer.core.graph.ops import (
    OpOverload,
    draws,
    is_random,
    schema_of,
    subgraphs,
    written_arguments,
)
from graph_trainer.core.graph.value_numbers import ValueNumbers
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.torch_private import TorchDispatchMode
from graph_trainer.errors import CaptureError

# Seeds that mark positions in the random stream during capture, far from a user's seed: the high
# bits count draws, the low bits higher-order ops since the last draw.
_FIRST_MARK = 0x6772_6170_6800_0000
_PER_DRAW = 1 << 20

# Checkpointing and autograd put them between a tensor and its reader, or leave them out.
_SAME_VALUE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)

# Keys that torch.fx.traceback.annotate writes on a node; removed when capture ends.
_CUSTOM, _DRAW, _RUN_AGAIN = "custom", "random_draw", "run_again"


class RandomDraws(TorchDispatchMode):
    """Write onto every random node of a trace on fake tensors which draw of the step it is.

    The generator's state from before the trace is restored at the end. Draws within the subgraphs
    of a higher-order op are not seen here: the op is marked only where it is run again.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, tuple[object, int]] = {}
        self._next_mark = _FIRST_MARK
        self._higher_order: set[int] = set()

    def __enter__(self) -> RandomDraws:
        self._state_before = torch.get_rng_state()
        self._move_to(_FIRST_MARK)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        try:
            if error[0] is None:
                self._place()
        finally:
            torch.set_rng_state(self._state_before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            # the low bits count higher-order ops: one that comes to a place again is run again
            place = self._place()
            is_run_again = place in self._higher_order
            self._higher_order.add(place)
            self._move_to(place + 1)
            with annotate({_RUN_AGAIN: True}) if is_run_again else contextlib.nullcontext():
                return func(*args, **kwargs)
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        place = self._place()
        generators = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator))
        # the dispatcher makes a new wrapper of the default generator, known by its seed: a mark
        if any(generator.initial_seed() != place for generator in generators):
            raise CaptureError(
                f"{func} draws{user_line()} from a generator of the step's or the model's, whose "
                "state a graph does not replay: draw from torch's default generator, or pass the "
                "numbers in the batch"
            )
        # the high bits count draws: a mark that has been drawn is a repetition
        mark = place // _PER_DRAW * _PER_DRAW
        call = _described(func, args, kwargs)
        if mark not in self._drawn:
            self._next_mark += _PER_DRAW
            self._drawn[mark] = (call, self._next_mark)
        elif self._drawn[mark][0] != call:
            raise CaptureError(
                f"{func} draws random numbers{user_line()} from a state of the generator that "
                f"was restored, where another call drew before: {self._drawn[mark][0]}, now "
                f"{call}. What is recomputed must draw as forward did"
            )
        self._move_to(self._drawn[mark][1])
        with annotate({_DRAW: mark}):
            return func(*args, **kwargs)

    def _place(self) -> int:
        place = torch.random.default_generator.initial_seed()
        if not _FIRST_MARK <= place < self._next_mark + _PER_DRAW:
            raise CaptureError(
                f"the step seeds the random generator (found{user_line() or ' at its end'}), which "
                "a graph does not: seed before the step, or draw the numbers there"
            )
        return place

    def _move_to(self, mark: int) -> None:
        torch.random.default_generator.manual_seed(mark)


@contextlib.contextmanager
def refuse_draws_of_python() -> Iterator[None]:
    """Refuse a step that draws from Python's or NumPy's generator; their states are restored.

    Raises:
        CaptureError: at the end, where a state has changed.
    """
    numpy = sys.modules.get("numpy")
    before = random.getstate()
    before_numpy = None if numpy is None else numpy.random.get_state()
    drawn = False
    try:
        yield
        drawn = random.getstate() != before
        drawn |= numpy is not None and repr(numpy.random.get_state()) != repr(before_numpy)
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(before_numpy)
    if drawn:
        raise CaptureError(
            "the step draws random numbers from Python's or NumPy's generator, once, now, and "
            "never in a later step: draw with torch, or pass the numbers in the batch"
        )


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe a call: op, shapes, dtypes and layouts of tensors, other arguments."""

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            # kernels draw in the order of memory
            strides = "" if value.is_contiguous() else f" strides {value.stride()}"
            return f"{tuple(value.shape)} {value.dtype}{strides}"
        return "default generator" if isinstance(value, torch.Generator) else repr(value)

    given = [*map(text, args), *(f"{name}={text(value)}" for name, value in kwargs.items())]
    return f"{func}({', '.join(given)})"


def share_repeated_draws(graph: fx.Graph) -> None:
    """Let every repeated draw reuse the values of the first. Linear in nodes.

    Raises:
        CaptureError: a recomputation runs a higher-order op that draws within its subgraphs, or
            a draw is repeated on other tensors.
    """
    first: dict[int, fx.Node] = {}
    original: dict[fx.Node, fx.Node] = {}
    """By repeated draw, the first one."""
    for node in graph.nodes:
        if _pop(node, _RUN_AGAIN):
            _check_draws_nothing(node)
        mark = _pop(node, _DRAW)
        if mark is None or not is_random(node):
            continue
        if first.setdefault(mark, node) is not node:
            original[node] = first[mark]
    if not original:
        return
    _check_arguments(graph, original)
    writes = writes_of(graph)
    kept: dict[fx.Node, tuple[fx.Node, list[fx.Node]]] = {}
    for again, draw in original.items():
        if draw not in kept:
            # what the step writes after the draw must not change what is reused
            written = [_cloned(node, draw) for node in written_arguments(draw)]
            # dropout with its mask, attention: no op writes into their several results
            overwritten = len(tensors_of(draw)) == 1 and writes.between(draw, None, draw)
            result = _cloned(draw, draw) if overwritten and not _returns_written(draw) else draw
            kept[draw] = result, written
        result, written = kept[draw]
        copies = []
        for argument, drawn in zip(written_arguments(again), written, strict=True):
            with graph.inserting_before(again):
                copies.append(graph.call_function(torch.ops.aten.copy_.default, (argument, drawn)))
            copies[-1].meta = {**again.meta, "val": argument.meta["val"]}
        # an op returns the first argument that it writes, or none of them
        again.replace_all_uses_with(copies[0] if _returns_written(again) else result)
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


def _check_arguments(graph: fx.Graph, original: Mapping[fx.Node, fx.Node]) -> None:
    """Refuse a draw that is repeated for a tensor computed otherwise, as dropout of a gradient."""
    numbers = ValueNumbers()

    def read_by(draw: fx.Node) -> str:
        """Describe what a draw reads.

        It overwrites some arguments, and reads only the shape of others. The default generator is
        a node too, another one in each call.
        """
        unread = set(written_arguments(draw))
        if str(draw.target).partition(".")[2].partition(".")[0].endswith("_like"):
            return "a shape"

        def argument(node: fx.Node) -> object:
            is_read = node not in unread and isinstance(value_of(node), torch.Tensor)
            return numbers[node] if is_read else "any"

        return numbers.call(draw, argument)

    for node in graph.nodes:
        if node in original and read_by(node) != read_by(original[node]):
            raise CaptureError(
                f"{node.target} draws random numbers (module '{module_of(node)}') from a state of "
                "the generator that was restored, where it drew for another tensor before. What "
                "is recomputed must draw as forward did: draw the mask once and use it twice"
            )
        if node.target in _SAME_VALUE:
            numbers.number_alike(node, node.all_input_nodes[0])
        elif node in original:
            numbers.number_alike(node, original[node])
        elif node.op == "call_function" and not is_random(node):
            numbers.number(node, numbers.call(node))
        else:
            numbers.number_alone(node)


def _cloned(node: fx.Node, draw: fx.Node) -> fx.Node:
    """Copy the value that a node has right after a draw."""
    with draw.graph.inserting_after(draw):
        copy = draw.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = {"val": node.meta["val"]}
    copy_annotations(draw, copy)
    return copy


def _returns_written(node: fx.Node) -> bool:
    """Return whether an op returns the tensor that it writes in place."""
    schema = schema_of(node)
    returned = [] if schema is None else [r.alias_info for r in schema.returns]
    return any(alias is not None and alias.is_write for alias in returned)
