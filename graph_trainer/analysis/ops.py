"""What an op does besides computing: writes, aliases, random numbers, communication."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

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
_HIDDEN_VIEWS = {aten._unsafe_view.default}

_FUNCTIONAL_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
# The ops behind dist.all_reduce(tensor) and its like: they write into what they are given,
# and their schemas say nothing of it.
_IN_PLACE_COLLECTIVES = "c10d"
_NOT_COLLECTIVES = {
    "_c10d_functional::_wrap_tensor_autograd",
    "c10d::check_for_nan",
}
# Between two ranks, which run different ops: one may not be dropped without the other.
_POINT_TO_POINT = {
    "_c10d_functional::isend",
    "_c10d_functional::irecv",
    "_c10d_functional::batch_p2p_ops",
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
    if _namespace(schema) == _IN_PLACE_COLLECTIVES:
        return list(node.all_input_nodes)
    written: list[fx.Node] = []
    for position, entry in enumerate(schema.arguments):
        if entry.alias_info is None or not entry.alias_info.is_write:
            continue
        value = node.kwargs.get(
            entry.name, node.args[position] if position < len(node.args) else None
        )
        written += argument_nodes(value)
    if schema.name == "_c10d_functional::irecv":
        written += argument_nodes(argument(node, "tensor"))
    if schema.name in _HIDDEN_WRITES and argument(node, "training", argument(node, "train", True)):
        written += argument_nodes([argument(node, "running_mean"), argument(node, "running_var")])
    return written


def _writes_its_inputs(graph: fx.Graph) -> bool:
    return bool(LastWrites(graph).written_inputs())


def _namespace(schema: torch.FunctionSchema) -> str:
    return schema.name.split("::")[0]


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts communication between ranks."""
    schema = schema_of(node)
    return (
        schema is not None
        and _namespace(schema) in (*_FUNCTIONAL_COLLECTIVES, _IN_PLACE_COLLECTIVES)
        and schema.name not in _NOT_COLLECTIVES
        and not is_wait(node)
    )


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective; its result is its input, finished."""
    schema = schema_of(node)
    return schema is not None and schema.name.endswith("::wait_tensor")


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
    if schema.name in _POINT_TO_POINT or _namespace(schema) == _IN_PLACE_COLLECTIVES:
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
    """The input whose storage a node's result shares, None where it makes its own.

    Views and in-place ops by their schema; waits by their contract; `reshape` and
    `contiguous`, which view where they can, by the layout of what they read.
    """
    if is_wait(node) or node.target in _HIDDEN_VIEWS:
        return node.all_input_nodes[0]
    value = _aliased_argument(node)
    if not isinstance(value, fx.Node):
        return None
    if node.target is aten.reshape.default and not can_view(value, node.args[1]):
        return None
    if node.target is aten.contiguous.default and not _is_contiguous(value, node):
        return None
    return value


def _aliased_argument(node: fx.Node) -> object:
    """The argument, a node or a list of them, that a node's first result shares."""
    schema = schema_of(node)
    if schema is None or not schema.returns:
        return None
    result = schema.returns[0].alias_info
    if result is None:
        return None
    for position, entry in enumerate(schema.arguments):
        info = entry.alias_info
        if info is None:
            continue
        # a list of views of one argument, as split gives, is written (a -> *) and nameless
        if info.before_set & result.before_set or (not result.before_set and "*" in info.after_set):
            given = node.args[position] if position < len(node.args) else None
            return node.kwargs.get(entry.name, given)
    return None


def can_view(source: fx.Node, shape: object) -> bool:
    """Whether a node's (fake) value can be shown in another shape without a copy."""
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return True
    try:
        value.view(shape)  # type: ignore[call-overload]
    except (RuntimeError, ValueError):
        return False
    return True


def _is_contiguous(source: fx.Node, node: fx.Node) -> bool:
    value = source.meta.get("val")
    memory_format = argument(node, "memory_format") or torch.contiguous_format
    if not isinstance(memory_format, torch.memory_format):
        memory_format = torch.contiguous_format  # the schema's default is a bare number
    return not isinstance(value, torch.Tensor) or value.is_contiguous(memory_format=memory_format)


def is_getitem(node: fx.Node) -> bool:
    """Whether a node takes one result of a multi-output op."""
    return node.op == "call_function" and node.target is operator.getitem


def storage_roots(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, int]]:
    """For every node the (node, output index) that made the storage its value lives in.

    Linear in nodes. A multi-output op owns one storage per output; a split's outputs live in
    its input's.
    """
    roots: dict[fx.Node, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        if is_getitem(node):
            source, index = node.args
            shared = _aliased_argument(source)
            if isinstance(shared, (list, tuple)):  # in place on a list: one for one
                shared = shared[index]
            own = (source, index)
            roots[node] = roots[shared] if isinstance(shared, fx.Node) else own
            continue
        shared = _aliased_argument(node)
        aliased = shared[0] if isinstance(shared, (list, tuple)) and shared else aliased_input(node)
        roots[node] = roots[aliased] if aliased is not None else (node, 0)
    return roots


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
