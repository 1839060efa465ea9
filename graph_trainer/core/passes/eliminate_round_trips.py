"""Read what was gathered and sliced again from where it came."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import fx

from graph_trainer.core.analysis.collective_kinds import Result
from graph_trainer.core.graph.annotations import (
    copy_annotations,
    is_saved_for_backward,
    local_slice_group,
    set_saved_for_backward,
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
from graph_trainer.core.torch_private import detect_fake_mode, group_ranks

aten = torch.ops.aten


@graph_pass(stage=Stage.STRUCTURE, summary="Read a rank's own slice of a gather from what it sent")
def eliminate_round_trips(joint: JointGraph, options: NoOptions, context: PassContext) -> None:
    """Let readers of this rank's own slice of a gathered tensor read what the rank sent.

    DTensor redistributes a value for one reader (Shard -> Replicate: an all-gather, and for a
    dimension other than the first a `cat` of its parts) and back for another (Replicate -> Shard:
    a slice and its copy). The second reader needs neither; what nobody reads then goes, the
    gather too. Several mesh dimensions are as many round trips, the inner one seen once the
    outer one is gone. What was gathered and has other readers, slices of another size among
    them, stays for those.

    Relies on the mark that capture sets where DTensor takes own slices, since a graph cannot
    tell rank 0's own slice from the first rows, which every rank may read: ranks that decided
    unlike would issue unlike collectives. On top of the mark, shapes, strides and offsets must
    show that the slice is the whole of what this rank sent. Shards of unlike sizes, anything
    written in place or returned, and reductions (which send back something else) are left alone;
    so is a slice that is gathered again, since nothing proves that ranks sliced equal bits.

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
    """What every rank of a group sent, side by side along a dimension, in a storage of its own."""

    source: fx.Node
    dim: int
    group: str
    wait: fx.Node
    node: fx.Node
    """The wait, or the `cat` that puts the parts of the wait side by side along `dim`."""


class _RoundTrips:
    def __init__(self, joint: JointGraph) -> None:
        self._writes = LastWrites(joint.graph)
        self._storages = storage_roots(joint.graph)
        self._returned = {self._storages[n] for n in joint.output_node().all_input_nodes}
        self._gathered: dict[fx.Node, _Gathered] = {}
        """By the node in whose storage it is."""
        self._root: dict[fx.Node, fx.Node] = {}
        self._unread: list[fx.Node] = []
        self._ranks = cache(group_ranks)

    def visit(self, node: fx.Node) -> None:
        """See what a node gathers or cuts; every node once, in order."""
        self._root[node] = self._root_of(node)
        if is_wait(node):
            self._note_gather(node)
        elif node.target is aten.cat.default:
            self._note_cat(node)
        elif local_slice_group(node) is not None and self._root[node] is not node:
            self._shorten(node)

    def sweep(self) -> None:
        """Remove what this pass left without a reader."""
        gone: set[fx.Node] = set()
        while self._unread:
            node = self._unread.pop()
            if node in gone or has_effect(node):
                continue
            parts = list(node.users)
            if any(part.users or not is_getitem(part) for part in parts):
                continue
            self._unread += node.all_input_nodes
            for dead in (*parts, node):
                node.graph.erase_node(dead)
                gone.add(dead)

    def _root_of(self, node: fx.Node) -> fx.Node:
        """The node in whose storage a node lives, with what this pass has changed so far."""
        source = _viewed(node)
        return node if source is None else self._root[source]

    def _note_gather(self, wait: fx.Node) -> None:
        (gather,) = wait.all_input_nodes
        kind = plain_kind(gather)
        if kind is None or kind.result is not Result.GATHERED:
            return
        source = gather.all_input_nodes[0]
        sent = _tensor(source)
        if sent.ndim > 0 and sent.numel() > 0 and sent.is_contiguous():
            group = str(argument(gather, "group_name"))
            self._gathered[self._root[wait]] = _Gathered(source, 0, group, wait, wait)

    def _note_cat(self, cat: fx.Node) -> None:
        """The parts of a gather, all of them, in order and each whole."""
        parts = argument_nodes(argument(cat, "tensors"))
        gathered = self._gathered.get(self._root[parts[0]]) if parts else None
        if gathered is None:
            return
        sent = _tensor(gathered.source)
        for member, part in enumerate(parts):
            shown = _tensor(part)
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
        """Let readers of an own slice, and of its copies, read what this rank sent."""
        gathered = self._gathered.get(self._root[cut])
        if gathered is None or not self._is_local_slice(cut, gathered):
            return
        copies = [n for n in cut.users if n.target is aten.clone.default]
        shared = (gathered.source, gathered.wait, gathered.node, *copies)
        if any(self._writes.is_written(n) for n in shared):
            return
        source = gathered.source
        if _tensor(cut).shape != _tensor(source).shape:
            source = self._view(source, cut)
        for reader in (cut, *copies):
            if self._storages[reader] in self._returned or _is_read_by_offset(reader):
                continue
            if _tensor(reader).stride() == _tensor(source).stride():
                _replace(reader, source)
                self._unread.append(reader)
        self._unread.append(source)

    def _is_local_slice(self, cut: fx.Node, gathered: _Gathered) -> bool:
        """Whether a marked node takes this rank's part, no more and no less, of the whole."""
        ranks = self._ranks(gathered.group)
        # local_slice_group is not None for what `visit` hands on
        if self._ranks(str(local_slice_group(cut))) != ranks:
            return False
        # The cut is DTensor's own, which is what the mark speaks of: out of all that was gathered.
        whole = _viewed(cut)
        while whole is not None and not isinstance(value_of(whole), torch.Tensor):
            whole = _viewed(whole)
        if whole is None or not isinstance(value_of(cut), torch.Tensor):
            return False
        shown, own, sent = _tensor(whole), _tensor(cut), _tensor(gathered.source)
        if own.dtype != sent.dtype or own.numel() != sent.numel():
            return False
        shape, index = list(sent.shape), ranks.index(dist.get_rank())
        shape[gathered.dim] *= len(ranks)
        full = torch.empty(shape, device="meta")
        if own.shape == sent.shape:
            rows = sent.shape[gathered.dim]
            expected = full.narrow(gathered.dim, index * rows, rows)
        elif gathered.dim == 0:
            # another view of the same elements, which lie one behind the other
            size = sent.numel()
            expected = full.view(-1).narrow(0, index * size, size).view(own.shape)
        else:
            return False
        return (
            shown.numel() == full.numel()
            and shown.is_contiguous()
            and own.stride() == expected.stride()
            and own.storage_offset() == expected.storage_offset()
        )

    def _view(self, source: fx.Node, like: fx.Node) -> fx.Node:
        with like.graph.inserting_before(like):
            shape = list(_tensor(like).shape)
            view = like.graph.call_function(aten.view.default, (source, shape))
        copy_annotations(like, view)
        _set_value(view)
        self._root[view] = self._root[source]
        return view


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, or one of the views of; None where it has its own storage."""
    if not is_getitem(node):
        return aliased_input(node)
    views = node.all_input_nodes[0]
    return views if aliased_input(views) is not None else None


def _tensor(node: fx.Node) -> torch.Tensor:
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return value


def _set_value(node: fx.Node) -> None:
    """Run a node's op on the fake values of what it reads."""
    mode = detect_fake_mode([value_of(n) for n in node.all_input_nodes])
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    with mode or contextlib.nullcontext():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _is_read_by_offset(reader: fx.Node) -> bool:
    """Whether a view of a node says where it begins in the storage, which is to be another."""
    stack = list(reader.users)
    while stack:
        node = stack.pop()
        if "as_strided" in str(node.target):
            return True
        if _viewed(node) is not None:
            stack += node.users
    return False


def _replace(reader: fx.Node, source: fx.Node) -> None:
    """Give the readers of one node another that holds the same in the same layout."""
    if is_saved_for_backward(reader):
        set_saved_for_backward(source)
    stale = list(reader.users)
    reader.replace_all_uses_with(source)
    # views of it begin elsewhere in another storage
    while stale:
        node = stale.pop()
        if _viewed(node) is not None:
            _set_value(node)
            stale += node.users
