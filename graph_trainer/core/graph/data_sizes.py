"""Sizes that data decide, such as the tokens an expert receives: symbols in the shapes of a graph.

Each has the size to expect, by which analyses count, and the greatest that it may have. The
functions below take any tensor of a graph, and give numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graph_trainer.core.torch_private import ShapeEnv

Size = int | torch.SymInt


class Exchange(NamedTuple):
    """An exchange of counts, by which ranks know how many rows to expect of each other."""

    module: str
    """FQN of the module that exchanges them."""
    received: tuple[object, ...]
    """The symbols of what each rank sends to this one."""


class _Numbers(dict[object, int]):
    """The number of each symbol, which must not be set again once it has been read."""

    def __init__(self, numbers: Mapping[object, int] = {}) -> None:
        super().__init__(numbers)
        self._computed: dict[object, int] = {}

    def of(self, size: torch.SymInt) -> int:
        """Return the number of a sum, or another expression, of symbols. Computes each once."""
        expression = size.node.expr
        if expression not in self._computed:
            self._computed[expression] = int(expression.xreplace(self))
        return self._computed[expression]


class DataSizes(ShapeEnv):
    """The symbols of one trace, each with the size to expect and its bound."""

    def __init__(self) -> None:
        # an op whose result has a size of its own, as nonzero, is refused as without symbols
        super().__init__(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
        self.expected = _Numbers()
        self.bounds = _Numbers()
        self.exchanges: list[Exchange] = []
        """In the order of the graph."""

    def received_rows(self) -> list[int]:
        """Return by exchange the rows that this rank expects to receive of all ranks together."""
        return [sum(self.expected[s] for s in each.received) for each in self.exchanges]

    def most_rows(self) -> list[int]:
        """Return by exchange the most rows that all ranks together may send to this one."""
        return [sum(self.bounds[s] for s in each.received) for each in self.exchanges]

    @contextlib.contextmanager
    def assuming(self, received: float | Sequence[int]) -> Iterator[None]:
        """Expect this rank to receive other numbers of rows, an equal share from each rank.

        Holds inside the context. Results of earlier analyses do not change.

        Args:
            received: a factor on all that is expected, or the rows by exchange. A size above its
                bound becomes the bound.
        """
        before = self.expected
        rows = received
        if isinstance(rows, (int, float)):
            rows = [round(number * rows) for number in self.received_rows()]
        try:
            self.expected = _Numbers(before)
            for number, exchange in zip(rows, self.exchanges, strict=True):
                ranks = len(exchange.received)
                for place, symbol in enumerate(exchange.received):
                    share = number // ranks + (place < number % ranks)
                    self.expected[symbol] = min(share, self.bounds[symbol])
            yield
        finally:
            self.expected = before


def data_sizes_of(tensor: torch.Tensor) -> DataSizes | None:
    """Return the symbols of the trace that a (fake) tensor is of; None where it has none."""
    sizes = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
    return sizes if isinstance(sizes, DataSizes) else None


def has_data_sizes(tensor: torch.Tensor) -> bool:
    """Return whether data decide a size of a tensor."""
    return any(type(size) is not int for size in (*tensor.shape, *tensor.stride()))


def depends_on_data(value: object) -> bool:
    """Return whether a value is a size that data decide, or a tensor with one."""
    if isinstance(value, torch.Tensor):
        return has_data_sizes(value)
    return isinstance(value, torch.SymInt)


def exact_shape(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's shape to compare with others: sizes are equal where they surely are."""
    return tuple(map(_exact, tensor.shape))


def exact_layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return shape, strides and offset of a tensor, to compare as `exact_shape`."""
    layout = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (tensor.ndim, *map(_exact, layout))


def _exact(size: Size) -> object:
    return size if isinstance(size, int) else size.node.expr


def expected(size: Size) -> int:
    """Return the size to expect; a number is itself."""
    return size if isinstance(size, int) else size.node.shape_env.expected.of(size)


def bound(size: Size) -> int:
    """Return the greatest size that there may be; a number is itself."""
    return size if isinstance(size, int) else size.node.shape_env.bounds.of(size)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape to expect of a tensor."""
    return tuple(map(expected, tensor.shape))


def stride_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides to expect of a tensor."""
    return tuple(map(expected, tensor.stride()))


def numel_of(tensor: torch.Tensor) -> int:
    """Return the number of elements to expect of a tensor."""
    return math.prod(shape_of(tensor))


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes to expect of a tensor's elements."""
    return numel_of(tensor) * tensor.dtype.itemsize


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that the elements of a (fake) tensor span.

    Fewer than `nbytes_of` if the tensor repeats elements, more if it skips some.
    """
    shape = shape_of(tensor)
    if 0 in shape:
        return 0
    steps = zip(shape, stride_of(tensor), strict=True)
    return (1 + sum((count - 1) * step for count, step in steps)) * tensor.dtype.itemsize


def sized(value: Any) -> Any:
    """Replace the tensors and sizes in a nest that data decide by those to expect, on meta."""
    if isinstance(value, torch.SymInt):
        return expected(value)
    if isinstance(value, torch.Tensor) and has_data_sizes(value):
        shape, stride = shape_of(value), stride_of(value)
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    return value
