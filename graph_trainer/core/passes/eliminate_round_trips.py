"""Remove gathers whose result is only sliced back to what the rank sent."""

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
    """Let readers of the local slice of a gathered tensor read what this rank sent.

    DTensor redistributes a value for one reader (Shard -> Replicate: an all-gather, and for a
    dimension other than the first a `cat` of its parts) and back for another (Replicate -> Shard:
    a slice and its copy). The second reader needs neither; unused nodes are removed, the gather
    too. Each of several mesh dimensions is a round trip of its own: the inner one is
    found after the outer one has been removed. A gather that other nodes read, slices of another
    size among them, stays.

    Relies on the mark that capture sets where DTensor takes a local slice. Without it, rank 0's
    local slice looks like the first rows, which every rank may read, and ranks that decide
    differently would issue different collectives. In addition, shapes, strides and offsets must
    show that the slice is all that this rank sent. Not changed: shards of different sizes, tensors
    that are written in place or returned, and reductions, whose result is not what was sent; nor a
    slice that is gathered again, since nothing proves that ranks sliced equal bits.

    Guarantees equal bits, and the same decision on every rank of a group: it depends on nothing
    in which their graphs differ. Linear in nodes for each mesh dimension.
    """
    while cuts := [node for node in joint.graph.nodes if local_slice_group(node) is not None]:
        trips = _RoundTrips(joint)
        # from the end, as what precedes a node is then as it was
        shortened = [trips.shorten(cut) for cut in reversed(cuts)]
        if not any(shortened):
            return
        erase_unused(joint.graph)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What every rank of a group sent, concatenated along a dimension, in a new storage."""

    source: fx.Node
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

    def shorten(self, cut: fx.Node) -> bool:
        """Let readers of a local slice, and of its copies, read what this rank sent.

        Returns whether any reads something else now.
        """
        gathered = self._gathered_in(self._storages[cut][0])
        if gathered is None or gathered.node is cut or not self._is_local_slice(cut, gathered):
            return False
        copies = [n for n in cut.users if n.target is aten.clone.default]
        shared = (gathered.source, gathered.gather, gathered.node, *copies)
        if any(self._writes.is_written(n) for n in shared):
            return False
        source = gathered.source
        if tensor_of(cut).shape != tensor_of(source).shape:
            with cut.graph.inserting_before(cut):
                shape = list(tensor_of(cut).shape)
                source = cut.graph.call_function(aten.view.default, (source, shape))
            copy_annotations(cut, source)
            infer_value(source)
            self._storages[source] = self._storages[gathered.source]
        replaced = False
        for reader in (cut, *copies):
            if self._storages[reader] in self._returned:
                continue
            if any("as_strided" in str(view.target) for view in self._views(reader)):
                continue  # an explicit offset into the storage, which changes
            if reader.users and tensor_of(reader).stride() == tensor_of(source).stride():
                self._replace(reader, source)
                replaced = True
        return replaced

    def _gathered_in(self, node: fx.Node) -> _Gathered | None:
        """Return what is gathered into the storage that a gather allocates, or a `cat` that has all
        parts of a gather, in order and each of them whole."""
        kind = plain_kind(node)
        if kind is not None and kind.result is Result.GATHERED:
            source = node.all_input_nodes[0]
            sent = tensor_of(source)
            plain = sent.ndim > 0 and sent.numel() > 0 and sent.is_contiguous()
            return _Gathered(source, 0, node, node) if plain else None
        if node.target is not aten.cat.default:
            return None
        parts = argument_nodes(argument(node, "tensors"))
        gathered = self._gathered_in(self._storages[parts[0]][0])
        if gathered is None or gathered.node is not gathered.gather:
            return None
        sent = tensor_of(gathered.source)
        for member, part in enumerate(parts):
            shown = tensor_of(part)
            if (
                self._storages[part] != self._storages[gathered.gather]
                or shown.dtype != sent.dtype
                or shown.shape != sent.shape
                or shown.stride() != sent.stride()
                or shown.storage_offset() != member * sent.numel()
            ):
                return None
        dim = argument(node, "dim")
        assert isinstance(dim, int)
        return _Gathered(gathered.source, dim % sent.ndim, gathered.gather, node)

    def _is_local_slice(self, cut: fx.Node, gathered: _Gathered) -> bool:
        """Return whether a node marked as a local slice is exactly the gather's local part."""
        ranks = self._ranks(str(argument(gathered.gather, "group_name")))
        if self._ranks(str(local_slice_group(cut))) != ranks:
            return False
        # the mark is for a slice of the whole gathered tensor, which is checked at the end
        whole = cut.all_input_nodes[0]
        while not isinstance(value_of(whole), torch.Tensor):
            whole = whole.all_input_nodes[0]
        if not isinstance(value_of(cut), torch.Tensor):
            return False
        sliced, local, sent = tensor_of(whole), tensor_of(cut), tensor_of(gathered.source)
        if local.dtype != sent.dtype or local.numel() != sent.numel():
            return False
        shape, index = list(sent.shape), ranks.index(dist.get_rank())
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
        return (
            sliced.numel() == full.numel()
            and sliced.is_contiguous()
            and local.stride() == expected.stride()
            and local.storage_offset() == expected.storage_offset()
        )

    def _views(self, node: fx.Node) -> list[fx.Node]:
        """List the views of a node, and the views of these."""
        views = [node]
        for each in views:
            views += [
                user for user in each.users if self._storages.get(user) == self._storages[node]
            ]
        return views[1:]

    def _replace(self, reader: fx.Node, source: fx.Node) -> None:
        """Let the readers of a node read another with the same elements in the same layout."""
        if is_saved_for_backward(reader):
            set_saved_for_backward(source)
        views = self._views(reader)
        reader.replace_all_uses_with(source)
        for view in views:  # these have another offset in another storage
            infer_value(view)
