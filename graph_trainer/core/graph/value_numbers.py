"""Numbers for the values that nodes compute: nodes with equal numbers have equal values."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

# Value numbering, as compilers do it to find common subexpressions: a node's number follows from
# its op and the numbers of its arguments, so that two nodes that make the same value have one
# number, however far from each other they are. Where the op and its arguments do not show all (a
# random draw, a write in place, an input), the caller adds the rest to the key, or gives the node a
# new number or the number of another node.


class ValueNumbers:
    """A number for each node, of one graph or of several that are compared."""

    def __init__(self) -> None:
        self._by_node: dict[fx.Node, int] = {}
        self._by_key: dict[object, int] = {}

    def __getitem__(self, node: fx.Node) -> int:
        return self._by_node[node]

    def number(self, node: fx.Node, key: object) -> None:
        """Give a node the number of all nodes with this key."""
        self._by_node[node] = self._by_key.setdefault(key, len(self._by_key))

    def number_alone(self, node: fx.Node) -> None:
        """Give a node a number that no other node has."""
        self.number(node, node)

    def number_alike(self, node: fx.Node, other: fx.Node) -> None:
        """Give a node the number of another node."""
        self._by_node[node] = self._by_node[other]

    def call(self, node: fx.Node, argument: Callable[[fx.Node], object] | None = None) -> str:
        """Describe a call: equal text for the same op on arguments with the same numbers.

        Args:
            argument: returns the text for a node that is an argument; by default its number.
        """
        describe = argument or self.__getitem__
        # 1, 1.0 and True differ as text; numbers of nodes are quoted, and differ from constants
        arguments = (node.args, sorted(node.kwargs.items()))
        return f"{node.target}{fx.map_arg(arguments, lambda n: f'%{describe(n)}')!r}"
