"""Compare the second step of a model with the first, and restore the attributes that both change.

A graph is one program. A model whose forward changes an attribute may run another program in the
next step, or read a value there that this step computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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

    Restores them at the end, on errors too, with the entries of dicts and lists that are
    attributes. Other Python state stays as the step leaves it. Linear in attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._saved: list[_Saved] = []
        for name, module in model.named_modules():
            registered = set(map(id, tensor_dicts(module)))
            attributes = vars(module)
            self._saved.append(_Saved(name, "", attributes, dict(attributes)))
            for key, value in attributes.items():
                if isinstance(value, (dict, list)) and id(value) not in registered:
                    self._saved.append(_Saved(name, key, value, _copy(value)))

    def __enter__(self) -> ModuleAttributes:
        return self

    def __exit__(self, *error: Any) -> None:
        for saved in self._saved:
            if saved.changed_keys():
                saved.restore()

    def changes(self) -> list[str]:
        """Return the names of attributes and entries that the step has changed, sorted."""
        names = []
        for saved in self._saved:
            names += [saved.name_of(key) for key in saved.changed_keys()]
        return sorted(names)


class _Saved(NamedTuple):
    """The attributes of a module, or a dict or list among them, and a copy from before the step."""

    module: str
    attribute: str
    """The name of the dict or list; "" for the attributes of the module."""
    contents: Any
    copy: Any

    def name_of(self, key: Any) -> str:
        """Return the name of an entry in messages."""
        prefix = f"{self.module}." if self.module else ""
        return f"{prefix}{self.attribute}[{key!r}]" if self.attribute else f"{prefix}{key}"

    def changed_keys(self) -> list[Any]:
        """List the keys or indices at which another object is now."""
        now = _copy(self.contents)
        before = self.copy
        if isinstance(now, list):
            now = dict(enumerate(now))
            before = dict(enumerate(before))
        missing = object()
        return [
            key
            for key in now.keys() | before.keys()
            if now.get(key, missing) is not before.get(key, missing)
        ]

    def restore(self) -> None:
        """Put the entries of the copy back into the dict or list.

        With the built-in methods: a subclass may have replaced its own, and an OrderedDict keeps
        its order itself.
        """
        if isinstance(self.contents, list):
            list.__setitem__(self.contents, slice(None), self.copy)
            return
        dict_type = OrderedDict if isinstance(self.contents, OrderedDict) else dict
        dict_type.clear(self.contents)
        for key, value in self.copy.items():
            dict_type.__setitem__(self.contents, key, value)


def _copy(contents: dict[Any, Any] | list[Any]) -> dict[Any, Any] | list[Any]:
    if isinstance(contents, dict):
        return dict(dict.items(contents))  # dict() calls methods of a subclass
    return list(list.__iter__(contents))


def check_second_step(
    first: fx.GraphModule, second: fx.GraphModule, inputs: Sequence[Input], changed: Iterable[str]
) -> None:
    """Refuse a model whose second step is another program. Linear in nodes.

    Compares outputs, inputs that are written, and random numbers. A table that the first step made
    and the model keeps is the same in every step if it follows from constants and from buffers that
    no step writes.

    Args:
        first: the graph of a step.
        second: the graph of the same step, traced with the attributes that the first one left.
        inputs: the inputs of both graphs.
        changed: the attributes that the first step changed, for the message.

    Raises:
        CaptureError: with the attributes and the first op that differs.
    """
    # The idea: number the values of both graphs, and compare their outputs, writes and draws.
    # Tensors of the first step that the second one reads from attributes keep their numbers, if
    # every step would make equal ones. The first node of the second graph with a number that the
    # first graph does not have is the one that differs.
    steps = _Steps()
    before = steps.number(first)
    steps.keep(first, inputs)
    if steps.number(second) == before:
        return
    known = {steps.numbers[node] for node in first.graph.nodes}
    new = (n for n in second.graph.nodes if n.op != "get_attr" and steps.numbers[n] not in known)
    node = next(new, second.graph.output_node())
    attributes = ", ".join(f"'{name}'" for name in sorted(changed)[:8])
    module = module_of(node)
    where = f"module '{module}'" if module else "the model"
    for source in node.all_input_nodes:
        constant = _constant(second, source)
        if isinstance(constant, FakeTensor):
            raise CaptureError(
                f"{where} reads a tensor of {tuple(constant.shape)} that the step before computed "
                f"and kept in an attribute ({attributes}): make it a buffer if each step changes "
                "it, or compute it before capture if it is a table"
            )
    if attributes:
        reason = f"because forward changes {attributes}"
    else:
        reason = "because of Python state that capture does not see, such as a counter or a cache"
    raise CaptureError(
        f"{where} computes something else in the second step (op {node.target}), {reason}: a "
        "captured step is one program. Let the model do the same in every step, or make the state "
        "that changes a buffer or an argument"
    )


class _Steps:
    """The values of two consecutive steps, numbered together."""

    def __init__(self) -> None:
        self.numbers = ValueNumbers()
        self._last_write: dict[int, int] = {}
        """By storage, the number of the last write."""
        self._kept: dict[Place, fx.Node] = {}
        """The nodes of the first step whose tensors are the same in every step."""

    def number(self, module: fx.GraphModule) -> object:
        """Number the values of a step; return the numbers of its outputs, writes and draws."""
        numbers = self.numbers
        storage: dict[fx.Node, int] = {}
        draws: list[int] = []

        def argument(node: fx.Node) -> str:
            # a value changes with the last write into its memory
            last_write = self._last_write.get(storage.get(node, -1))
            return f"{numbers[node]} as written by {last_write}"

        for place, node in enumerate(module.graph.nodes):
            constant = _constant(module, node)
            value = value_of(node) if constant is None else constant
            if isinstance(value, torch.Tensor):
                storage[node] = storage_id(value)
            if node.op == "placeholder":
                numbers.number(node, f"input {place}")
            elif node.op == "get_attr":
                self._number_attribute(module, node, storage.get(node))
            elif runs_once(node):
                numbers.number(node, f"{numbers.call(node, argument)} draw {len(draws)}")
                draws.append(numbers[node])
            else:
                numbers.number(node, numbers.call(node, argument))
            for target in written_arguments(node):
                self._last_write[storage[target]] = numbers[node]
        inputs = module.graph.find_nodes(op="placeholder")
        writes = [self._last_write.get(storage[node]) for node in inputs]
        return numbers[module.graph.output_node()], writes, draws

    def _number_attribute(self, module: fx.GraphModule, node: fx.Node, storage: int | None) -> None:
        """Number a constant tensor, or the graph that a higher-order op runs."""
        constant = _constant(module, node)
        graph = subgraph_of(node)
        if isinstance(constant, FakeTensor):
            # only the step before can have made it, on fake tensors
            maker = self._kept.get(place_of(constant))
            if maker is None:
                self.numbers.number_alone(node)
            else:
                self.numbers.number_alike(node, maker)
        elif graph is not None:
            self.numbers.number(node, str(graph.code))
        elif constant is not None and not constant.is_meta:
            # by its bits: each trace makes a new tensor from a number in forward
            self.numbers.number(node, f"constant {digest(constant)}")
        else:
            self.numbers.number(node, f"constant without data {storage}")

    def keep(self, module: fx.GraphModule, inputs: Sequence[Input]) -> None:
        """Remember which tensors of a first step are the same in every step.

        These follow from constants and from buffers that no step writes, without a random draw.
        """
        placeholders = module.graph.find_nodes(op="placeholder")
        values = {n: value_of(n) for n in module.graph.nodes}
        storage = {n: storage_id(v) for n, v in values.items() if isinstance(v, torch.Tensor)}
        # the nodes whose values differ between steps, and the storages that they are in
        varying: set[fx.Node] = set()
        for spec, nodes in with_parts(inputs, placeholders):
            is_written = any(storage[node] in self._last_write for node in nodes)
            if spec.kind is not InputKind.BUFFER or is_written:
                varying.update(nodes)
        varying_storages = {storage[node] for node in varying}
        for node in module.graph.nodes:
            sources = node.all_input_nodes
            if (
                node in varying
                or runs_once(node)
                or not varying.isdisjoint(sources)
                or not varying_storages.isdisjoint(storage.get(source) for source in sources)
            ):
                varying.add(node)
                touched = (node, *written_arguments(node))
                varying_storages.update(storage[n] for n in touched if n in storage)
        # the second step begins with the inputs of the first, and with kept tensors as written
        for node in placeholders:
            self._last_write.pop(storage[node], None)
        for node in storage:
            if storage[node] not in varying_storages:
                self._kept[place_of(values[node])] = node


def _constant(module: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    """Return the constant tensor that a node reads, None for any other node."""
    constant = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return constant if isinstance(constant, torch.Tensor) else None


def place_of(tensor: torch.Tensor) -> Place:
    """Return where a tensor is in memory."""
    return storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
