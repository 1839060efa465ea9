"""Replace several collectives by one, and sort the nodes accordingly."""

from __future__ import annotations

import functools
import heapq
import operator
import os
from collections.abc import Mapping, Sequence
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
"""The sort key of a node. A node comes after its inputs even if its key is smaller.

(i, 0) for the node at position i of the old graph; (i, 1, ...) for the new nodes of a bucket whose
place is i, and (i, -1, ...) for the inputs of a gather at i."""


def merge(joint: JointGraph, buckets: Sequence[Sequence[Member]]) -> None:
    """Replace the collectives of each bucket by one, in place. n log n in nodes.

    A gather and the nodes that prepare it move up to its first member; the nodes after a reduction
    move down to its last. All other nodes keep their order.
    """
    if not buckets:
        return
    names = [spec.name for spec, _ in joint.inputs_of(InputKind.PARAMETER)]
    parameter_order = {name: index for index, name in enumerate(names)}
    keys: dict[fx.Node, _Key] = {node: (i, 0) for i, node in enumerate(joint.graph.nodes)}
    gathers: list[tuple[int, list[fx.Node]]] = []
    known_values: dict[object, Any] = {}
    for bucket in buckets:
        reduces = bool(bucket[0].route.reduction)
        positions = [member.position for member in bucket]
        anchor = max(positions) if reduces else min(positions)
        members = sorted(bucket, key=lambda m: (parameter_order[m.parameter], m.position))
        nodes = _Bucket(joint.graph, members, known_values).merged()
        keys |= {node: (anchor, 1, i) for i, node in enumerate(nodes)}
        if not reduces:
            gathers.append((anchor, nodes))
    # the members, and casts and copies that no bucket needs
    erase_unused(joint.graph, among={wait for b in buckets for m in b for wait in m.node.users})
    for anchor, nodes in sorted(gathers, key=lambda entry: entry[0]):
        # the inputs of a gather are sorted before it, unless they come earlier already
        stack = [source for node in nodes for source in node.all_input_nodes]
        inside = set(nodes)
        while stack:
            node = stack.pop()
            if node in inside or node.op != "call_function" or keys[node] < (anchor, 0):
                continue
            keys[node] = (anchor, -1, *keys[node])
            stack += node.all_input_nodes
    sort_nodes(joint.graph, keys)


def sort_nodes(graph: fx.Graph, keys: Mapping[fx.Node, tuple[int, ...]]) -> None:
    """Sort the nodes by their keys, each after its inputs. n log n."""
    num_missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(keys[node], node) for node, count in num_missing.items() if not count]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for user in node.users:
            num_missing[user] -= 1
            if not num_missing[user]:
                heapq.heappush(ready, (keys[user], user))
    assert len(order) == len(num_missing), "buckets in a cycle, which without_cycles drops"
    *body, output = order
    for node in body:
        output.prepend(node)


def _layout(node: fx.Node) -> Any:
    tensor = tensor_of(node)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class _Bucket:
    """One bucket, with its members in the order in which they are packed.

    Args:
        known_values: fake results of ops that other buckets have, too.
    """

    def __init__(
        self, graph: fx.Graph, members: Sequence[Member], known_values: dict[object, Any]
    ) -> None:
        self.graph = graph
        self.members = members
        self.first = members[0].node
        self.known_values = known_values
        self._ranks: Any = argument(self.first, "group_size")
        self.nodes: list[fx.Node] = []
        """The nodes that were made."""
        modules = [(module_of(m.node) or m.parameter).split(".") for m in members]
        self._annotation = annotation(
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
        return self.nodes

    def _gathered(self) -> list[fx.Node]:
        """Gather [rows, ...] of each member into [ranks * rows, ...].

        The bucket is flat, [n], and gathered [ranks, n]; n counts bytes if dtypes differ."""
        dtypes = [tensor_of(m.node).dtype for m in self.members]
        mixed = len(set(dtypes)) > 1
        flat = []
        for member in self.members:
            source = self._flat(member, _input(member.node))
            if mixed:
                source = self._add_for(member, aten.view.dtype, source, torch.uint8)
            flat.append(source)
        sizes = [tensor_of(source).numel() for source in flat]
        bucket = self._add(aten.cat.default, flat)
        gathered = self._communicated(bucket)
        rows = self._add(aten.view.default, gathered, [self._ranks, sum(sizes)])
        parts = self._split(rows, sizes, 1)
        results = []
        for m, part, size, dtype in zip(self.members, parts, sizes, dtypes, strict=True):
            part = self._add_for(m, aten.clone.default, part, memory_format=torch.contiguous_format)
            if mixed and size:
                part = self._add_for(m, aten.view.dtype, part, dtype)
            elif mixed:  # an empty tensor cannot be viewed in another dtype
                part = self._add_for(m, aten._to_copy.default, part, dtype=dtype)
            shape = list(tensor_of(m.node).shape)
            results.append(self._add_for(m, aten.view.default, part, shape))
        return results

    def _scattered(self) -> list[fx.Node]:
        """Reduce [ranks * rows, ...] of each member to [rows, ...].

        The bucket is [ranks, elements of all members' rows], reduced to one of its rows."""
        sources, cast = self._before_casts()
        parts = []
        for member, source in zip(self.members, sources, strict=True):
            size = tensor_of(source).numel() // self._ranks
            flat = self._contiguous(member, source)
            parts.append(self._add_for(member, aten.view.default, flat, [self._ranks, size]))
        sizes = [tensor_of(part).shape[1] for part in parts]
        bucket = self._add(aten.cat.default, parts, 1)
        bucket = self._add(aten.view.default, bucket, [self._ranks * sum(sizes)])
        return self._reduced(bucket, cast, sizes)

    def _elementwise(self) -> list[fx.Node]:
        """Reduce each member to a result of its shape."""
        sources, cast = self._before_casts()
        flat = [self._flat(m, source) for m, source in zip(self.members, sources, strict=True)]
        sizes = [tensor_of(source).numel() for source in flat]
        return self._reduced(self._add(aten.cat.default, flat), cast, sizes)

    def _communicated(self, bucket: fx.Node) -> fx.Node:
        """Return the complete result of the members' collective on the bucket.

        All members have the same op and arguments, except for the input: they share a `Route`."""
        schema = schema_of(self.first)
        assert schema is not None
        others = [argument(self.first, entry.name) for entry in schema.arguments[1:]]
        result = self._add(self.first.target, bucket, *others)
        return self._add(c10d_functional.wait_tensor.default, result)

    def _reduced(
        self, bucket: fx.Node, cast: torch.dtype | None, sizes: list[int]
    ) -> list[fx.Node]:
        """Cast a flat bucket and reduce it; return views of the result in the members' shapes."""
        if cast is not None:
            bucket = self._add(aten._to_copy.default, bucket, dtype=cast)
        parts = self._split(self._communicated(bucket), sizes, 0)
        results = []
        for member, part in zip(self.members, parts, strict=True):
            shape = list(tensor_of(member.node).shape)
            results.append(self._add_for(member, aten.view.default, part, shape))
        return results

    def _split(self, bucket: fx.Node, sizes: list[int], dim: int) -> list[fx.Node]:
        """Split a bucket into the parts of the members."""
        split = self._add(aten.split_with_sizes.default, bucket, sizes, dim)
        parts = []
        for index, member in enumerate(self.members):
            parts.append(self._add_for(member, operator.getitem, split, index))
        return parts

    def _before_casts(self) -> tuple[list[fx.Node], torch.dtype | None]:
        """Return the tensors to pack for the members, and the dtype to cast the bucket to.

        If a member is cast to a wider dtype before it is sent, its tensor before the cast is
        packed: fewer bytes are alive until the last member is computed. If dtypes then differ, for
        example because tensor parallelism has summed some gradients in the wider dtype before,
        `cat` widens the others. The bits are the same. The dtype is None if no cast is needed."""
        sent = [_input(member.node) for member in self.members]
        sources = [_before_cast(node) for node in sent]
        sent_dtype = tensor_of(sent[0]).dtype
        dtypes = {tensor_of(source).dtype for source in sources}
        packed_dtype = functools.reduce(torch.promote_types, dtypes)
        if packed_dtype == sent_dtype:
            return sources, None
        if len(dtypes) > 1:
            return sent, None
        return sources, sent_dtype

    def _flat(self, member: Member, node: fx.Node) -> fx.Node:
        node = self._contiguous(member, node)
        return self._add_for(member, aten.view.default, node, [tensor_of(node).numel()])

    def _contiguous(self, member: Member, node: fx.Node) -> fx.Node:
        if tensor_of(node).is_contiguous():
            return node
        contiguous = torch.contiguous_format
        return self._add_for(member, aten.clone.default, node, memory_format=contiguous)

    def _add_for(self, member: Member, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node for one member."""
        node = member.node
        entry = annotation(
            phase=phase_of(node),
            module=module_of(node),
            role=role_of(node),
            parameter=member.parameter,
        )
        return self._add_node(entry, op, args, kwargs)

    def _add(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node for all members."""
        return self._add_node(self._annotation, op, args, kwargs)

    def _add_node(self, entry: dict[str, str], op: Any, args: Any, kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.first):
            node = self.graph.call_function(op, args, kwargs)
        # Most of the time of a merge goes into fake results, which equal layers share: each is
        # computed once, except for the elements of a list of tensors.
        if op is operator.getitem:
            node.meta["val"] = inferred_value(node)
        else:
            key = (op, repr(fx.map_arg((node.args, node.kwargs), _layout)))
            if key not in self.known_values:
                self.known_values[key] = inferred_value(node)
            node.meta["val"] = self.known_values[key]
        annotate_node(node, entry)
        self.nodes.append(node)
        return node


_PREPARES = (aten._to_copy.default, aten.clone.default)


def prepared_from(collective: fx.Node) -> list[fx.Node]:
    """Return the node that a collective sends, and the nodes that it casts or copies: a bucket may
    read any of them."""
    nodes = [_input(collective)]
    while nodes[-1].target in _PREPARES:
        nodes += nodes[-1].all_input_nodes
    return nodes


def _before_cast(sent: fx.Node) -> fx.Node:
    """Return the node before the cast of a collective's input, if that is a cast to a wider dtype
    (or a copy of one) without another reader; else the input."""
    cast = sent.all_input_nodes[0] if sent.target is aten.clone.default else sent
    is_cast = cast.target is aten._to_copy.default and cast.kwargs.keys() == {"dtype"}
    if not is_cast or len(sent.users) != 1 or len(cast.users) != 1:
        return sent
    (source,) = cast.all_input_nodes
    is_wider = tensor_of(source).dtype.itemsize < tensor_of(cast).dtype.itemsize
    return source if is_wider else sent


def _input(collective: fx.Node) -> fx.Node:
    return collective.all_input_nodes[0]  # the splits of an all-to-all may be nodes too
