"""Replay the random numbers of a recomputation: activation checkpointing runs forward again.

Eager checkpointing restores the state of the random generator before it runs a block again,
so that dropout drops the same values. A graph has no such state: a repeated draw would give
other numbers, so it reuses the values of the first draw.
"""

# The idea: fake ops draw nothing, so during capture the generator's state can count draws instead.
# Its seed is a mark, which counts the draws so far and increases with every random op. When
# checkpointing restores the state, the seed is an earlier mark again: a draw whose mark has been
# drawn before repeats that draw. The mark is written on the node of the trace; afterwards
# `share_repeated_draws` replaces each repeated draw by the values of the first. So later draws keep
# their position in the random stream of the step, as in eager.

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.traceback import annotate

from graph_trainer.core.capture.refusals.side_effects import user_line
from graph_trainer.core.graph.annotations import copy_annotations, module_of, tensors_of, value_of
from graph_trainer.core.graph.ops import (
    OpOverload,
    draws,
    inner_nodes,
    is_random,
    schema_of,
    written_arguments,
)
from graph_trainer.core.graph.value_numbers import ValueNumbers
from graph_trainer.core.graph.writes import Writes, writes_of
from graph_trainer.core.torch_private import TorchDispatchMode
from graph_trainer.errors import CaptureError

# Seeds that mark positions in the random stream during capture, far from a user's seed: the high
# bits count draws, the low bits higher-order ops since the last draw.
_FIRST_MARK = 0x6772_6170_6800_0000
_PER_DRAW = 1 << 20

# Checkpointing and autograd insert these between a tensor and its reader, or leave them out.
_SAME_VALUE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)

_CUSTOM = "custom"  # torch.fx.traceback.annotate writes here
# Keys of annotations; removed when capture ends.
_DRAW = "random_draw"
_REPEATED_OP = "run_again"


class _Draw(NamedTuple):
    """The first draw from a mark."""

    call: str
    next_mark: int
    """The mark after it."""


class RandomDraws(TorchDispatchMode):
    """Number the draws of a step: annotate every random node of a trace with the mark of its draw.

    Restores the generator's state at the end. Draws within the subgraphs of a higher-order op are
    not dispatched here: such an op is annotated only if it is repeated.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, _Draw] = {}
        """By mark."""
        self._next_mark = _FIRST_MARK
        self._higher_order: set[int] = set()
        """The seeds at which higher-order ops ran."""

    def __enter__(self) -> RandomDraws:
        self._state_before = torch.get_rng_state()
        self._set_seed(_FIRST_MARK)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        try:
            if error[0] is None:
                self._seed()  # refuses a seed that the step has set after its last draw
        finally:
            torch.set_rng_state(self._state_before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            # the low bits count higher-order ops: one at a seed that was there before is repeated
            seed = self._seed()
            is_repeated = seed in self._higher_order
            self._higher_order.add(seed)
            self._set_seed(seed + 1)
            with annotate({_REPEATED_OP: True}) if is_repeated else contextlib.nullcontext():
                return func(*args, **kwargs)
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        seed = self._seed()
        generators = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator))
        # The dispatcher passes a new wrapper of the default generator: its seed identifies it.
        if any(generator.initial_seed() != seed for generator in generators):
            raise CaptureError(
                f"{func} draws{user_line()} from a generator of the step or the model, and a graph "
                "does not replay its state: draw from torch's default generator, or pass the "
                "numbers in the batch"
            )
        # the high bits count draws: a mark that has been drawn is a repetition
        mark = seed - seed % _PER_DRAW
        call = _described(func, args, kwargs)
        if mark not in self._drawn:
            self._next_mark += _PER_DRAW
            self._drawn[mark] = _Draw(call, self._next_mark)
        draw = self._drawn[mark]
        if draw.call != call:
            raise CaptureError(
                f"{func} draws random numbers{user_line()} from a restored state of the generator, "
                f"from which another call drew before: {draw.call}, now {call}. A recomputation "
                "must draw as forward did"
            )
        self._set_seed(draw.next_mark)
        with annotate({_DRAW: mark}):
            return func(*args, **kwargs)

    def _seed(self) -> int:
        """Return the generator's seed, which is a mark unless the step has set it."""
        seed = torch.random.default_generator.initial_seed()
        if not _FIRST_MARK <= seed < self._next_mark + _PER_DRAW:
            raise CaptureError(
                f"the step seeds the random generator (seen{user_line() or ' at its end'}), which "
                "a graph does not: seed before the step, or draw the numbers there"
            )
        return seed

    def _set_seed(self, seed: int) -> None:
        torch.random.default_generator.manual_seed(seed)


@contextlib.contextmanager
def refuse_draws_of_python() -> Iterator[None]:
    """Refuse a step that draws from Python's or NumPy's generator, and restore their states.

    Raises:
        CaptureError: at the end, if a state has changed.
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
            "the step draws random numbers from Python's or NumPy's generator. Capture would draw "
            "them once, and later steps never: draw with torch, or pass the numbers in the batch"
        )


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe a call: op, shapes, dtypes and layouts of tensors, other arguments."""

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            # kernels draw in the order of memory
            strides = "" if value.is_contiguous() else f" strides {value.stride()}"
            return f"{tuple(value.shape)} {value.dtype}{strides}"
        return "default generator" if isinstance(value, torch.Generator) else repr(value)

    arguments = [text(value) for value in args]
    arguments += [f"{name}={text(value)}" for name, value in kwargs.items()]
    return f"{func}({', '.join(arguments)})"


def share_repeated_draws(graph: fx.Graph) -> None:
    """Let every repeated draw reuse the values of the first. Linear in nodes.

    Raises:
        CaptureError: a recomputation runs a higher-order op that draws within its subgraphs, or
            a draw is repeated on other tensors.
    """
    first_draw: dict[int, fx.Node] = {}  # by mark
    original: dict[fx.Node, fx.Node] = {}  # from each repeated draw to the first one
    for node in graph.nodes:
        if _pop_annotation(node, _REPEATED_OP):
            _check_draws_nothing(node)
        mark = _pop_annotation(node, _DRAW)
        if mark is None or not is_random(node):
            continue
        if first_draw.setdefault(mark, node) is not node:
            original[node] = first_draw[mark]
    if not original:
        return
    _check_arguments(graph, original)
    writes = writes_of(graph)
    values = {draw: _DrawnValues.of(draw, writes) for draw in dict.fromkeys(original.values())}
    for repeated, draw in original.items():
        copies = []
        targets = written_arguments(repeated)
        for target, drawn in zip(targets, values[draw].written, strict=True):
            with graph.inserting_before(repeated):
                copy = graph.call_function(torch.ops.aten.copy_.default, (target, drawn))
            copy.meta = {**repeated.meta, "val": target.meta["val"]}
            copies.append(copy)
        # an op returns the first argument that it writes, or none of them
        result = copies[0] if _returns_written(repeated) else values[draw].result
        repeated.replace_all_uses_with(result)
        graph.erase_node(repeated)


class _DrawnValues(NamedTuple):
    """The values of a draw, as they were right after it."""

    result: fx.Node
    written: list[fx.Node]
    """Copies of the arguments that it writes."""

    @classmethod
    def of(cls, draw: fx.Node, writes: Writes) -> _DrawnValues:
        """Copy the values that the step may write after the draw, and return all."""
        written = [_clone_after(draw, node) for node in written_arguments(draw)]
        # no op writes into results of dropout with its mask, or of attention, which have several
        is_overwritten = len(tensors_of(draw)) == 1 and writes.between(draw, None, draw)
        if is_overwritten and not _returns_written(draw):
            return cls(_clone_after(draw, draw), written)
        return cls(draw, written)


def draw_of(node: fx.Node) -> int | None:
    """Return the mark of a random node while a step is traced: a repeated draw has the first's."""
    return (node.meta.get(_CUSTOM) or {}).get(_DRAW)


def _pop_annotation(node: fx.Node, key: str) -> Any:
    custom = dict(node.meta.get(_CUSTOM) or {})
    value = custom.pop(key, None)
    if value is not None:
        node.meta[_CUSTOM] = custom
    return value


def _check_draws_nothing(node: fx.Node) -> None:
    """Refuse a higher-order op that is repeated and would draw other numbers than before."""
    for inner in inner_nodes(node):
        _pop_annotation(inner, _REPEATED_OP)
        _check_draws_nothing(inner)
    if is_random(node) and schema_of(node) is None:
        raise CaptureError(
            f"a recomputation runs {node.target} again (node '{node.name}'), which draws random "
            "numbers within its subgraphs and would draw others than forward did: draw outside "
            "of it, or leave it out of activation checkpointing"
        )


def _check_arguments(graph: fx.Graph, original: Mapping[fx.Node, fx.Node]) -> None:
    """Refuse a draw that is repeated on another tensor, such as dropout of a gradient."""
    numbers = ValueNumbers()

    def inputs_of_draw(draw: fx.Node) -> str:
        """Describe the values that a draw reads: equal text for equal values.

        It overwrites some arguments, and reads only the shape of others. The default generator is
        a node too, another one in each call.
        """
        unread = set(written_arguments(draw))
        if str(draw.target).partition(".")[2].partition(".")[0].endswith("_like"):
            return "a shape"  # aten.rand_like.default

        def argument(node: fx.Node) -> object:
            is_read = node not in unread and isinstance(value_of(node), torch.Tensor)
            return numbers[node] if is_read else "any"

        return numbers.call(draw, argument)

    for node in graph.nodes:
        if node in original and inputs_of_draw(node) != inputs_of_draw(original[node]):
            raise CaptureError(
                f"{node.target} draws random numbers (module '{module_of(node)}') from a restored "
                "state of the generator, from which it drew for another tensor before. A "
                "recomputation must draw as forward did: draw the mask once and use it twice"
            )
        if node.target in _SAME_VALUE:
            numbers.number_alike(node, node.all_input_nodes[0])
        elif node in original:
            numbers.number_alike(node, original[node])
        elif node.op == "call_function" and not is_random(node):
            numbers.number(node, numbers.call(node))
        else:
            numbers.number_alone(node)


def _clone_after(draw: fx.Node, node: fx.Node) -> fx.Node:
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
