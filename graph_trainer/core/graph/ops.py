"""What an op does besides computing: writes, aliases, random numbers, communication."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graph_trainer.core.analysis.collective_kinds import (
    IN_PLACE_NAMESPACE,
    CollectiveKind,
    Effect,
    kind_of_op,
)
from graph_trainer.core.torch_private import detect_fake_mode, storage_id

aten = torch.ops.aten

OpOverload = type(aten.add.Tensor)  # has no public name

# Running statistics are written although the schema does not say so, when the op is told to
# train; ops without a training argument always write.
_HIDDEN_WRITES = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::batch_norm_update_stats",
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
}

# Share their input's storage although the schema does not say so.
_HIDDEN_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
}

# View where they can and copy where they must, which their schemas do not tell apart.
_MAY_COPY = {
    "aten::contiguous",
    "aten::flatten",
    "aten::ravel",
    "aten::reshape",
    "aten::reshape_as",
    "aten::to",
}


def schema_of(node: fx.Node) -> torch.FunctionSchema | None:
    """The schema of the op that a node calls, None for anything that is not an OpOverload."""
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return node.target._schema
    return None


def argument(node: fx.Node, name: str, default: object = None) -> object:
    """A node's argument by its schema name, wherever it was passed."""
    schema = schema_of(node)
    if schema is None:
        return default
    if name in node.kwargs:
        return node.kwargs[name]
    for position, entry in enumerate(schema.arguments):
        if entry.name == name:
            if position < len(node.args):
                return node.args[position]
            return entry.default_value if entry.has_default_value() else default
    return default


def argument_nodes(value: Any) -> list[fx.Node]:
    """Every node inside one argument, in order."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def subgraphs(node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graphs that a higher-order op runs."""
    if node.op != "call_function" or schema_of(node) is not None:
        return
    for source in node.all_input_nodes:
        module = subgraph_of(source)
        if module is not None:
            yield module


def subgraph_of(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a get_attr node holds, if it holds one."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    try:
        found = operator.attrgetter(str(node.target))(owner)
    except AttributeError:
        return None
    return found if isinstance(found, fx.GraphModule) else None


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node changes in place, by its schema and by what schemas hide.

    A higher-order op whose subgraph writes one of its own inputs counts as writing all.
    """
    schema = schema_of(node)
    if schema is None:
        operands = [n for n in node.all_input_nodes if n.op != "get_attr"]
        return operands if any(_writes_its_inputs(m.graph) for m in subgraphs(node)) else []
    if _namespace(schema) == IN_PLACE_NAMESPACE:
        return list(node.all_input_nodes)
    written: list[fx.Node] = []
    for position, entry in enumerate(schema.arguments):
        if entry.alias_info is None or not entry.alias_info.is_write:
            continue
        value = node.kwargs.get(
            entry.name, node.args[position] if position < len(node.args) else None
        )
        written += argument_nodes(value)
    kind = kind_of_op(schema.name)
    if kind is not None:
        written += argument_nodes([argument(node, name) for name in kind.written])
    if schema.name in _HIDDEN_WRITES and argument(node, "training", argument(node, "train", True)):
        written += argument_nodes([argument(node, "running_mean"), argument(node, "running_var")])
    return written


def _writes_its_inputs(graph: fx.Graph) -> bool:
    return bool(LastWrites(graph).written_inputs())


def _namespace(schema: torch.FunctionSchema) -> str:
    return schema.name.split("::")[0]


def collective_kind(node: fx.Node) -> CollectiveKind | None:
    """The row of `collective_kinds` for the op of a node, None for an op that is not about
    communication. An unknown op in a namespace of collectives has the row `UNKNOWN`."""
    schema = schema_of(node)
    return None if schema is None else kind_of_op(schema.name)


def plain_kind(node: fx.Node) -> CollectiveKind | None:
    """The same for a collective of one tensor that returns a new one; None for the variants
    that write into a buffer or take several tensors, and for ops without a row."""
    kind = collective_kind(node)
    return kind if kind is not None and collective_name(node) in kind.ops[:1] else None


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts communication between ranks."""
    kind = collective_kind(node)
    return kind is not None and kind.effect is Effect.STARTS


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective; its result is its input, finished."""
    kind = collective_kind(node)
    return kind is not None and kind.effect is Effect.WAITS


def collective_name(node: fx.Node) -> str:
    """Name of a collective without its namespace: all_gather_into_tensor, all_reduce, ..."""
    schema = schema_of(node)
    assert schema is not None
    return schema.name.split("::")[1]


def is_random(node: fx.Node) -> bool:
    """Whether running a node again would give another result or shift the random stream.

    Attention ops carry torch's nondeterministic_seeded tag whatever their dropout; the
    probability decides. (Elsewhere a probability of zero still draws.) A higher-order op is
    random when something in its subgraphs is.
    """
    if node.op != "call_function":
        return False
    if schema_of(node) is None:
        return any(is_random(inner) for module in subgraphs(node) for inner in module.graph.nodes)
    assert isinstance(node.target, OpOverload)
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if argument(node, "train", True) is False:
        return False
    return argument(node, "dropout_p", 1.0) != 0.0


def has_effect(node: fx.Node) -> bool:
    """Whether a node must run even if nothing reads its result."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr" or is_getitem(node):
        return False
    schema = schema_of(node)
    # an op without a schema could do anything; one that returns nothing is called for its effect
    if schema is None or not schema.returns:
        return True
    kind = kind_of_op(schema.name)
    if kind is not None and (kind.paired or _namespace(schema) == IN_PLACE_NAMESPACE):
        return True
    if is_wait(node):
        return not _waits_for_nothing_else(node)
    return bool(written_arguments(node)) or is_random(node)


def _waits_for_nothing_else(wait: fx.Node) -> bool:
    """Whether no one but `wait` reads the collective that it waits for.

    Others may read the collective's own node, or the buffer that it writes, and count on
    this wait having run before them.
    """
    (source,) = wait.all_input_nodes
    return is_collective(source) and len(source.users) == 1 and not has_effect(source)


def aliased_input(node: fx.Node) -> fx.Node | None:
    """The input whose storage a node's (first) result shares, None where it makes its own.

    Views, in-place ops and `out=` variants by their schema; waits by their contract; ops that
    view where they can, such as `reshape`, by asking the op.
    """
    shared = _shared_inputs(node)
    return shared[0] if shared and isinstance(shared[0], fx.Node) else None


_Shared = fx.Node | list[fx.Node] | None
"""The input that a result shares; for a list that is written in place, its elements."""


def _shared_inputs(node: fx.Node) -> list[_Shared]:
    """For each result that the schema of a node's op names: whose storage it shares."""
    if is_wait(node) or node.target in _HIDDEN_VIEWS:
        return [node.all_input_nodes[0]]
    schema = schema_of(node)
    if schema is None:
        return []
    shared = [_shared_argument(node, schema, entry.alias_info) for entry in schema.returns]
    if schema.name in _MAY_COPY and isinstance(shared[0], fx.Node) and _copies(node, shared[0]):
        return [None]
    return shared


def _shared_argument(node: fx.Node, schema: torch.FunctionSchema, result: Any) -> _Shared:
    if result is None:
        return None
    for entry in schema.arguments:
        info = entry.alias_info
        if info is None:
            continue
        # a list of views of one argument, as split gives, is written (a -> *) and nameless
        if info.before_set & result.before_set or (not result.before_set and "*" in info.after_set):
            value = argument(node, entry.name)
            return value if isinstance(value, fx.Node | list | tuple) else None  # type: ignore[return-value]
    return None


def _copies(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node of `_MAY_COPY` copies: done again on what it reads, which are fake tensors."""
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False

    def value_of_input(entry: fx.Node) -> Any:
        return entry.meta.get("val")

    with detect_fake_mode([value]) or contextlib.nullcontext():
        result = node.target(  # type: ignore[operator]
            *fx.map_arg(node.args, value_of_input), **fx.map_arg(node.kwargs, value_of_input)
        )
    return storage_id(result) != storage_id(value)


def is_getitem(node: fx.Node) -> bool:
    """Whether a node takes one result of a multi-output op."""
    return node.op == "call_function" and node.target is operator.getitem


Storage = tuple[fx.Node, int]
"""The node that makes a storage, and in which of its results."""

Held = Storage | list[Any]
"""The storages that a value holds: one of a tensor, a nest of lists for a nest of tensors."""


def storage_roots(graph: fx.Graph) -> dict[fx.Node, Storage]:
    """For every node the storage that its value, or its first result, lives in.

    Linear in nodes. A multi-output op owns one storage per result, unless it is told to write
    them into buffers; a split's results live in its input's.
    """
    return {node: next(storages_in(held), (node, 0)) for node, held in held_storages(graph).items()}


def held_storages(graph: fx.Graph) -> dict[fx.Node, Held]:
    """For every node all the storages that its value keeps alive, result by result.

    Linear in nodes and their results.
    """
    held: dict[fx.Node, Held] = {}
    for node in graph.nodes:
        held[node] = _taken(node, held) if is_getitem(node) else _results(node, held)
    return held


def storages_in(held: Held) -> Iterator[Storage]:
    """The storages of a nest, in order."""
    if isinstance(held, tuple):
        yield held
    else:
        for part in held:
            yield from storages_in(part)


def _taken(node: fx.Node, held: dict[fx.Node, Held]) -> Held:
    """What a getitem takes out of a node's results."""
    source, index = node.args
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return (node, 0)
    results = held[source]
    if isinstance(results, list):
        return results[index]
    # a node without a value, of which nobody knows how many results it has
    return (source, index) if results[0] is source else results


def _results(node: fx.Node, held: dict[fx.Node, Held]) -> Held:
    """The storages of a node's results: its inputs' where it shares them, else its own."""
    own = _own(node)
    shared = _shared_inputs(node)
    if len(shared) <= 1:
        return _instead(own, shared[0] if shared else None, held)
    if not isinstance(own, list):
        own = [(node, index) for index in range(len(shared))]
    return [_instead(part, entry, held) for part, entry in zip(own, shared, strict=True)]


def _instead(own: Held, shared: _Shared, held: dict[fx.Node, Held]) -> Held:
    """`own`, or the storages of `shared` in its place."""
    if shared is None:
        return own
    if not isinstance(shared, fx.Node):  # in place on a list: one for one
        return [held[part] for part in shared]
    return held[shared]  # of a list of views as well: all of them hold this one


def _own(node: fx.Node) -> Held:
    """A storage for each result of a node. Results that are no tensor, such as a gradient that
    was not asked for, keep their place in the count."""
    place = itertools.count()

    def number(value: object) -> Held:
        if isinstance(value, (list, tuple)):
            return [number(part) for part in value]
        return (node, next(place))

    return number(node.meta.get("val"))


class LastWrites:
    """Where each storage of a graph is written in place. Linear to build."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: index for index, node in enumerate(graph.nodes)}
        self._roots = storage_roots(graph)
        self._writers: dict[tuple[fx.Node, int], list[fx.Node]] = {}
        for node in graph.nodes:
            for target in written_arguments(node):
                self._writers.setdefault(self._roots[target], []).append(node)

    def after(self, node: fx.Node, source: fx.Node) -> fx.Node | None:
        """The last node behind `node` that writes the storage of `source`, if any does."""
        return self.between(node, None, source)

    def between(self, first: fx.Node, last: fx.Node | None, source: fx.Node) -> fx.Node | None:
        """A node behind `first` and before `last` (None: the end) that writes the storage of
        `source`, the last of them, if any does. Logarithmic in the number of its writers."""
        writers = self._writers.get(self._roots[source], ())
        end = math.inf if last is None else self._position[last]
        stop = bisect.bisect_left(writers, end, key=self._position.__getitem__)
        if stop == 0 or self._position[writers[stop - 1]] <= self._position[first]:
            return None
        return writers[stop - 1]

    def is_written(self, node: fx.Node) -> bool:
        """Whether anything in the graph writes the storage of `node`."""
        return self._roots[node] in self._writers

    def written_inputs(self) -> set[fx.Node]:
        """The placeholders whose storage the graph writes."""
        return {root for root, _ in self._writers if root.op == "placeholder"}
