"""Remove gathers whose result is only sliced back to what the rank sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import fx

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.graph.annotations import (
    copy_annotations,
    infer_value,
    is_saved_for_backward,
    local_slice_group,
    set_saved_for_backward,
    tensor_of,
    value_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.last_writes import LastWrites
from graph_trainer.core.graph.ops import (
    aliased_input,
    argument,
    argument_nodes,
    has_effect,
    is_getitem,
    is_wait,
    plain_kind,
    storage_roots,
)
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.torch_private import group_ranks

aten = torch.ops.aten


@graph_pass(stage=Stage.STRUCTURE, summary="Read a local slice of a gather from what was sent")
def eliminate_round_trips(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Let readers of the local slice of a gathered tensor read what this rank sent.

    DTensor redistributes a value for one reader (Shard -> Replicate: an all-gather, and for a
    dimension other than the first a `cat` of its parts) and back for another (Replicate -> Shard:
    a slice and its copy). The second reader needs neither; nodes that become unused are removed,
    the gather too. Each of several mesh dimensions is a round trip of its own: the inner one is
    found after the outer one has been removed. A gather that other nodes read, slices of another
    size among them, stays.

    Relies on the mark that capture sets where DTensor takes a local slice. Without it, rank 0's
    local slice looks like the first rows, which every rank may read, and ranks that decide
    differently would issue different collectives. In addition, shapes, strides and offsets must
    show that the slice is all that this rank sent. Not changed: shards of unlike sizes, tensors
    that are written in place or returned, and reductions, whose result is not what was sent; nor a
    slice that is gathered again, since nothing proves that ranks sliced equal bits.

    Guarantees equal bits, and the same decision on every rank of a group: it depends on nothing
    in which their graphs differ. Linear in nodes.
    """
    graph = joint.graph
    if not any(local_slice_group(node) for node in graph.nodes):
        return
    trips = _RoundTrips(joint)
    for node in list(graph.nodes):
        trips.visit(node)
    trips.sweep()


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What every rank of a group sent, concatenated along a dimension, in a new storage."""

    source: fx.Node
    dim: int
    group: str
    wait: fx.Node
    node: fx.Node
    """The wait, or the `cat` that concatenates the parts of the wait along `dim`."""


class _RoundTrips:
    def __init__(self, joint: JointGraph) -> None:
        self._writes = LastWrites(joint.graph)
        self._storages = storage_roots(joint.graph)
        self._returned = {self._storages[n] for n in joint.output_node().all_input_nodes}
        self._gathered: dict[fx.Node, _Gathered] = {}
        """By the node that allocates the storage."""
        self._root: dict[fx.Node, fx.Node] = {}
        self._unused: list[fx.Node] = []
        self._ranks = cache(group_ranks)

    def visit(self, node: fx.Node) -> None:
        """Handle a gather, a `cat` or a local slice; call for every node once, in order."""
        self._root[node] = self._root_of(node)
        if is_wait(node):
            self._note_gather(node)
        elif node.target is aten.cat.default:
            self._note_cat(node)
        elif local_slice_group(node) is not None and self._root[node] is not node:
            self._shorten(node)

    def sweep(self) -> None:
        """Remove the nodes that this pass left unused."""
        removed: set[fx.Node] = set()
        while self._unused:
            node = self._unused.pop()
            if node in removed or has_effect(node):
                continue
            parts = list(node.users)
            if any(part.users or not is_getitem(part) for part in parts):
                continue
            self._unused += node.all_input_nodes
            for dead in (*parts, node):
                node.graph.erase_node(dead)
                removed.add(dead)

    def _root_of(self, node: fx.Node) -> fx.Node:
        """Return the node that allocates a node's storage, as the graph is now."""
        source = _viewed(node)
        return node if source is None else self._root[source]

    def _note_gather(self, wait: fx.Node) -> None:
        (gather,) = wait.all_input_nodes
        kind = plain_kind(gather)
        if kind is None or kind.result is not Result.GATHERED:
            return
        source = gather.all_input_nodes[0]
        sent = tensor_of(source)
        if sent.ndim > 0 and sent.numel() > 0 and sent.is_contiguous():
            group = str(argument(gather, "group_name"))
            self._gathered[self._root[wait]] = _Gathered(source, 0, group, wait, wait)

    def _note_cat(self, cat: fx.Node) -> None:
        """Record a `cat` of all parts of a gather, in order and each of them whole."""
        parts = argument_nodes(argument(cat, "tensors"))
        gathered = self._gathered.get(self._root[parts[0]]) if parts else None
        if gathered is None:
            return
        sent = tensor_of(gathered.source)
        for member, part in enumerate(parts):
            shown = tensor_of(part)
            if (
                self._root[part] is not self._root[gathered.wait]
                or shown.dtype != sent.dtype
                or shown.shape != sent.shape
                or shown.stride() != sent.stride()
                or shown.storage_offset() != member * sent.numel()
            ):
                return
        dim = argument(cat, "dim")
        assert isinstance(dim, int)
        self._gathered[cat] = _Gathered(
            gathered.source, dim % sent.ndim, gathered.group, gathered.wait, cat
        )

    def _shorten(self, cut: fx.Node) -> None:
        """Let readers of a local slice, and of its copies, read what this rank sent."""
        gathered = self._gathered.get(self._root[cut])
        if gathered is None or not self._is_local_slice(cut, gathered):
            return
        copies = [n for n in cut.users if n.target is aten.clone.default]
        shared = (gathered.source, gathered.wait, gathered.node, *copies)
        if any(self._writes.is_written(n) for n in shared):
            return
        source = gathered.source
        if tensor_of(cut).shape != tensor_of(source).shape:
            source = self._view(source, cut)
        for reader in (cut, *copies):
            if self._storages[reader] in self._returned or _is_read_by_offset(reader):
                continue
            if tensor_of(reader).stride() == tensor_of(source).stride():
                _replace(reader, source)
                self._unused.append(reader)
        self._unused.append(source)

    def _is_local_slice(self, cut: fx.Node, gathered: _Gathered) -> bool:
        """Return whether a marked node takes exactly this rank's part of what was gathered."""
        ranks = self._ranks(gathered.group)
        # local_slice_group is not None for what `visit` hands on
        if self._ranks(str(local_slice_group(cut))) != ranks:
            return False
        # DTensor, to which the mark refers, slices the whole of what was gathered
        whole = _viewed(cut)
        while whole is not None and not isinstance(value_of(whole), torch.Tensor):
            whole = _viewed(whole)
        if whole is None or not isinstance(value_of(cut), torch.Tensor):
            return False
        shown, mine, sent = tensor_of(whole), tensor_of(cut), tensor_of(gathered.source)
        if mine.dtype != sent.dtype or mine.numel() != sent.numel():
            return False
        shape, index = list(sent.shape), ranks.index(dist.get_rank())
        shape[gathered.dim] *= len(ranks)
        full = torch.empty(shape, device="meta")
        if mine.shape == sent.shape:
            rows = sent.shape[gathered.dim]
            expected = full.narrow(gathered.dim, index * rows, rows)
        elif gathered.dim == 0:
            # another view of the same elements, which are contiguous
            size = sent.numel()
            expected = full.view(-1).narrow(0, index * size, size).view(mine.shape)
        else:
            return False
        return (
            shown.numel() == full.numel()
            and shown.is_contiguous()
            and mine.stride() == expected.stride()
            and mine.storage_offset() == expected.storage_offset()
        )

    def _view(self, source: fx.Node, like: fx.Node) -> fx.Node:
        with like.graph.inserting_before(like):
            shape = list(tensor_of(like).shape)
            view = like.graph.call_function(aten.view.default, (source, shape))
        copy_annotations(like, view)
        infer_value(view)
        self._root[view] = self._root[source]
        return view


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return what a node is a view of, or one of several views of; None where it allocates."""
    if not is_getitem(node):
        return aliased_input(node)
    views = node.all_input_nodes[0]
    return views if aliased_input(views) is not None else None


def _is_read_by_offset(reader: fx.Node) -> bool:
    """Return whether a view of a node has an explicit offset into the storage, which changes."""
    stack = list(reader.users)
    while stack:
        node = stack.pop()
        if "as_strided" in str(node.target):
            return True
        if _viewed(node) is not None:
            stack += node.users
    return False


def _replace(reader: fx.Node, source: fx.Node) -> None:
    """Let the readers of one node read another, which has the same elements in the same layout."""
    if is_saved_for_backward(reader):
        set_saved_for_backward(source)
    stale = list(reader.users)
    reader.replace_all_uses_with(source)
    # the views have another offset in another storage
    while stale:
        node = stale.pop()
        if _viewed(node) is not None:
            infer_value(node)
            stale += node.users
