"""JointGraph: one step as one flat FX graph, with its signature.

A JointGraph owns a GraphModule whose placeholders are plain tensors (every tensor subclass,
DTensor for one, is unwrapped) and whose output is a flat tuple. Its Signature says what each
of them means; `JointGraph.validate` checks the graph against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from graph_trainer.core.capture.subclasses import Layout
from graph_trainer.core.graph.annotations import input_name, is_backward, phase_of, tensors_of
from graph_trainer.errors import VerificationError


class InputKind(StrEnum):
    """What a placeholder holds."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"


class OutputKind(StrEnum):
    """What an output of the graph is."""

    LOSS = "loss"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that the step takes: `layout.num_tensors` placeholders in a row."""

    kind: InputKind
    name: str
    """FQN of the parameter or buffer; the path in (args, kwargs) of a batch value."""
    layout: Layout
    requires_grad: bool = False
    aliases: tuple[str, ...] = ()
    """Other FQNs of a tied parameter."""
    mutated: bool = False
    """Whether running the graph changes this tensor in place, as batch norm's statistics."""


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that the step returns: `layout.num_tensors` values in a row."""

    kind: OutputKind
    name: str
    """FQN of the parameter for a gradient; "loss" for the loss."""
    layout: Layout


@dataclass(frozen=True, slots=True)
class Signature:
    """What the placeholders and outputs of a joint graph mean, in order."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    parameters_without_grad: tuple[str, ...] = ()
    """Parameters that require a gradient and that the loss does not reach; none where there is
    no backward, which alone would tell."""
    backward: bool = True
    """Whether the graph computes gradients; if not, the loss is its only output."""

    def num_placeholders(self) -> int:
        """How many placeholders the graph must have."""
        return sum(i.layout.num_tensors for i in self.inputs)

    def num_outputs(self) -> int:
        """How many values the graph's output tuple must have."""
        return sum(o.layout.num_tensors for o in self.outputs)


@dataclass(slots=True)
class JointGraph:
    """Forward, loss and (unless the signature says otherwise) backward as one flat graph.

    Arguments:
        graph_module: placeholders are plain tensors, the output a flat tuple of tensors.
        signature: what each placeholder and output means.
        batch: the captured (args, kwargs), to check later calls against.
        model_type: name of the module's class, for messages.
    """

    graph_module: fx.GraphModule
    signature: Signature
    batch: Any = None
    model_type: str = ""
    training: tuple[bool, ...] = ()
    """`training` of every module at capture, in the order of `modules()`; empty: not known."""
    history: list[str] = field(default_factory=list)
    """Names of the passes that ran on this graph, in order."""
    decisions: dict[str, Any] = field(default_factory=dict)
    """Options by pass name with which passes that decide by simulation decide on another graph
    of the same step as they did on this one."""
    remarks: list[str] = field(default_factory=list)
    """What the pass that runs has to say of its work, the sum of it first."""

    @property
    def graph(self) -> fx.Graph:
        """The FX graph itself."""
        return self.graph_module.graph

    def placeholders(self) -> list[fx.Node]:
        """The placeholder nodes, in signature order."""
        return self.graph.find_nodes(op="placeholder")

    def output_node(self) -> fx.Node:
        """The one output node."""
        return self.graph.output_node()

    def output_values(self) -> tuple[Any, ...]:
        """The values that the graph returns, flat and in signature order."""
        values = self.output_node().args[0]
        return tuple(values) if isinstance(values, (tuple, list)) else (values,)

    def inputs_of(self, kind: InputKind) -> Iterator[tuple[Input, tuple[fx.Node, ...]]]:
        """Every input of one kind with its placeholders."""
        for spec, nodes in _in_slices(self.signature.inputs, self.placeholders()):
            if spec.kind is kind:
                yield spec, nodes

    def gradients(self) -> Iterator[tuple[str, fx.Node]]:
        """Every gradient output: the parameter's FQN and the node that is returned."""
        for spec, nodes in _in_slices(self.signature.outputs, list(self.output_values())):
            if spec.kind is OutputKind.GRADIENT:
                for node in nodes:
                    yield spec.name, node

    def validate(self) -> None:
        """Check the graph against its signature, its order and its annotations.

        Linear in nodes.

        Raises:
            VerificationError: with the name of the node or the FQN that is wrong.
        """
        _check_order(self.graph)
        _check_inputs(self)
        _check_outputs(self)
        for node in compute_nodes(self.graph):
            if phase_of(node) is None:
                raise VerificationError(
                    f"node '{node.name}' ({node.target}) has no phase; a pass that inserts a "
                    "node must annotate it, with copy_annotations(source, node) for example"
                )
            if is_backward(node) and not self.signature.backward:
                raise VerificationError(
                    f"node '{node.name}' ({node.target}) is marked as backward's in a graph that "
                    "was captured without backward; give it the phase of what it reads"
                )

    def __str__(self) -> str:
        return self.graph_module.print_readable(print_output=False, include_stride=False)


def _in_slices(specs: Iterable[Any], values: list[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    start = 0
    for spec in specs:
        stop = start + spec.layout.num_tensors
        yield spec, tuple(values[start:stop])
        start = stop


def _check_order(graph: fx.Graph) -> None:
    seen: set[fx.Node] = set()
    body_started = False
    for node in graph.nodes:
        if node.op == "placeholder":
            if body_started:
                raise VerificationError(
                    f"placeholder '{node.name}' stands after a node of the graph's body; "
                    "every placeholder comes first"
                )
        elif node.op != "get_attr":
            body_started = True
        for argument in node.all_input_nodes:
            if argument not in seen:
                raise VerificationError(
                    f"node '{node.name}' reads '{argument.name}', which stands after it or is "
                    "not in this graph"
                )
        seen.add(node)


def _check_inputs(joint: JointGraph) -> None:
    placeholders = joint.placeholders()
    expected = joint.signature.num_placeholders()
    if len(placeholders) != expected:
        raise VerificationError(
            f"the graph has {len(placeholders)} placeholders and its signature describes "
            f"{expected}; a pass that adds or removes an input must change both"
        )
    for spec, nodes in _in_slices(joint.signature.inputs, placeholders):
        for node in nodes:
            if (found := input_name(node)) is not None and found != spec.name:
                raise VerificationError(
                    f"placeholder '{node.name}' holds '{found}' where the signature has "
                    f"'{spec.name}': the order of the two differs"
                )


def _check_outputs(joint: JointGraph) -> None:
    values = joint.output_values()
    nested = [v for v in values if not isinstance(v, fx.Node)]
    if nested:
        raise VerificationError(
            f"the graph's output holds {nested[0]!r} where the flat signature needs a node; "
            "outputs are one flat tuple"
        )
    expected = joint.signature.num_outputs()
    if len(values) != expected:
        raise VerificationError(
            f"the graph returns {len(values)} values and its signature describes {expected}"
        )
    returned = {o.name for o in joint.signature.outputs if o.kind is OutputKind.GRADIENT}
    accounted = returned | set(joint.signature.parameters_without_grad)
    if not joint.signature.backward and accounted:
        raise VerificationError(
            f"the signature has a gradient for '{min(accounted)}', or says that it has none, and "
            "the graph was captured without backward; its one output is the loss"
        )
    for spec in joint.signature.inputs if joint.signature.backward else ():
        if spec.kind is InputKind.PARAMETER and spec.requires_grad and spec.name not in accounted:
            raise VerificationError(f"the graph returns no gradient for parameter '{spec.name}'")
    parameters = {spec.name: nodes for spec, nodes in joint.inputs_of(InputKind.PARAMETER)}
    for spec, nodes in _in_slices(joint.signature.outputs, list(values)):
        if spec.kind is OutputKind.GRADIENT:
            _check_gradient(spec.name, nodes, parameters)


def _check_gradient(
    name: str, nodes: tuple[fx.Node, ...], parameters: Mapping[str, tuple[fx.Node, ...]]
) -> None:
    """An output that is another's has, more often than not, another shape."""
    if name not in parameters:
        raise VerificationError(
            f"the signature has a gradient for '{name}', which is no parameter of the graph"
        )
    found = [(t.shape, t.dtype) for n in nodes for t in tensors_of(n)]
    wanted = [(t.shape, t.dtype) for n in parameters[name] for t in tensors_of(n)]
    if found != wanted:
        raise VerificationError(
            f"output '{nodes[0].name}' stands where the gradient of '{name}' belongs: it is "
            f"{_describe(found)} and the parameter is {_describe(wanted)}"
        )


def _describe(tensors: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in tensors) or "no tensor"


def compute_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Every node that runs something: not placeholders, attributes or the output."""
    return (n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output"))
