"""Facts about operators: writes, aliases, random numbers, effects, communication."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.annotations import inferred_value, value_of
from graph_trainer.core.graph.collective_kinds import (
    IN_PLACE_NAMESPACE,
    CollectiveKind,
    Effect,
    kind_of_op,
)
from graph_trainer.core.graph.content import once_per_graph, once_per_node, subgraph_of
from graph_trainer.core.graph.host_copies import WAIT_COPY
from graph_trainer.core.torch_private import HigherOrderOperator, has_registered_effect, storage_id

aten = torch.ops.aten

OpOverload = type(aten.add.Tensor)  # has no public name

# These write running statistics, which their schemas do not declare. An op with an argument for
# training writes where it is true; an op without one always writes.
_HIDDEN_WRITES = {
    *("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"),
    *("aten::batch_norm_update_stats", "aten::batch_norm_gather_stats"),
    "aten::batch_norm_gather_stats_with_counts",
}

# The result shares its first input's storage, which the schemas do not declare.
_HIDDEN_VIEWS = {
    *(aten._unsafe_view.default, aten.unsafe_split.Tensor, WAIT_COPY),
    *(aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default),
}

# These return a view where they can and else a copy; their schemas declare neither.
_MAY_COPY = {
    *("aten::contiguous", "aten::flatten", "aten::ravel"),
    *("aten::reshape", "aten::reshape_as", "aten::to"),
}


def schema_of(node: fx.Node) -> torch.FunctionSchema | None:
    """Return the schema of a node's op, None for anything that is not an OpOverload."""
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return node.target._schema
    return None


def argument(node: fx.Node, name: str, default: object = None) -> Any:
    """Return a node's argument by its name in the schema, passed by position or by keyword."""
    if schema_of(node) is None:
        return default
    return given_value(node.target, node.args, node.kwargs, name, default)


def given_value(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: object = None
) -> Any:
    """Return an argument of an op's call by its name in the schema, `default` if it has none."""
    if name in kwargs:
        return kwargs[name]
    position = _positions(op).get(name, len(args))
    return args[position] if position < len(args) else _defaults(op).get(name, default)


@functools.cache
def _positions(op: Any) -> dict[str, int]:
    return {entry.name: position for position, entry in enumerate(op._schema.arguments)}


@functools.cache
def _defaults(op: Any) -> dict[str, Any]:
    return {
        entry.name: entry.default_value
        for entry in op._schema.arguments
        if entry.has_default_value()
    }


def argument_nodes(value: Any) -> list[fx.Node]:
    """List every node inside one argument, in order."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    return nodes


def ancestors(node: fx.Node, belongs: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """List, in the order of the graph, the nodes that a node depends on and for which `belongs` is
    true, reached through such nodes alone. Linear in their inputs, but for the sort."""
    reached: set[fx.Node] = set()
    stack = [node]
    while stack:
        inputs = stack.pop().all_input_nodes
        new = {n for n in inputs if n not in reached and belongs(n)}
        reached |= new
        stack += new
    return sorted(reached)


def subgraphs(node: fx.Node) -> Iterator[fx.GraphModule]:
    """Yield the graphs that a higher-order op runs."""
    if node.op != "call_function" or schema_of(node) is not None:
        return
    for source in node.all_input_nodes:
        module = subgraph_of(source)
        if module is not None:
            yield module


def inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of the graphs that a higher-order op runs."""
    for module in subgraphs(node):
        yield from module.graph.nodes


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """List the inputs that a node writes in place, also those that schemas do not declare.

    A higher-order op whose subgraph writes one of the subgraph's inputs counts as writing all.
    """
    if node.op != "call_function" or not may_write(node.target):
        return []
    if schema_of(node) is None:
        if any(_writes_its_inputs(module.graph) for module in subgraphs(node)):
            return [n for n in node.all_input_nodes if n.op != "get_attr"]
        return []
    return argument_nodes(written_values(node.target, node.args, node.kwargs))


written_by_node = once_per_node(written_arguments)
"""Maps each node of a graph to its `written_arguments`. Linear in nodes."""


@functools.cache
def may_write(target: object) -> bool:
    """Return whether an op may write an argument in place, by its schema; a higher-order op may."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return isinstance(target, HigherOrderOperator)
    return bool(written_values(target, (), {})) or _namespace(schema) == IN_PLACE_NAMESPACE


def written_values(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """List the arguments (nodes, or tensors) that a call of an OpOverload writes in place, also
    those that its schema does not declare."""
    schema = op._schema
    if _namespace(schema) == IN_PLACE_NAMESPACE:
        return [*args, *kwargs.values()]
    names = []
    for entry in schema.arguments:
        if entry.alias_info is not None and entry.alias_info.is_write:
            names.append(entry.name)
    kind = kind_of_op(schema.name)
    if kind is not None:
        names += kind.written
    if schema.name in _HIDDEN_WRITES:
        # the argument is named `train` or `training`; ops that have neither always write
        train = given_value(op, args, kwargs, "train", default=True)
        training = given_value(op, args, kwargs, "training", default=train)
        if training:
            names += ["running_mean", "running_var"]
    return [given_value(op, args, kwargs, name) for name in names]


def _writes_its_inputs(graph: fx.Graph) -> bool:
    roots = storage_roots(graph)
    written = (target for node in graph.nodes for target in written_arguments(node))
    return any(roots[target][0].op == "placeholder" for target in written)


def _namespace(schema: torch.FunctionSchema) -> str:
    return schema.name.split("::")[0]


def collective_kind(node: fx.Node) -> CollectiveKind | None:
    """Return the row of `collective_kinds` for a node's op, None for an op without communication.

    An unknown op in a namespace of collectives has the row `UNKNOWN`.
    """
    return _kind_of(node.target) if node.op == "call_function" else None


collective_kinds = once_per_node(collective_kind)
"""Maps each node of a graph to its `collective_kind`. Linear in nodes."""


@functools.cache
def _kind_of(target: Any) -> CollectiveKind | None:
    return kind_of_op(target._schema.name) if isinstance(target, OpOverload) else None


def plain_kind(node: fx.Node) -> CollectiveKind | None:
    """Return `collective_kind` for a collective of one tensor that returns a new tensor.

    None for the variants that write into a buffer or take several tensors, and for ops without
    a row.
    """
    kind = collective_kind(node)
    return kind if kind is not None and collective_name(node) in kind.ops[:1] else None


def is_collective(node: fx.Node) -> bool:
    """Return whether a node starts communication between ranks."""
    kind = collective_kind(node)
    return kind is not None and kind.effect is Effect.STARTS


def is_wait(node: fx.Node) -> bool:
    """Return whether a node waits for a collective; its result is its input, finished."""
    kind = collective_kind(node)
    return kind is not None and kind.effect is Effect.WAITS


def collective_name(node: fx.Node) -> str:
    """Return the name of a collective without its namespace: all_gather_into_tensor, all_reduce."""
    schema = schema_of(node)
    assert schema is not None
    return schema.name.split("::")[1]


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an op draws random numbers.

    Attention ops have torch's nondeterministic_seeded tag whatever their dropout; here the dropout
    probability decides. (Other ops draw even at a probability of zero.) cuDNN's backward has the
    tag too, and takes the seed that forward drew.
    """
    return (
        torch.Tag.nondeterministic_seeded in op.tags
        and given_value(op, args, kwargs, "philox_seed") is None
        and given_value(op, args, kwargs, "train", default=True) is not False
        and given_value(op, args, kwargs, "dropout_p", default=1.0) != 0.0
    )


def is_random(node: fx.Node) -> bool:
    """Return whether running a node again gives another result or advances the random generator.

    A higher-order op is random if a node of its subgraphs is.
    """
    if node.op != "call_function":
        return False
    if schema_of(node) is None:
        return any(is_random(inner) for inner in inner_nodes(node))
    return draws(node.target, node.args, node.kwargs)


def runs_once(node: fx.Node) -> bool:
    """Return whether a node must run exactly as often as the model runs it, in the model's order.

    Such a node is random, an assertion (which returns nothing, or a token for the next assertion),
    or an op with an effect registered in torch, as a custom op with an ordered effect. A collective
    is not such a node: passes may repeat a gather. A higher-order op runs once if a node inside
    does.
    """
    if node.op != "call_function" or collective_kind(node) is not None:
        return False
    if is_random(node) or has_registered_effect(node.target):
        return True
    schema = schema_of(node)
    if schema is None:
        return any(runs_once(inner) for inner in inner_nodes(node))
    return not schema.returns or schema.name.startswith("aten::_functional_assert")


once_nodes = once_per_node(runs_once)
"""Maps every node of a graph to whether it runs exactly once, as `runs_once`. Linear in nodes."""


def has_effect(node: fx.Node) -> bool:
    """Return whether a node must run even if nothing reads its result."""
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
        # another node may read the collective's result, or the buffer that the collective writes,
        # and rely on this wait having run before it; its size can be read without a wait
        (source,) = node.all_input_nodes
        others = (n for n in source.users if n is not node)
        read_after_wait = any(not isinstance(value_of(n), torch.SymInt) for n in others)
        return not is_collective(source) or read_after_wait or has_effect(source)
    return bool(written_arguments(node)) or runs_once(node)


def aliased_input(node: fx.Node) -> fx.Node | None:
    """Return the input whose storage a node's (first) result shares, None for a new storage.

    Known from the schema for views, in-place ops and `out=` variants, from their contract for
    waits, and by running the op on fake tensors for `reshape` and others that may copy.
    """
    shared = _shared_inputs(node)
    return shared[0] if shared and isinstance(shared[0], fx.Node) else None


_Shared = fx.Node | Sequence[fx.Node] | None
"""The input whose storage a result shares; for a list that is written in place, its elements."""


def _shared_inputs(node: fx.Node) -> list[_Shared]:
    """List, for each result in the schema of a node's op, the input whose storage it shares."""
    names = _shared_names(node.target) if node.op == "call_function" else []
    shared: list[_Shared] = []
    for name in names:
        value = None if name is None else argument(node, name)
        shared.append(value if isinstance(value, (fx.Node, list, tuple)) else None)
    if len(shared) == 1 and isinstance(shared[0], fx.Node):
        schema = schema_of(node)
        if schema is not None and schema.name in _MAY_COPY:
            # run the op on the fake tensors of its inputs to see whether it copies
            source = value_of(shared[0])
            if isinstance(source, torch.Tensor):
                copies = storage_id(inferred_value(node)) != storage_id(source)
                return [None] if copies else shared
    return shared


@functools.cache
def _shared_names(target: Any) -> list[str | None]:
    """List, for each result in an op's schema, the argument whose storage it shares."""
    if not isinstance(target, OpOverload):
        return []
    kind = _kind_of(target)
    if target in _HIDDEN_VIEWS or (kind is not None and kind.effect is Effect.WAITS):
        return [target._schema.arguments[0].name]
    return [_shared_name(target._schema, entry.alias_info) for entry in target._schema.returns]


def _shared_name(schema: torch.FunctionSchema, result: Any) -> str | None:
    """Return the argument that a result with some alias information shares storage with."""
    if result is None:
        return None
    for entry in schema.arguments:
        info = entry.alias_info
        if info is None:
            continue
        # a list of views of one argument, as split returns, is written (a -> *)
        views_in_list = not result.before_set and "*" in info.after_set
        if info.before_set & result.before_set or views_in_list:
            return str(entry.name)
    return None


_shared_by_node = once_per_node(_shared_inputs)


def is_getitem(node: fx.Node) -> bool:
    """Return whether a node takes one result of a multi-output op."""
    return node.op == "call_function" and node.target is operator.getitem


def getitems_of(node: fx.Node) -> list[fx.Node]:
    """List the nodes that take a node's results out of their tuple, also out of nested tuples."""
    getitems: list[fx.Node] = []
    for user in node.users:
        if is_getitem(user) and user.args[0] is node:
            getitems += [user, *getitems_of(user)]
    return getitems


Storage = tuple[fx.Node, int]
"""The node that allocates a storage, and the index of the result that lives in it."""

ValueStorages = Storage | list[Any]
"""The storages of a value: one for a tensor, nested lists for nested tuples of tensors."""


@once_per_graph
def storage_roots(graph: fx.Graph) -> Mapping[fx.Node, Storage]:
    """Map every node to the storage of its value, or of its first result.

    Linear in nodes. A multi-output op allocates one storage for each result, unless it writes
    them into buffers among its arguments; the results of a split share their input's.
    """
    roots: dict[fx.Node, Storage] = {}
    for node, storages in value_storages(graph).items():
        if isinstance(storages, tuple):
            roots[node] = storages
        else:  # an empty list has no storage, and counts as one that is new
            roots[node] = next(storages_in(storages), (node, 0))
    return roots


@once_per_graph
def value_storages(graph: fx.Graph) -> Mapping[fx.Node, ValueStorages]:
    """Map every node to the storages that its value keeps alive, result by result.

    Linear in nodes and their results.
    """
    known: dict[fx.Node, ValueStorages] = {}
    shared_by_node = _shared_by_node(graph)

    def of_input(source: fx.Node | Sequence[fx.Node]) -> ValueStorages:
        # a list is written in place: each result is one of its elements
        return known[source] if isinstance(source, fx.Node) else [known[part] for part in source]

    def of_getitem(node: fx.Node) -> ValueStorages:
        source, index = node.args
        if not isinstance(source, fx.Node) or not isinstance(index, int):
            return (node, 0)
        results = known[source]
        if isinstance(results, list):
            return results[index]
        # `source` has no value at capture, so its number of results is unknown
        return (source, index) if results[0] is source else results

    for node in graph.nodes:
        if is_getitem(node):
            known[node] = of_getitem(node)
            continue
        # a result has the storage of the input that it shares, or a new one
        shared = shared_by_node[node]
        if not shared:
            known[node] = _new_storages(node)
        elif len(shared) == 1:
            known[node] = _new_storages(node) if shared[0] is None else of_input(shared[0])
        else:
            new = _new_storages(node)
            if not isinstance(new, list):  # no value at capture: the schema has the results
                new = [(node, index) for index in range(len(shared))]
            results: list[ValueStorages] = []
            for part, source in zip(new, shared, strict=True):
                results.append(part if source is None else of_input(source))
            known[node] = results
    return known


def storages_in(storages: ValueStorages) -> Iterator[Storage]:
    """Yield the storages of a value, in order."""
    if isinstance(storages, tuple):
        yield storages
    else:
        for part in storages:
            yield from storages_in(part)


def _new_storages(node: fx.Node) -> ValueStorages:
    """Return a new storage for each result of a node.

    Results that are not tensors, such as gradients that are not needed, get one too.
    """
    result = value_of(node)
    if not isinstance(result, (list, tuple)):  # most nodes: leave before the closure, which is slow
        return (node, 0)
    index = itertools.count()

    def new_storages(value: object) -> ValueStorages:
        if isinstance(value, (list, tuple)):
            return [new_storages(part) for part in value]
        return (node, next(index))

    return new_storages(result)


def erase_unused(graph: fx.Graph, among: set[fx.Node] | None = None) -> None:
    """Erase every node that has neither readers nor an effect. Linear: one walk from the end.

    Args:
        among: erase only these nodes, and inputs that no other node reads.
    """
    for node in reversed(list(graph.nodes)):
        if node.users or has_effect(node) or (among is not None and node not in among):
            continue
        if among is not None:
            among.update(node.all_input_nodes)
        graph.erase_node(node)
