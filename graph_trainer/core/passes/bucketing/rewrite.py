"""Replace several collectives by one, and sort the nodes accordingly."""

from __future__ import annotations

import functools
import heapq
import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.annotations import (
    SEPARATOR,
    annotate_node,
    annotation,
    inferred_value,
    module_of,
    phase_of,
    role_of,
    tensor_of,
)
from graph_trainer.core.graph.collective_kinds import Result
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument, aten, collective_kind, erase_unused, schema_of
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.passes.bucketing.assign import Member
from graph_trainer.core.torch_private import c10d_functional

_Key = tuple[int, ...]
"""Sort key of a node; a node never comes before its inputs, whatever the keys are."""


def merge(joint: JointGraph, buckets: Sequence[Sequence[Member]]) -> None:
    """Replace the collectives of each bucket by one, in place. n log n in nodes.

    A gather and the nodes that prepare it move up to its first member; the nodes after a reduction
    move down to its last. All other nodes keep their order.
    """
    if not buckets:
        return
    registered = [spec.name for spec, _ in joint.inputs_of(InputKind.PARAMETER)]
    rank = {name: place for place, name in enumerate(registered)}
    keys: dict[fx.Node, _Key] = {node: (i, 0) for i, node in enumerate(joint.graph.nodes)}
    gathers: list[tuple[int, list[fx.Node]]] = []
    known: dict[object, Any] = {}
    for bucket in buckets:
        reduces = bool(bucket[0].route.reduction)
        anchor = (max if reduces else min)(m.position for m in bucket)
        ordered = sorted(bucket, key=lambda m: (rank[m.parameter], m.position))
        made = _Bucket(joint.graph, ordered, known).merged()
        keys |= {node: (anchor, 1, i) for i, node in enumerate(made)}
        if not reduces:
            gathers.append((anchor, made))
    erase_unused(joint.graph)  # the members, and casts and copies that no bucket needs
    for anchor, made in sorted(gathers, key=lambda entry: entry[0]):
        # the inputs of a gather are sorted before it, unless they come earlier already
        stack = [n for node in made for n in node.all_input_nodes]
        inside = set(made)
        while stack:
            node = stack.pop()
            if node in inside or node.op != "call_function" or keys[node] < (anchor, 0):
                continue
            keys[node] = (anchor, -1, *keys[node])
            stack += node.all_input_nodes
    # the order of their keys, each after its inputs
    missing = {node: len(node.all_input_nodes) for node in joint.graph.nodes}
    ready = [(keys[node], node) for node, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (keys[user], user))
    assert len(order) == len(missing), "buckets in a cycle, which without_cycles drops"
    *body, output = order
    for node in body:
        output.prepend(node)


def _layout(node: fx.Node) -> Any:
    tensor = tensor_of(node)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class _Bucket:
    """One bucket, its members in the order of its payload; `known` has fake results of ops."""

    def __init__(
        self, graph: fx.Graph, members: Sequence[Member], known: dict[object, Any]
    ) -> None:
        self.graph = graph
        self.members = members
        self.first = members[0].node
        self.known = known
        self._ranks: Any = argument(self.first, "group_size")
        self.made: list[fx.Node] = []
        modules = [(module_of(m.node) or m.parameter).split(".") for m in members]
        self._as_bucket = annotation(
            phase=phase_of(self.first),
            module=".".join(os.path.commonprefix(modules)),
            role=role_of(self.first),
            parameter=SEPARATOR.join(m.parameter for m in members),
        )

    def merged(self) -> list[fx.Node]:
        """Merge the members, and return the new nodes in their order."""
        kind = collective_kind(self.first)
        assert kind is not None
        if kind.result is Result.GATHERED:
            results = self._gathered()
        elif kind.result is Result.SCATTERED:
            results = self._scattered()
        else:
            results = self._elementwise()
        for member, result in zip(self.members, results, strict=True):
            (wait,) = member.node.users
            wait.replace_all_uses_with(result)
        return self.made

    def _gathered(self) -> list[fx.Node]:
        """Make [ranks * rows, ...] of [rows, ...] for each member.

        The bucket is flat, [n]; gathered [ranks, n]; n in bytes if dtypes differ."""
        ranks = self._ranks
        dtypes = [tensor_of(m.node).dtype for m in self.members]
        mixed = len(set(dtypes)) > 1
        flat = [self._flat(m, _input(m.node)) for m in self.members]
        if mixed:
            flat = [self._of(m, aten.view.dtype, f, torch.uint8) for m, f in self._with(flat)]
        sizes = [tensor_of(f).numel() for f in flat]
        bucket = self._make(aten.cat.default, flat)
        whole = self._communicated(bucket)
        rows = self._make(aten.view.default, whole, [ranks, sum(sizes)])
        parts = self._split(rows, sizes, 1)
        results = []
        for place, (m, part) in enumerate(self._with(parts)):
            part = self._of(m, aten.clone.default, part, memory_format=torch.contiguous_format)
            if mixed and sizes[place]:
                part = self._of(m, aten.view.dtype, part, dtypes[place])
            elif mixed:  # an empty tensor cannot be viewed in another dtype
                part = self._of(m, aten._to_copy.default, part, dtype=dtypes[place])
            results.append(self._of(m, aten.view.default, part, list(tensor_of(m.node).shape)))
        return results

    def _scattered(self) -> list[fx.Node]:
        """Make [rows, ...] of the sum of [ranks * rows, ...] for each member.

        The bucket is [ranks, elements of all members' rows], reduced to one of its rows."""
        ranks = self._ranks
        sources, cast = self._before_casts()
        parts = []
        for m, source in self._with(sources):
            size = tensor_of(source).numel() // ranks
            flat = self._contiguous(m, source)
            parts.append(self._of(m, aten.view.default, flat, [ranks, size]))
        sizes = [tensor_of(part).shape[1] for part in parts]
        bucket = self._make(aten.cat.default, parts, 1)
        bucket = self._make(aten.view.default, bucket, [ranks * sum(sizes)])
        return self._reduced(bucket, cast, sizes)

    def _elementwise(self) -> list[fx.Node]:
        """Make the sum for each member, in the shape of the member."""
        sources, cast = self._before_casts()
        flat = [self._flat(m, source) for m, source in self._with(sources)]
        sizes = [tensor_of(f).numel() for f in flat]
        return self._reduced(self._make(aten.cat.default, flat), cast, sizes)

    def _communicated(self, bucket: fx.Node) -> fx.Node:
        """Return the complete result of the members' collective on the bucket.

        All members have its op and its arguments but for the input: they share a `Route`."""
        schema = schema_of(self.first)
        assert schema is not None
        others = [argument(self.first, entry.name) for entry in schema.arguments[1:]]
        result = self._make(self.first.target, bucket, *others)
        return self._make(c10d_functional.wait_tensor.default, result)

    def _reduced(
        self, bucket: fx.Node, cast: torch.dtype | None, sizes: list[int]
    ) -> list[fx.Node]:
        """Cast a flat bucket and reduce it; return views of the result in the members' shapes."""
        if cast is not None:
            bucket = self._make(aten._to_copy.default, bucket, dtype=cast)
        parts = self._split(self._communicated(bucket), sizes, 0)
        return [
            self._of(m, aten.view.default, part, list(tensor_of(m.node).shape))
            for m, part in self._with(parts)
        ]

    def _split(self, bucket: fx.Node, sizes: list[int], dim: int) -> list[fx.Node]:
        parts = self._make(aten.split_with_sizes.default, bucket, sizes, dim)
        return [self._of(m, operator.getitem, parts, place) for place, m in enumerate(self.members)]

    def _before_casts(self) -> tuple[list[fx.Node], torch.dtype | None]:
        """Return what the members send, before its cast to a wider dtype where it has one; and the
        dtype to cast the bucket to, None where packing gives that dtype.

        A bucket is packed from the narrower dtypes: fewer bytes are alive until the last member is
        computed. Where members differ, as where tensor parallelism has summed some gradients in
        the wider dtype before, `cat` widens the others. The bits are the same."""
        sent = [_input(m.node) for m in self.members]
        sources = [_before_cast(node) for node in sent]
        wanted = tensor_of(sent[0]).dtype
        dtypes = {tensor_of(source).dtype for source in sources}
        packed = functools.reduce(torch.promote_types, dtypes)
        if len(dtypes) > 1 and packed != wanted:
            return sent, None
        return sources, None if packed == wanted else wanted

    def _flat(self, member: Member, node: fx.Node) -> fx.Node:
        node = self._contiguous(member, node)
        return self._of(member, aten.view.default, node, [tensor_of(node).numel()])

    def _contiguous(self, member: Member, node: fx.Node) -> fx.Node:
        if tensor_of(node).is_contiguous():
            return node
        return self._of(member, aten.clone.default, node, memory_format=torch.contiguous_format)

    def _with(self, nodes: Sequence[fx.Node]) -> list[tuple[Member, fx.Node]]:
        return list(zip(self.members, nodes, strict=True))

    def _of(self, member: Member, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a node for one member."""
        node = member.node
        entry = annotation(
            phase=phase_of(node),
            module=module_of(node),
            role=role_of(node),
            parameter=member.parameter,
        )
        return self._node(entry, op, args, kwargs)

    def _make(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a node for all members."""
        return self._node(self._as_bucket, op, args, kwargs)

    def _node(self, entry: dict[str, str], op: Any, args: Any, kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.first):
            node = self.graph.call_function(op, args, kwargs)
        # Layers are alike, and computing fake results is most of the time of a merge: each is
        # computed once, but for elements of a list of tensors.
        if op is operator.getitem:
            node.meta["val"] = inferred_value(node)
        else:
            key = (op, repr(fx.map_arg((node.args, node.kwargs), _layout)))
            if key not in self.known:
                self.known[key] = inferred_value(node)
            node.meta["val"] = self.known[key]
        annotate_node(node, entry)
        self.made.append(node)
        return node


_PREPARES = (aten._to_copy.default, aten.clone.default)


def prepared_from(collective: fx.Node) -> list[fx.Node]:
    """Return what a collective sends, and what that casts or copies: a bucket may read either."""
    nodes = [_input(collective)]
    while nodes[-1].target in _PREPARES:
        nodes += nodes[-1].all_input_nodes
    return nodes


def _before_cast(sent: fx.Node) -> fx.Node:
    """Return what a collective's input is cast from, if the cast is to a wider dtype, perhaps with
    a copy of it, and has no other reader; else the input."""
    cast = sent.all_input_nodes[0] if sent.target is aten.clone.default else sent
    is_cast = cast.target is aten._to_copy.default and cast.kwargs.keys() == {"dtype"}
    if not is_cast or len(sent.users) != 1 or len(cast.users) != 1:
        return sent
    (source,) = cast.all_input_nodes
    is_wider = tensor_of(source).dtype.itemsize < tensor_of(cast).dtype.itemsize
    return source if is_wider else sent


def _input(collective: fx.Node) -> fx.Node:
    return collective.all_input_nodes[0]  # the splits of an all-to-all may be nodes too
