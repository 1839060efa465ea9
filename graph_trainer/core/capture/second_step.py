"""Compare the second step of a model that changes its own attributes with the first.

A graph is one program. A model whose forward changes an attribute may run another program in the
next step, or read in it what this step computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from graph_trainer.core.graph.annotations import module_of, value_of
from graph_trainer.core.graph.ops import runs_once, subgraph_of, written_arguments
from graph_trainer.core.graph.signature import Input, InputKind, with_parts
from graph_trainer.core.tensor_diff import digest
from graph_trainer.core.torch_private import FakeTensor, storage_id
from graph_trainer.errors import CaptureError

_UNKNOWN = -1

Place = tuple[int, object, torch.Size, tuple[int, ...]]
"""Storage, offset, shape and strides of a tensor."""


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
    numbers = _Numbers(inputs)
    before, results = numbers.of(first)
    numbers.keep(first, before)
    after, results_after = numbers.of(second)
    if results == results_after:
        return
    known = set(before.values())
    differing = (n for n, number in after.items() if n.op != "get_attr" and number not in known)
    node = next(differing, second.graph.output_node())
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


class _Numbers:
    """Numbers for what nodes compute: equal exactly for equal computations, in both graphs."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = inputs
        self._numbers: dict[str, int] = {}
        self._written: dict[int, int] = {}
        """By storage, the number of the last write."""
        self._kept: dict[Place, int] = {}

    def of(self, module: fx.GraphModule) -> tuple[dict[fx.Node, int], object]:
        """Return the number of every node, and of all that the graph leaves behind."""
        numbers: dict[fx.Node, int] = {}
        storage: dict[fx.Node, int] = {}
        draws: list[int] = []

        def described(node: fx.Node) -> str:
            return f"{numbers[node]} as written by {self._written.get(storage.get(node, _UNKNOWN))}"

        for node in module.graph.nodes:
            constant = _constant(module, node)
            value = value_of(node) if constant is None else constant
            if isinstance(value, torch.Tensor):
                storage[node] = storage_id(value)
            if isinstance(constant, FakeTensor):
                numbers[node] = self._kept.get(_place(constant), _UNKNOWN)
                continue
            args = fx.map_arg((node.args, node.kwargs), described)
            what = node.target if node.op == "call_function" else len(numbers)
            text = f"{node.op} {what} {args!r}"
            if node.op == "get_attr":
                graph = subgraph_of(node)
                text = str(graph.code) if graph is not None else _content(constant)
            elif node.op == "output":
                text = f"output {args!r}"
            elif runs_once(node):
                text += f" draw {len(draws)}"
            numbers[node] = self._numbers.setdefault(text, len(self._numbers))
            if runs_once(node):
                draws.append(numbers[node])
            for target in written_arguments(node):
                self._written[storage[target]] = numbers[node]
        inputs = module.graph.find_nodes(op="placeholder")
        written = [self._written.get(storage[node]) for node in inputs]
        return numbers, (numbers[module.graph.output_node()], written, draws)

    def keep(self, module: fx.GraphModule, numbers: dict[fx.Node, int]) -> None:
        """Remember which tensors of a first step are the same in every step."""
        varying: set[fx.Node] = set()
        for spec, nodes in with_parts(self._inputs, module.graph.find_nodes(op="placeholder")):
            written = {storage_id(n.meta["val"]) for n in nodes} & self._written.keys()
            if spec.kind is not InputKind.BUFFER or written:
                varying.update(nodes)
        tensors = {n: v for n in numbers if isinstance(v := value_of(n), torch.Tensor)}
        storage = {node: storage_id(tensor) for node, tensor in tensors.items()}
        changing = {storage[node] for node in varying}
        for node in module.graph.nodes:
            read = {storage.get(each) for each in node.all_input_nodes}
            if (
                node in varying
                or runs_once(node)
                or not varying.isdisjoint(node.all_input_nodes)
                or not changing.isdisjoint(read)
            ):
                varying.add(node)
                changing.update(
                    storage[n] for n in (node, *written_arguments(node)) if n in storage
                )
        for node in module.graph.find_nodes(op="placeholder"):
            self._written.pop(storage_id(value_of(node)), None)
        for node, tensor in tensors.items():
            if storage_id(tensor) not in changing:
                self._kept[_place(tensor)] = numbers[node]


def _constant(module: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    constant = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return constant if isinstance(constant, torch.Tensor) else None


def _content(constant: torch.Tensor | None) -> str:
    """Describe a constant by its bits: a number that forward makes a tensor of is another each
    time. A tensor without data is described by its storage."""
    if constant is None or constant.is_meta:
        return f"constant {None if constant is None else storage_id(constant)}"
    return f"constant {digest(constant)}"


def _place(tensor: torch.Tensor) -> Place:
    return storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
