"""JointGraph: one step as one flat FX graph, and the only door to its annotations.

A JointGraph owns a GraphModule whose placeholders are plain tensors (every tensor subclass,
DTensor for one, is unwrapped) and whose output is a flat tuple. Its Signature says what each
of them means; `JointGraph.validate` checks the one against the other.

Annotations live in `node.meta`. Passes and analyses use the accessors below and never the
dictionary itself:

    phase        forward, loss or backward
    module       FQN of the module whose forward made the node, or whose backward it is
    fsdp role    unshard or reduce_grad, with the FQN of the parameter
    bucket       what a collective may travel with
    own slice    the group of which each rank takes its own slice, where DTensor does
    recompute    torch's CheckpointPolicy, with an `ac_graph_id`, as PyTorch's partitioner reads
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_trainer.core.capture.subclasses import Layout
from graph_trainer.errors import VerificationError


class Phase(StrEnum):
    """The part of a train step that a node belongs to."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class Role(StrEnum):
    """What a node does for FSDP."""

    UNSHARD = "unshard"
    REDUCE_GRAD = "reduce_grad"


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


# --- annotations ---------------------------------------------------------------------------

_CUSTOM = "custom"  # torch.fx.traceback.annotate writes here, and fx keeps it across retracing
_PHASE = "phase"
_MODULE = "module"
_ROLE = "fsdp_role"
_PARAMETER = "fsdp_parameter"
_INPUT_NAME = "input_name"
_RECOMPUTE = "recompute"  # these two names are PyTorch's own
_AC_GRAPH_ID = "ac_graph_id"
_SAVED = "saved_for_backward"
_OWN_SLICE = "own_slice"
_BUCKET = "bucket"

# Far from the small numbers that user checkpointing counts up from, so that an FSDP tag
# never looks like the border between two of the user's checkpoint regions.
FSDP_AC_GRAPH_ID = 1 << 40

SEPARATOR = ", "
"""Between the FQNs of the parameters that share a bucket."""

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def annotation(
    *,
    phase: Phase | None = None,
    module: str | None = None,
    role: Role | None = None,
    parameter: str | None = None,
    own_slice: str | None = None,
) -> dict[str, str]:
    """The entry for `torch.fx.traceback.annotate` that the accessors below read back."""
    entries = {
        _PHASE: phase.value if phase else None,
        _MODULE: module,
        _ROLE: role.value if role else None,
        _PARAMETER: parameter,
        _OWN_SLICE: own_slice,
    }
    return {key: value for key, value in entries.items() if value is not None}


def annotate_node(node: fx.Node, entry: Mapping[str, str]) -> None:
    """Add the entries of `annotation(...)` to a node, in a dictionary of its own."""
    node.meta[_CUSTOM] = {**node.meta.get(_CUSTOM, {}), **entry}


def copy_annotations(source: fx.Node, target: fx.Node, *, phase: Phase | None = None) -> None:
    """Give `target` the annotations of `source`, in a dictionary of its own.

    `Graph.node_copy` shares the values of `meta`: without this, annotating a copy would
    annotate its original too. Recompute tags are decisions about one node and stay behind.
    """
    target.meta[_CUSTOM] = dict(source.meta.get(_CUSTOM, {}))
    if phase is not None:
        target.meta[_CUSTOM][_PHASE] = phase.value
    target.meta.pop(_RECOMPUTE, None)
    target.meta.pop(_AC_GRAPH_ID, None)


def _custom(node: fx.Node, key: str) -> str | None:
    return (node.meta.get(_CUSTOM) or {}).get(key)


def phase_of(node: fx.Node) -> Phase | None:
    """The phase of a node; None for placeholders, attributes and the output."""
    value = _custom(node, _PHASE)
    return None if value is None else Phase(value)


def is_backward(node: fx.Node) -> bool:
    """Whether a node belongs to backward."""
    return _custom(node, _PHASE) == Phase.BACKWARD.value


def module_of(node: fx.Node) -> str | None:
    """FQN of the module that a node belongs to, None where nothing says so."""
    return _custom(node, _MODULE)


def layer_of(fqn: str | None) -> int | None:
    """Index of the repeated block in an FQN: 3 for 'layers.3.attention.wo', else None."""
    match = _LAYER.search(fqn or "")
    return int(match.group(1)) if match else None


def role_of(node: fx.Node) -> Role | None:
    """What a node does for FSDP, if anything."""
    value = _custom(node, _ROLE)
    return None if value is None else Role(value)


def parameter_of(node: fx.Node) -> str | None:
    """FQN of the parameter that a node with an FSDP role serves; of several, joined."""
    return _custom(node, _PARAMETER)


def parameters_of(node: fx.Node) -> tuple[str, ...]:
    """FQNs of the parameters that a node with an FSDP role serves: several for a bucket."""
    joined = _custom(node, _PARAMETER)
    return () if joined is None else tuple(joined.split(SEPARATOR))


def own_slice_group(node: fx.Node) -> str | None:
    """The group of which every rank takes its own slice here, as DTensor did at capture."""
    return _custom(node, _OWN_SLICE)


def input_name(node: fx.Node) -> str | None:
    """FQN or path of the input that a placeholder holds."""
    return node.meta.get(_INPUT_NAME)


def set_input_name(node: fx.Node, name: str) -> None:
    """Write what a placeholder holds."""
    node.meta[_INPUT_NAME] = name


def owner_of(node: fx.Node) -> str:
    """FQN of the one parameter that a node serves; else of the module that it belongs to."""
    parameters = parameters_of(node)
    return parameters[0] if len(parameters) == 1 else module_of(node) or ""


def bucket_tag(node: fx.Node) -> str | None:
    """What a collective may travel with: others of the same tag. None: with nothing."""
    return _custom(node, _BUCKET)


def set_bucket_tag(node: fx.Node, tag: str) -> None:
    """Write what a collective may travel with; fx keeps it when the graph is split or traced."""
    annotate_node(node, {_BUCKET: tag})


def clear_bucket_tag(node: fx.Node) -> None:
    """Remove the tag of a collective that is decided about."""
    node.meta[_CUSTOM] = {k: v for k, v in node.meta[_CUSTOM].items() if k != _BUCKET}


def recompute_policy(node: fx.Node) -> CheckpointPolicy | None:
    """The recompute tag of a node, whoever wrote it."""
    return node.meta.get(_RECOMPUTE)


def set_recompute_policy(
    node: fx.Node, policy: CheckpointPolicy, *, ac_graph_id: int = FSDP_AC_GRAPH_ID
) -> None:
    """Tag a node. `ac_graph_id` names the checkpoint region; FSDP's tags have their own."""
    node.meta[_RECOMPUTE] = policy
    node.meta[_AC_GRAPH_ID] = ac_graph_id


def clear_recompute_policy(node: fx.Node) -> None:
    """Remove the tag of a node."""
    node.meta.pop(_RECOMPUTE, None)
    node.meta.pop(_AC_GRAPH_ID, None)


def is_saved_for_backward(node: fx.Node) -> bool:
    """Whether autograd or a checkpoint saved what a node made, read in backward or not."""
    return bool(node.meta.get(_SAVED))


def set_saved_for_backward(node: fx.Node) -> None:
    """Write that autograd or a checkpoint saved what a node made."""
    node.meta[_SAVED] = True


def value_of(node: fx.Node) -> Any:
    """The fake tensor (or nest of them) that a node produced at capture."""
    return node.meta.get("val")


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Every fake tensor in a node's value; empty where it makes none."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def compute_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Every node that runs something: not placeholders, attributes or the output."""
    return (n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output"))
