"""JointGraph: one step as one flat FX graph, with its signature.

A JointGraph owns a GraphModule whose placeholders are plain tensors (every tensor subclass,
DTensor for one, is unwrapped) and whose output is a flat tuple. Its Signature says what each
of them means; `JointGraph.validate` checks the graph against it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from graph_trainer.core.graph.annotations import Phase, input_name, phase_of, tensors_of
from graph_trainer.core.graph.captured_call import CapturedCall
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.graph.returned import ModelOutputs
from graph_trainer.core.graph.signature import Input, InputKind, OutputKind, Signature, with_parts
from graph_trainer.core.torch_private import inputs_of
from graph_trainer.core.torch_private_groups import group_ranks
from graph_trainer.errors import CaptureError, VerificationError


@dataclass(slots=True)
class JointGraph:
    """Forward, loss and (unless the signature says otherwise) backward as one flat graph."""

    graph_module: fx.GraphModule
    """Its placeholders are plain tensors and its output is a flat tuple of tensors."""
    signature: Signature
    """What each placeholder and output means."""
    call: CapturedCall | None = None
    """What later calls are compared with; None for a graph by hand."""
    model_type: str = ""
    """Name of the module's class, for messages."""
    model: weakref.ref[nn.Module] | None = None
    """The captured model; None where it is not known."""
    history: list[str] = field(default_factory=list)
    """Names of the passes that ran on this graph, in order."""
    decisions: dict[str, Any] = field(default_factory=dict)
    """By pass name, what a pass that decides by simulation decided on this graph, so that it
    decides the same on another graph of the same step."""
    remarks: list[str] = field(default_factory=list)
    """What the running pass reports of its work, the summary first."""
    outputs: ModelOutputs | None = None
    """To rebuild what the model returned; None for a graph with a loss."""
    groups: dict[str, Ranks] = field(default_factory=dict)
    """The ranks of the process groups that were looked up: the groups may be gone by now."""

    @property
    def captured_call(self) -> CapturedCall:
        """`call` of a graph that was captured.

        Raises:
            CaptureError: the graph was made by hand, without a call to compare later ones with.
        """
        if self.call is None:
            raise CaptureError("a graph that was made by hand takes no batch: capture a step")
        return self.call

    @property
    def graph(self) -> fx.Graph:
        """The FX graph itself."""
        return self.graph_module.graph

    def placeholders(self) -> list[fx.Node]:
        """List the placeholder nodes, in signature order."""
        return self.graph.find_nodes(op="placeholder")

    def output_node(self) -> fx.Node:
        """Return the one output node."""
        return self.graph.output_node()

    def output_values(self) -> tuple[Any, ...]:
        """List the values that the graph returns, flat and in signature order."""
        values = self.output_node().args[0]
        return tuple(values) if isinstance(values, (tuple, list)) else (values,)

    def inputs_of(self, kind: InputKind) -> Iterator[tuple[Input, tuple[fx.Node, ...]]]:
        """Yield every input of one kind with its placeholders."""
        for spec, nodes in with_parts(self.signature.inputs, self.placeholders()):
            if spec.kind is kind:
                yield spec, nodes

    def ranks_of(self, group: str) -> Ranks:
        """Return the global ranks of a process group that the graph names."""
        if group not in self.groups:
            self.groups[group] = group_ranks(group)
        return self.groups[group]

    def gradients(self) -> Iterator[tuple[str, fx.Node]]:
        """Yield every gradient output: the parameter's FQN and the node that is returned."""
        for spec, nodes in with_parts(self.signature.outputs, self.output_values()):
            if spec.kind is OutputKind.GRADIENT:
                for node in nodes:
                    yield spec.name, node

    def validate(self) -> None:
        """Check the graph against its signature, its order and its annotations. Linear in nodes.

        Raises:
            VerificationError: with the name of the node or the FQN that is wrong.
        """
        if next(iter(reversed(self.graph.nodes))).op != "output":
            raise VerificationError(
                "the graph does not end with its output node; keep it, as the last node"
            )
        # the order of nodes: placeholders, then every node after what it reads
        seen: set[fx.Node] = set()
        body_started = False
        for node in self.graph.nodes:
            if node.op == "placeholder" and body_started:
                raise VerificationError(
                    f"placeholder '{node.name}' comes after a node of the graph's body; "
                    "every placeholder comes first"
                )
            body_started = body_started or node.op not in ("placeholder", "get_attr")
            for argument in inputs_of(node):
                if argument not in seen:
                    raise VerificationError(
                        f"node '{node.name}' reads '{argument.name}', which comes after it or is "
                        "not in this graph"
                    )
            seen.add(node)
        # the placeholders are those of the signature
        placeholders = self.placeholders()
        expected = sum(spec.layout.num_tensors for spec in self.signature.inputs)
        if len(placeholders) != expected:
            raise VerificationError(
                f"the graph has {len(placeholders)} placeholders and its signature describes "
                f"{expected}; a pass that adds or removes an input must change both"
            )
        for spec, nodes in with_parts(self.signature.inputs, placeholders):
            for node in nodes:
                if (name := input_name(node)) is not None and name != spec.name:
                    raise VerificationError(
                        f"placeholder '{node.name}' is of '{name}' where the signature has "
                        f"'{spec.name}': the order of the two differs"
                    )
        # the values that it returns are those of the signature
        signature, values = self.signature, self.output_values()
        nested = [v for v in values if not isinstance(v, fx.Node)]
        if nested:
            raise VerificationError(
                f"the graph's output has {nested[0]!r} where the flat signature needs a node; "
                "outputs are one flat tuple"
            )
        expected = sum(spec.layout.num_tensors for spec in signature.outputs)
        if len(values) != expected:
            raise VerificationError(
                f"the graph returns {len(values)} values and its signature describes {expected}"
            )
        returned = {o.name for o in signature.outputs if o.kind is OutputKind.GRADIENT}
        accounted = returned | set(signature.parameters_without_grad)
        if not signature.backward and accounted:
            raise VerificationError(
                f"the signature has a gradient for '{min(accounted)}', or says that it has none, "
                "and the graph was captured without backward; its one output is the loss"
            )
        parameters = {}
        for spec, nodes in self.inputs_of(InputKind.PARAMETER):
            parameters[spec.name] = nodes
            if signature.backward and spec.requires_grad and spec.name not in accounted:
                raise VerificationError(
                    f"the graph returns no gradient for parameter '{spec.name}'"
                )
        # a backward half takes only the parameters that it reads
        half = all(output.kind.is_gradient for output in signature.outputs)
        for output, nodes in with_parts(signature.outputs, values):
            name = output.name
            if output.kind is not OutputKind.GRADIENT or (half and name not in parameters):
                continue
            if name not in parameters:
                raise VerificationError(
                    f"the signature has a gradient for '{name}', which is not a parameter of "
                    "the graph"
                )
            # the gradient of another parameter mostly differs in shape or dtype
            gradient, wanted = _describe(nodes), _describe(parameters[name])
            if gradient != wanted:
                raise VerificationError(
                    f"output '{nodes[0].name}' is returned as the gradient of '{name}': it is "
                    f"{gradient} and the parameter is {wanted}"
                )
        self.check_phases()

    def check_phases(self) -> None:
        """Check that every node has a phase that the graph may have.

        Raises:
            VerificationError: with the name of the node.
        """
        for node in compute_nodes(self.graph):
            phase = phase_of(node)
            if phase is None:
                raise VerificationError(
                    f"node '{node.name}' ({node.target}) has no phase; a pass that inserts a "
                    "node must annotate it, with copy_annotations(source, node) for example"
                )
            if phase is Phase.BACKWARD and not self.signature.backward:
                raise VerificationError(
                    f"node '{node.name}' ({node.target}) is marked as backward's in a graph that "
                    "was captured without backward; give it the phase of what it reads"
                )

    def __str__(self) -> str:
        return self.graph_module.print_readable(print_output=False, include_stride=False)


def compute_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield every node that runs something: not placeholders, attributes or the output."""
    return (n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output"))


def _describe(nodes: Iterable[fx.Node]) -> str:
    tensors = [t for node in nodes for t in tensors_of(node)]
    return ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors) or "no tensor"
