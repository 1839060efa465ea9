"""Remove gathers whose result is only sliced back to the part that the rank sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import fx

from graph_trainer.core.graph.annotations import (
    copy_annotations,
    infer_value,
    is_saved_for_backward,
    local_slice_group,
    set_saved_for_backward,
    tensor_of,
    value_of,
)
from graph_trainer.core.graph.collective_kinds import Result
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import (
    argument,
    argument_nodes,
    aten,
    erase_unused,
    plain_kind,
    storage_roots,
)
from graph_trainer.core.graph.writes import writes_of
from graph_trainer.core.passes.base import NoOptions, Stage, graph_pass
from graph_trainer.core.passes.context import PassContext
from graph_trainer.core.torch_private_groups import group_ranks


@graph_pass(stage=Stage.STRUCTURE, summary="Read a local slice of a gather from what was sent")
def eliminate_round_trips(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Let readers of the local slice of a gathered tensor read the tensor that this rank sent.

    DTensor redistributes a value for one reader (Shard -> Replicate: an all-gather, and for a
    dimension other than the first a `cat` of its parts) and back for another (Replicate -> Shard:
    a slice and its copy). The second reader needs neither. Unused nodes are removed, also the
    gather. Each of several mesh dimensions is a separate round trip: the inner one is detected
    after the outer one has been removed. A gather with other readers stays, for example slices of
    another size.

    Relies on the mark that capture sets where DTensor takes a local slice. Without it, rank 0's
    local slice looks like the first rows, which every rank may read, and ranks that decide
    differently would issue different collectives. In addition, shapes, strides and offsets must
    show that the slice is all that this rank sent. Not changed are shards of different sizes,
    tensors that are written in place or returned, reductions, whose result differs from the tensor
    that was sent, and a slice that is gathered again, because the ranks' slices may not have equal
    bits.

    Guarantees equal bits, and the same decision on every rank of a group: it does not depend on
    anything in which their graphs differ. Linear in nodes for each mesh dimension.
    """
    while True:
        slices = [node for node in joint.graph.nodes if local_slice_group(node) is not None]
        if not slices:
            return
        trips = _RoundTrips(joint)
        # from the end, because the nodes before a slice are then still unchanged
        unread = {node for node in joint.graph.nodes if not node.users}
        shortened = [trips.shorten(node) for node in reversed(slices)]
        if not any(shortened):
            return
        now_unread = {node for node in joint.graph.nodes if not node.users}
        erase_unused(joint.graph, among=now_unread - unread)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The tensors that all ranks of a group sent, concatenated along a dimension."""

    source: fx.Node
    """The tensor that this rank sends."""
    dim: int
    gather: fx.Node
    node: fx.Node
    """The gather, or the `cat` that concatenates its parts along `dim`."""


class _RoundTrips:
    def __init__(self, joint: JointGraph) -> None:
        self._writes = writes_of(joint.graph)
        self._storages = dict(storage_roots(joint.graph))
        self._returned = {self._storages[n] for n in joint.output_node().all_input_nodes}
        self._ranks = cache(group_ranks)

    def shorten(self, node: fx.Node) -> bool:
        """Let readers of a local slice, and of its copies, read the tensor that this rank sent.

        Returns whether a reader has changed.
        """
        gathered = self._gathered_in(self._storages[node][0])
        if gathered is None or gathered.node is node or not self._is_local_slice(node, gathered):
            return False
        copies = [n for n in node.users if n.target is aten.clone.default]
        shared = (gathered.source, gathered.gather, gathered.node, *copies)
        if any(self._writes.is_written(n) for n in shared):
            return False
        source = gathered.source
        if tensor_of(node).shape != tensor_of(source).shape:
            with node.graph.inserting_before(node):
                shape = list(tensor_of(node).shape)
                source = node.graph.call_function(aten.view.default, (source, shape))
            copy_annotations(node, source)
            infer_value(source)
            self._storages[source] = self._storages[gathered.source]
        has_replaced = False
        for slice_or_copy in (node, *copies):
            if self._storages[slice_or_copy] in self._returned:
                continue
            if any("as_strided" in str(view.target) for view in self._views(slice_or_copy)):
                continue  # its offset is into the old storage
            same_strides = tensor_of(slice_or_copy).stride() == tensor_of(source).stride()
            if slice_or_copy.users and same_strides:
                self._replace(slice_or_copy, source)
                has_replaced = True
        return has_replaced

    def _gathered_in(self, node: fx.Node) -> _Gathered | None:
        """Describe the gathered tensor that a node allocates: the node is a gather, or a `cat` of
        all complete parts of a gather, in their order. None for any other node."""
        kind = plain_kind(node)
        if kind is not None and kind.result is Result.GATHERED:
            source = node.all_input_nodes[0]
            sent = tensor_of(source)
            if sent.ndim > 0 and sent.numel() > 0 and sent.is_contiguous():
                return _Gathered(source, 0, node, node)
            return None
        if node.target is not aten.cat.default:
            return None
        parts = argument_nodes(argument(node, "tensors"))
        gathered = self._gathered_in(self._storages[parts[0]][0])
        if gathered is None or gathered.node is not gathered.gather:
            return None
        sent = tensor_of(gathered.source)
        for index, part in enumerate(parts):
            tensor = tensor_of(part)
            if (
                self._storages[part] != self._storages[gathered.gather]
                or tensor.dtype != sent.dtype
                or tensor.shape != sent.shape
                or tensor.stride() != sent.stride()
                or tensor.storage_offset() != index * sent.numel()
            ):
                return None
        dim = argument(node, "dim")
        assert isinstance(dim, int)
        return _Gathered(gathered.source, dim % sent.ndim, gathered.gather, node)

    def _is_local_slice(self, node: fx.Node, gathered: _Gathered) -> bool:
        """Return whether a node marked as a local slice is exactly the gather's local part."""
        ranks = self._ranks(str(argument(gathered.gather, "group_name")))
        if self._ranks(str(local_slice_group(node))) != ranks:
            return False
        # the tensor that is sliced; a chunk is taken out of a tuple
        base = node.all_input_nodes[0]
        while not isinstance(value_of(base), torch.Tensor):
            base = base.all_input_nodes[0]
        if not isinstance(value_of(node), torch.Tensor):
            return False
        sliced = tensor_of(base)
        local = tensor_of(node)
        sent = tensor_of(gathered.source)
        if local.dtype != sent.dtype or local.numel() != sent.numel():
            return False
        index = ranks.index(dist.get_rank())
        shape = list(sent.shape)
        shape[gathered.dim] *= len(ranks)
        full = torch.empty(shape, device="meta")
        if local.shape == sent.shape:
            rows = sent.shape[gathered.dim]
            expected = full.narrow(gathered.dim, index * rows, rows)
        elif gathered.dim == 0:
            # another view of the same elements, which are contiguous
            size = sent.numel()
            expected = full.view(-1).narrow(0, index * size, size).view(local.shape)
        else:
            return False
        # the mark is for a slice of the full gathered tensor
        return (
            sliced.numel() == full.numel()
            and sliced.is_contiguous()
            and local.stride() == expected.stride()
            and local.storage_offset() == expected.storage_offset()
        )

    def _views(self, node: fx.Node) -> list[fx.Node]:
        """List the views of a node, and the views of these."""
        views: list[fx.Node] = []
        stack = [node]
        while stack:
            for user in stack.pop().users:
                if self._storages.get(user) == self._storages[node]:
                    views.append(user)
                    stack.append(user)
        return sorted(views)

    def _replace(self, node: fx.Node, source: fx.Node) -> None:
        """Let the readers of a node read another one with the same elements in the same layout."""
        if is_saved_for_backward(node):
            set_saved_for_backward(source)
        views = self._views(node)
        node.replace_all_uses_with(source)
        for view in views:  # they are in another storage now, at another offset
            infer_value(view)
