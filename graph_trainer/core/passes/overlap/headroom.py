"""How many bytes are left at every place of a graph, while a schedule takes some of them."""

from __future__ import annotations

from collections.abc import Sequence


class Headroom:
    """Bytes by place, of which ranges are taken; knows the least of any range.

    A tree of sums and minima: linear to build, logarithmic to ask and to change.
    """

    def __init__(self, left: Sequence[int]) -> None:
        self._places = len(left)
        self._size = 1
        while self._size < max(self._places, 1):
            self._size *= 2
        unlimited = max(left, default=0)
        self._least = [unlimited] * (2 * self._size)
        self._least[self._size : self._size + self._places] = left
        self._taken = [0] * (2 * self._size)
        for node in range(self._size - 1, 0, -1):
            self._least[node] = min(self._least[2 * node], self._least[2 * node + 1])

    def least(self, first: int, stop: int) -> int:
        """The fewest bytes that are left anywhere from `first` to before `stop`."""
        assert 0 <= first < stop <= self._places
        return self._ask(1, 0, self._size, first, stop)

    def take(self, first: int, stop: int, num_bytes: int) -> None:
        """Take bytes everywhere from `first` to before `stop`."""
        assert 0 <= first <= stop <= self._places
        if first < stop and num_bytes:
            self._take(1, 0, self._size, first, stop, num_bytes)

    def _ask(self, node: int, low: int, high: int, first: int, stop: int) -> int:
        if first <= low and high <= stop:
            return self._least[node]
        middle = (low + high) // 2
        if stop <= middle:
            found = self._ask(2 * node, low, middle, first, stop)
        elif first >= middle:
            found = self._ask(2 * node + 1, middle, high, first, stop)
        else:
            found = min(
                self._ask(2 * node, low, middle, first, stop),
                self._ask(2 * node + 1, middle, high, first, stop),
            )
        return found - self._taken[node]

    def _take(self, node: int, low: int, high: int, first: int, stop: int, num_bytes: int) -> None:
        if first <= low and high <= stop:
            self._least[node] -= num_bytes
            self._taken[node] += num_bytes
            return
        middle = (low + high) // 2
        if first < middle:
            self._take(2 * node, low, middle, first, stop, num_bytes)
        if stop > middle:
            self._take(2 * node + 1, middle, high, first, stop, num_bytes)
        least = min(self._least[2 * node], self._least[2 * node + 1])
        self._least[node] = least - self._taken[node]
