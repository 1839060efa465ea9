"""Sizes that data decide, such as the tokens an expert receives: symbols in the shapes of a graph.

Each symbol has a size to expect, by which analyses count, and a bound, the greatest size that it
may have. The functions below take any tensor of a graph and return numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.torch_private import ShapeEnv

Size = int | torch.SymInt


class Exchange(NamedTuple):
    """An exchange of counts, by which ranks know how many rows to expect from each other."""

    module: str
    """FQN of the module that exchanges them."""
    received: tuple[object, ...]
    """The symbols for the numbers of rows that each rank sends to this one."""


class _Numbers(dict[object, int]):
    """The number of each symbol. A number that has been read must not be set again."""

    def __init__(self, numbers: Mapping[object, int] = {}) -> None:
        super().__init__(numbers)
        self._computed: dict[object, int] = {}

    def of(self, size: torch.SymInt) -> int:
        """Return the number of an expression of symbols, such as a sum. Computes each once."""
        expression = size.node.expr
        if expression not in self._computed:
            self._computed[expression] = int(expression.xreplace(self))
        return self._computed[expression]


class DataSizes(ShapeEnv):
    """The symbols of one trace, each with the size to expect and its bound."""

    def __init__(self) -> None:
        # an op whose data decide the size of its result, as nonzero, is refused as without symbols
        super().__init__(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
        self.expected = _Numbers()
        self.bounds = _Numbers()
        self.exchanges: list[Exchange] = []
        """In the order of the graph."""

    def received_rows(self) -> list[int]:
        """Return by exchange the rows that this rank expects from all ranks together."""
        return self._rows_by_exchange(self.expected)

    def most_rows(self) -> list[int]:
        """Return by exchange the most rows that all ranks together may send to this one."""
        return self._rows_by_exchange(self.bounds)

    def _rows_by_exchange(self, numbers: _Numbers) -> list[int]:
        rows = []
        for exchange in self.exchanges:
            rows.append(sum(numbers[symbol] for symbol in exchange.received))
        return rows

    @contextlib.contextmanager
    def assuming(self, received: float | Sequence[int]) -> Iterator[None]:
        """Expect this rank to receive other numbers of rows, an equal share from each rank.

        Holds inside the context. Results of earlier analyses do not change.

        Args:
            received: a factor on all expected rows, or the rows by exchange. A size above its bound
                becomes the bound.
        """
        before = self.expected
        if isinstance(received, (int, float)):
            rows_by_exchange = [round(rows * received) for rows in self.received_rows()]
        else:
            rows_by_exchange = list(received)
        try:
            self.expected = _Numbers(before)
            for rows, exchange in zip(rows_by_exchange, self.exchanges, strict=True):
                # an equal share from each rank; the first ranks send one more of what is left
                share, rest = divmod(rows, len(exchange.received))
                for rank, symbol in enumerate(exchange.received):
                    sent = share + 1 if rank < rest else share
                    self.expected[symbol] = min(sent, self.bounds[symbol])
            yield
        finally:
            self.expected = before


def data_sizes_of(tensor: torch.Tensor) -> DataSizes | None:
    """Return the symbols of the trace that made a (fake) tensor; None if it has none."""
    sizes = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
    return sizes if isinstance(sizes, DataSizes) else None


def data_sizes_in(graph: fx.Graph) -> DataSizes | None:
    """Return the symbols of the trace that made a graph; None if it has none."""
    values = map(value_of, graph.nodes)
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return None if first is None else data_sizes_of(first)


@contextlib.contextmanager
def uneven_experts(graph: fx.Graph, imbalance: float) -> Iterator[None]:
    """Expect the experts of this rank to receive so many times their even share in every layer.

    Holds inside the context, as `DataSizes.assuming`. No effect on a graph whose sizes are known.
    """
    sizes = data_sizes_in(graph)
    if sizes is None or imbalance == 1:
        yield
    else:
        with sizes.assuming(imbalance):
            yield


def has_data_sizes(tensor: torch.Tensor) -> bool:
    """Return whether data decide a size of a tensor."""
    return any(type(size) is not int for size in (*tensor.shape, *tensor.stride()))


def depends_on_data(value: object) -> bool:
    """Return whether a value is a size that data decide, or a tensor with one."""
    if isinstance(value, torch.Tensor):
        return has_data_sizes(value)
    return isinstance(value, torch.SymInt)


def exact_shape(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's shape for comparisons: equal shapes are equal whatever the data."""
    return tuple(map(_exact, tensor.shape))


def exact_layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return shape, strides and offset of a tensor for comparisons, as `exact_shape`."""
    layout = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (tensor.ndim, *map(_exact, layout))


def _exact(size: Size) -> object:
    return size if isinstance(size, int) else size.node.expr


def expected(size: Size) -> int:
    """Return the size to expect; a number is returned unchanged."""
    return size if isinstance(size, int) else size.node.shape_env.expected.of(size)


def bound(size: Size) -> int:
    """Return the greatest size that is possible; a number is returned unchanged."""
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
    """Replace a size that data decide by the size to expect, and a tensor with one by a meta tensor
    of the expected sizes. Return any other value unchanged."""
    if isinstance(value, torch.SymInt):
        return expected(value)
    if isinstance(value, torch.Tensor) and has_data_sizes(value):
        return torch.empty_strided(
            shape_of(value), stride_of(value), dtype=value.dtype, device="meta"
        )
    return value


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes to expect of a tensor's elements, each element of memory counted once.

    An expanded dimension does not count, nor do elements that a slice skips.
    """
    return min(nbytes_of(tensor), storage_bytes(tensor))
