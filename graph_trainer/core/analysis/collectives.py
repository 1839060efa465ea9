"""The collectives of a graph in the order in which they are issued."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from graph_trainer.core.graph.annotations import (
    SEPARATOR,
    Phase,
    Role,
    counts_of,
    module_of,
    parameter_of,
    phase_of,
    role_of,
    tensors_of,
    value_of,
)
from graph_trainer.core.graph.collective_kinds import CollectiveKind, kind_named
from graph_trainer.core.graph.data_sizes import expected, nbytes_of, numel_of, shape_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    argument,
    argument_nodes,
    collective_name,
    is_collective,
    is_wait,
    schema_of,
    storage_roots,
    subgraphs,
)
from graph_trainer.errors import VerificationError

# Higher-order ops that run their subgraph exactly once, whatever the data.
_RUN_ONCE = {
    "hints_wrapper",
    "invoke_quant",
    "invoke_quant_packed",
    "invoke_subgraph",
    "tag_activation_checkpoint",
    "wrap",
    "wrap_activation_checkpoint",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
}

_RANKS_SHOWN = 16

Inputs = tuple[tuple[str, int], ...]
"""dtype and number of elements of each tensor; of one row where ranks may send different numbers of
rows."""
Entry = tuple[str, tuple[int, ...], Inputs, str]
"""Kind, ranks, inputs and reduction of a collective: what its members must agree on."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a graph."""

    node: fx.Node
    kind: str
    """Name of the op without its namespace: all_gather_into_tensor, all_reduce, ..."""
    ranks: tuple[int, ...]
    """Global ranks of its group, in group order."""
    inputs: Inputs
    """The tensors that are sent; for an all-to-all, one row of each."""
    input_bytes: int
    output_bytes: int
    reduction: str | None
    """The op of a reduction, the source rank of a broadcast, or the exchange of counts that decides
    the splits of an all-to-all."""
    role: Role | None
    phase: Phase | None
    module: str | None
    parameter: str | None
    """FQN of the parameter that it gathers or whose gradient it reduces; a bucket's are joined."""
    largest_split_bytes: int = 0
    """Bytes of the largest message between two ranks of an all-to-all; 0 if all are equal."""
    waited_after: int | None = None
    """How many collectives are issued before the wait for this one; None without a wait."""

    @property
    def row(self) -> CollectiveKind:
        """The row of `collective_kinds` for its kind."""
        return kind_named(self.kind)

    @property
    def dtype(self) -> str:
        """dtype of the first tensor that is sent."""
        return self.inputs[0][0]

    @property
    def parameters(self) -> tuple[str, ...]:
        """FQNs of the parameters that it gathers or whose gradients it reduces."""
        return () if self.parameter is None else tuple(self.parameter.split(SEPARATOR))

    def entry(self) -> Entry:
        """Return what the other ranks of the group must agree on."""
        return (self.kind, self.ranks, self.inputs, self.reduction or "")

    def describe(self) -> str:
        """Format the collective in one line; of more than 16 ranks, list the first and the last."""
        ranks = f"ranks {list(self.ranks)}"
        if len(self.ranks) > _RANKS_SHOWN:
            first = ", ".join(map(str, self.ranks[:4]))
            ranks = f"{len(self.ranks)} ranks [{first}, ..., {self.ranks[-1]}]"
        return f"{entry_text(self.entry(), ranks)} {self.where}"

    @property
    def where(self) -> str:
        """Its module and node, formatted."""
        return f"in module '{self.module}' (node {self.node.name})"


def entry_text(entry: Entry, ranks: str) -> str:
    """Format an entry, with `ranks` as the text for its ranks."""
    kind, _, inputs, reduction = entry
    op = f"{kind}({reduction})" if reduction else kind
    sizes = " + ".join(f"{numel} x {dtype}" for dtype, numel in inputs) or "unknown"
    if kind == "all_to_all_single":
        sizes = f"rows of {sizes}"
    return f"{op} of {sizes} over {ranks}"


def collective_inputs(node: fx.Node) -> list[torch.Tensor]:
    """Return the (fake) tensors that a collective sends, without an `out` buffer."""
    schema = schema_of(node)
    assert schema is not None
    sources = kind_named(collective_name(node)).inputs
    named = [argument(node, entry.name) for entry in schema.arguments if entry.name in sources]
    return [t for n in argument_nodes(named) for t in tensors_of(n)]


def collectives(joint: JointGraph) -> list[Collective]:
    """List the collectives of a graph and of its subgraphs in the order in which they are issued.

    Linear in nodes.

    Raises:
        VerificationError: a collective names no group or sends no tensor; data decide whether its
            subgraph runs; or data decide its splits, and no exchange of counts shows that ranks
            expect what the others send.
    """
    return [collective_of(node, joint.ranks_of, waited) for node, waited in issued(joint.graph)]


def collective_of(
    node: fx.Node, ranks_of_group: Callable[[str], tuple[int, ...]], waited_after: int | None
) -> Collective:
    """Read one collective from its node. Raises as `collectives` does."""
    group = argument(node, "group_name")
    sources = collective_inputs(node)
    if group is None or not sources:
        raise VerificationError(
            f"node '{node.name}' ({node.target}) communicates without a named group or "
            "without a tensor; use the functional collectives "
            "(torch.distributed._functional_collectives) in a step that is captured"
        )
    ranks = ranks_of_group(str(group))
    splits = argument_nodes(
        [argument(node, "input_split_sizes"), argument(node, "output_split_sizes")]
    )
    counts = counts_of(node) if splits else None
    if splits and counts is None:
        raise VerificationError(
            f"data decide how many rows node '{node.name}' ({node.target}) sends, and the node has "
            "no annotation of the exchange that gave the other ranks their counts: a pass that "
            "makes such a node must copy the annotations of the node that it replaces"
        )
    reduction = f"splits by counts {counts}" if splits else None
    for name in kind_named(collective_name(node)).agreed:
        value = argument(node, name)
        if value is not None:
            reduction = str(value)
            break
    if argument(node, "input_split_sizes") is None:
        inputs = tuple((str(t.dtype), numel_of(t)) for t in sources)
    else:
        # an all-to-all: ranks may send different numbers of rows, and all rows have one size
        inputs = tuple((str(t.dtype), math.prod(t.shape[1:])) for t in sources)
    return Collective(
        node=node,
        kind=collective_name(node),
        ranks=ranks,
        inputs=inputs,
        input_bytes=sum(map(nbytes_of, sources)),
        output_bytes=sum(map(nbytes_of, tensors_of(node))),
        reduction=reduction,
        role=role_of(node),
        phase=phase_of(node),
        module=module_of(node),
        parameter=parameter_of(node),
        largest_split_bytes=_largest_split_bytes(node, sources[0]),
        waited_after=waited_after,
    )


def _largest_split_bytes(node: fx.Node, sent: torch.Tensor) -> int:
    """Return the bytes of the largest split that an all-to-all sends or receives, 0 without splits.

    Args:
        sent: its input, in rows of the size of those that it receives.
    """
    largest = 0
    for name in ("input_split_sizes", "output_split_sizes"):
        for split in argument(node, name) or ():
            rows = expected(value_of(split) if isinstance(split, fx.Node) else split)
            largest = max(largest, rows)
    return largest * math.prod(shape_of(sent)[1:]) * sent.dtype.itemsize


def issued(
    graph: fx.Graph, counts: Callable[[fx.Node], bool] = is_collective
) -> list[tuple[fx.Node, int | None]]:
    """List the nodes of all collectives in the order in which they are issued.

    Args:
        counts: which nodes to list; one that is not a collective is complete when it returns.

    Returns:
        Each node with the number of collectives issued before its first wait.

    Raises:
        VerificationError: a listed node is in a subgraph that runs or not depending on data.
    """
    nodes: list[fx.Node] = []
    waited: dict[int, int] = {}

    def run(graph: fx.Graph) -> None:
        roots = storage_roots(graph)
        issuer: dict[object, int] = {}
        for node in graph.nodes:
            if counts(node):
                if is_collective(node):
                    # a coalesced one returns a list, with a wait for each tensor
                    issuer[roots[node]] = len(nodes)
                else:
                    waited[len(nodes)] = len(nodes) + 1
                nodes.append(node)
            elif is_wait(node):
                root = roots[node]
                source = issuer.get(root, issuer.get((root[0], 0)))
                if source is not None:
                    waited.setdefault(source, len(nodes))
            else:
                before = len(nodes)
                for module in subgraphs(node):
                    run(module.graph)
                if len(nodes) > before and str(node.target) not in _RUN_ONCE:
                    raise VerificationError(
                        f"node '{node.name}' ({node.target}) communicates within a subgraph "
                        f"('{nodes[before].name}', {nodes[before].target}). Data may decide how "
                        "often each rank runs it, so no order can be proved: move the "
                        "communication out of the subgraph"
                    )

    run(graph)
    return [(node, waited.get(place)) for place, node in enumerate(nodes)]
