"""Compare the second step of a model with the first, and restore what both change in it.

A graph is one program. A model whose forward changes an attribute may run another program in the
next step, or read in it what this step computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from graph_trainer.core.graph.annotations import module_of, value_of
from graph_trainer.core.graph.ops import runs_once, subgraph_of, written_arguments
from graph_trainer.core.graph.signature import Input, InputKind, with_parts
from graph_trainer.core.graph.value_numbers import ValueNumbers
from graph_trainer.core.tensor_diff import digest
from graph_trainer.core.torch_private import FakeTensor, storage_id, tensor_dicts
from graph_trainer.errors import CaptureError

Place = tuple[int, object, torch.Size, tuple[int, ...]]
"""Storage, offset, shape and strides of a tensor."""


class ModuleAttributes:
    """A context in which a step may change the attributes of a model's modules.

    They are restored at the end, on errors too, as are the entries of dicts and lists that are
    attributes. Python state elsewhere stays as the step leaves it. Linear in attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: list[tuple[str, Any, Any]] = []
        """Names in messages, a dict or list, and a copy of it."""
        for name, module in model.named_modules():
            registered = set(map(id, tensor_dicts(module)))
            prefix = f"{name}." if name else ""
            self._before.append((prefix, vars(module), dict(vars(module))))
            for key, value in vars(module).items():
                if isinstance(value, (dict, list)) and id(value) not in registered:
                    self._before.append((f"{prefix}{key}", value, _copy(value)))

    def __enter__(self) -> ModuleAttributes:
        return self

    def __exit__(self, *error: Any) -> None:
        for _, contents, before in self._before:
            if _differing(contents, before):
                if isinstance(contents, dict):
                    # the built-in methods: a subclass may have changed its own, and an OrderedDict
                    # keeps its order itself
                    kind = OrderedDict if isinstance(contents, OrderedDict) else dict
                    kind.clear(contents)
                    for key, value in before.items():
                        kind.__setitem__(contents, key, value)
                else:
                    list.__setitem__(contents, slice(None), before)

    def changes(self) -> list[str]:
        """Return the names of attributes and entries that differ by now, sorted."""
        return sorted(
            f"{name}[{key!r}]" if name and not name.endswith(".") else f"{name}{key}"
            for name, contents, before in self._before
            for key in _differing(contents, before)
        )


def _copy(contents: dict[Any, Any] | list[Any]) -> dict[Any, Any] | list[Any]:
    if isinstance(contents, dict):
        return dict(dict.items(contents))  # dict() calls methods of a subclass
    return list(list.__iter__(contents))


def _differing(contents: Any, before: Any) -> list[Any]:
    """List the keys or places whose entries are other objects than before."""
    now = _copy(contents)
    if isinstance(now, list):
        now, before = dict(enumerate(now)), dict(enumerate(before))
    missing = object()
    return [
        key
        for key in now.keys() | before.keys()
        if now.get(key, missing) is not before.get(key, missing)
    ]


def check_second_step(
    first: fx.GraphModule, second: fx.GraphModule, inputs: Sequence[Input], changed: Iterable[str]
) -> None:
    """Refuse a model whose second step is another program. Linear in nodes.

    Only what reaches an output, an input that is written or a random number counts. A table that
    the first step made and the model keeps is the same in every step, if it was made from
    constants and from buffers that no step writes.

    Args:
        first: the graph of a step.
        second: the graph of the same step, traced with the attributes that the first one left.
        inputs: what the placeholders of both are.
        changed: the attributes that the first step changed, for the message.

    Raises:
        CaptureError: with the attributes and the first op that differs.
    """
    # The idea: number the values of both graphs, and compare what they leave behind. Tensors of
    # the first step that the second one finds in attributes keep their numbers, if every step
    # would make equal ones. The first node of the second graph with a number of its own differs.
    steps = _Steps()
    before = steps.number(first)
    steps.keep(first, inputs)
    if steps.number(second) == before:
        return
    known = {steps.numbers[node] for node in first.graph.nodes}
    computed = (node for node in second.graph.nodes if node.op != "get_attr")
    node = next((n for n in computed if steps.numbers[n] not in known), second.graph.output_node())
    kept = ", ".join(f"'{name}'" for name in sorted(changed)[:8])
    module = module_of(node)
    where = f"module '{module}'" if module else "the model"
    for source in node.all_input_nodes:
        constant = _constant(second, source)
        if isinstance(constant, FakeTensor):
            raise CaptureError(
                f"{where} reads a tensor of {tuple(constant.shape)} that the step before computed "
                f"and kept in an attribute ({kept}): make it a buffer if each step changes it, or "
                "compute it before capture if it is a table"
            )
    why = (
        f"because forward changes {kept}"
        if kept
        else "because of something that forward keeps and capture does not see, a counter or a "
        "random generator for example"
    )
    raise CaptureError(
        f"{where} computes something else in the second step (op {node.target}), {why}: a captured "
        "step is one program. Let the model do the same in every step, or make what changes a "
        "buffer or an argument"
    )


class _Steps:
    """The values of two steps in a row, numbered together."""

    def __init__(self) -> None:
        self.numbers = ValueNumbers()
        self._last_write: dict[int, int] = {}
        """By storage, the number of the last write."""
        self._kept: dict[Place, fx.Node] = {}
        """The nodes of the first step whose tensors are the same in every step."""

    def number(self, module: fx.GraphModule) -> object:
        """Number the values of a step; return the numbers of all that it leaves behind."""
        numbers = self.numbers
        storage: dict[fx.Node, int] = {}
        draws: list[int] = []

        def as_written(node: fx.Node) -> str:
            return f"{numbers[node]} as written by {self._last_write.get(storage.get(node, -1))}"

        for place, node in enumerate(module.graph.nodes):
            constant = _constant(module, node)
            value = value_of(node) if constant is None else constant
            if isinstance(value, torch.Tensor):
                storage[node] = storage_id(value)
            if isinstance(constant, FakeTensor):
                # only a step on fake tensors has made it: the one before
                if (maker := self._kept.get(place_of(constant))) is not None:
                    numbers.number_alike(node, maker)
                else:
                    numbers.number_alone(node)
                continue
            if node.op == "placeholder":
                numbers.number(node, f"input {place}")
            elif node.op == "get_attr" and (graph := subgraph_of(node)) is not None:
                numbers.number(node, str(graph.code))
            elif node.op == "get_attr" and constant is not None and not constant.is_meta:
                # by its bits: a number that forward makes a tensor of is a new tensor in each trace
                numbers.number(node, f"constant {digest(constant)}")
            elif node.op == "get_attr":
                numbers.number(node, f"constant without data {storage.get(node)}")
            elif runs_once(node):
                numbers.number(node, f"{numbers.call(node, as_written)} draw {len(draws)}")
                draws.append(numbers[node])
            else:
                numbers.number(node, numbers.call(node, as_written))
            for target in written_arguments(node):
                self._last_write[storage[target]] = numbers[node]
        inputs = module.graph.find_nodes(op="placeholder")
        written = [self._last_write.get(storage[node]) for node in inputs]
        return numbers[module.graph.output_node()], written, draws

    def keep(self, module: fx.GraphModule, inputs: Sequence[Input]) -> None:
        """Remember which tensors of a first step are the same in every step.

        These follow from constants and from buffers that no step writes, without a random draw.
        """
        placeholders = module.graph.find_nodes(op="placeholder")
        values = {n: value_of(n) for n in module.graph.nodes}
        storage = {n: storage_id(v) for n, v in values.items() if isinstance(v, torch.Tensor)}
        varying: set[fx.Node] = set()
        for spec, nodes in with_parts(inputs, placeholders):
            is_written = any(storage[node] in self._last_write for node in nodes)
            if spec.kind is not InputKind.BUFFER or is_written:
                varying.update(nodes)
        changing = {storage[node] for node in varying}
        for node in module.graph.nodes:
            sources = node.all_input_nodes
            if (
                node in varying
                or runs_once(node)
                or not varying.isdisjoint(sources)
                or not changing.isdisjoint(storage.get(source) for source in sources)
            ):
                varying.add(node)
                touched = (node, *written_arguments(node))
                changing.update(storage[n] for n in touched if n in storage)
        # the next step finds its inputs as this one did, and the tensors that are kept as written
        for node in placeholders:
            self._last_write.pop(storage[node], None)
        for node in storage:
            if storage[node] not in changing:
                self._kept[place_of(values[node])] = node


def _constant(module: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    constant = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return constant if isinstance(constant, torch.Tensor) else None


def place_of(tensor: torch.Tensor) -> Place:
    """Return where a tensor is in memory."""
    return storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
