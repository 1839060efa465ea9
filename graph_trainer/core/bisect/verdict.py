"""What a bisection found, as a value that ranks exchange and files keep."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from graph_trainer.core.bisect.node_diff import NodeDifference
from graph_trainer.core.bisect.tensor_diff import Difference

CAPTURE = "capture"


@dataclass(frozen=True, slots=True)
class Row:
    """One prefix of the pass list: the graph as captured, or after one more pass."""

    name: str
    """The pass, or "capture" for the graph before any."""
    nodes: int
    """Nodes of rank 0's graph that compute."""
    found: list[list[Difference]]
    """By rank: what differs from eager, the loss first and then gradients and buffers in the
    model's order."""

    @property
    def ranks(self) -> list[int]:
        """The ranks on which something differs."""
        return [rank for rank, differences in enumerate(self.found) if differences]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every prefix that ran, the last one being the one that differs if any does."""

    rows: list[Row]
    compared: int
    """Number of values (loss, gradients, buffers) that each prefix was compared in."""
    nodes: list[NodeDifference | None]
    """By rank the first node that differs; empty where nothing does or capture is at fault."""

    @property
    def culprit(self) -> str | None:
        """The pass after which the numbers are others, "capture", or None."""
        return self.rows[-1].name if self.rows[-1].ranks else None

    @property
    def first_node(self) -> NodeDifference | None:
        """The first node that differs, over all ranks."""
        found = [node for node in self.nodes if node is not None]
        return min(found, key=lambda node: node.position, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Only dicts, lists, text and numbers."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(table: dict[str, Any]) -> Verdict:
        """What `to_dict` was made of."""

        def differences(entries: list[dict[str, Any]]) -> list[Difference]:
            return [Difference(**entry) for entry in entries]

        rows = [
            Row(r["name"], r["nodes"], [differences(d) for d in r["found"]]) for r in table["rows"]
        ]
        nodes = [
            node and NodeDifference(**{**node, "difference": Difference(**node["difference"])})
            for node in table["nodes"]
        ]
        return Verdict(rows, table["compared"], nodes)
