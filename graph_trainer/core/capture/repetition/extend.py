"""Extend the graph of a step from the four periods of layers that were traced to all periods."""

# The idea: the nodes of a period stand together, once in forward and, in reverse order of the
# periods, once in backward. The second period is the pattern. Its nodes read nodes of the same
# period, of a neighbour, inputs of the period, or nodes that all periods read. The other traced
# periods must be this pattern too, shifted. Then a new graph is written, with a copy of the pattern
# for each period that was left out: in forward after the traced period before it, in backward
# before that one.

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from graph_trainer.core.capture.refusals.inputs import names_of_storages
from graph_trainer.core.capture.repetition.repeated_layers import NotRepeated, Repetition
from graph_trainer.core.capture.tracing.model_state import ModelState
from graph_trainer.core.capture.tracing.trace import StandIn, StepTrace
from graph_trainer.core.graph.annotations import (
    Phase,
    annotations_of,
    is_backward,
    module_of,
    phase_of,
    renamed_annotations,
    value_of,
)
from graph_trainer.core.graph.data_sizes import depends_on_data, exact_layout, has_data_sizes
from graph_trainer.core.graph.ops import argument_nodes
from graph_trainer.core.graph.signature import InputKind, Output, OutputKind, with_parts
from graph_trainer.core.graph.snapshot import node_like
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.torch_private import LazyGraphModule, pytree, storage_id, value_of_copy

FIRST, SECOND, MIDDLE, LAST = range(4)
"""The periods that were traced."""

FORWARD = Phase.FORWARD.value
BACKWARD = Phase.BACKWARD.value


def extend(
    graph_module: fx.GraphModule,
    trace: StepTrace,
    repetition: Repetition,
    state: ModelState,
    fake_of: Callable[[torch.Tensor], torch.Tensor],
) -> fx.GraphModule:
    """Write the graph with all layers, and complete the inputs and outputs of its trace.

    Linear in nodes of the result.

    Args:
        graph_module: the graph of a step in which `repetition` skipped layers.
        trace: the trace that made it. Its lists of inputs, of outputs and of parameters without a
            gradient are completed.
        state: the tensors of the model, also of layers that were left out.
        fake_of: makes a fake tensor of the trace from a plain one.

    Raises:
        NotRepeated: the traced periods differ, or a node outside of the layers reads one layer.
    """
    placeholders = _add_inputs(graph_module.graph, trace, repetition, state, fake_of)
    extension = _Extension(graph_module.graph, trace, repetition, placeholders)
    extension.check()
    return LazyGraphModule(graph_module, extension.write_graph())


def check_left_out_unused(graph_module: fx.GraphModule, left_out: Sequence[StandIn]) -> None:
    """Check that no constant of a graph is the stand-in of a tensor of a layer that was left out.

    Raises:
        NotRepeated: with the name of the tensor.
    """
    names = names_of_storages((spec, tensor) for spec, tensor, _ in left_out)
    for node in graph_module.graph.find_nodes(op="get_attr"):
        constant = getattr(graph_module, str(node.target), None)
        if isinstance(constant, torch.Tensor) and storage_id(constant) in names:
            raise NotRepeated(f"the step uses '{names[storage_id(constant)]}' beside its layer")


def _add_inputs(
    graph: fx.Graph,
    trace: StepTrace,
    repetition: Repetition,
    state: ModelState,
    fake_of: Callable[[torch.Tensor], torch.Tensor],
) -> dict[int, tuple[fx.Node, ...]]:
    """Add placeholders for each tensor of a layer that was left out, annotated as the sample's.

    Returns:
        The placeholders of each tensor of the model, by its id.
    """
    sample_of: dict[int, int] = {}  # from the id of a tensor to that of the sample's tensor
    for tensors in repetition.counterparts:
        sample_of.update({id(tensor): sample for sample, tensor in tensors.items()})
    inputs = list(with_parts(trace.inputs, graph.find_nodes(op="placeholder")))
    num_state = len(trace.state.tensors)
    mutated: dict[int, bool] = {}
    placeholders: dict[int, tuple[fx.Node, ...]] = {}
    for (spec, nodes), tensor in zip(inputs[:num_state], trace.state.tensors, strict=True):
        mutated[id(tensor)] = spec.mutated
        placeholders[id(tensor)] = nodes
    # from the last tensor to the first: each placeholder goes before the one that follows it
    first_op = next(node for node in graph.nodes if node.op != "placeholder")
    following = next((nodes[0] for _, nodes in inputs[num_state:] if nodes), first_op)
    for tensor in reversed(state.tensors):
        if id(tensor) in placeholders:
            following = next(iter(placeholders[id(tensor)]), following)
            continue
        nodes_of_tensor: list[fx.Node] = []
        parts, _ = unwrap(tensor)
        samples = placeholders[sample_of[id(tensor)]]
        for part, sample in zip(reversed(parts), reversed(samples), strict=True):
            with graph.inserting_before(following):
                following = graph.placeholder(sample.name)
            following.meta.update(sample.meta, val=fake_of(part))
            nodes_of_tensor.insert(0, following)
        placeholders[id(tensor)] = tuple(nodes_of_tensor)
    state_inputs = [
        dataclasses.replace(spec, mutated=mutated[sample_of.get(id(tensor), id(tensor))])
        for spec, tensor in zip(state.inputs, state.tensors, strict=True)
    ]
    trace.inputs = [*state_inputs, *trace.inputs[num_state:]]
    return placeholders


class _Place(NamedTuple):
    """Where a node of a layer is."""

    phase: str
    period: int
    position: int
    """Among the nodes of its phase and period."""

    def in_period(self, period: int) -> _Place:
        """Return the same place in another period."""
        return self._replace(period=period)

    def shifted(self, periods: int) -> _Place:
        """Return the same place some periods later."""
        return self._replace(period=self.period + periods)


class _Gap(NamedTuple):
    """The periods that were left out after a traced one, SECOND or MIDDLE."""

    traced: int
    numbers: range


class _LayerParameter(NamedTuple):
    """A parameter of a layer."""

    number: int
    """The number of its period."""
    sample: str
    """FQN of the parameter in the pattern."""


class _Extension:
    """The traced graph by periods, and the graph with all periods.

    A period has a number among all periods of the model; the traced ones are also counted from
    FIRST to LAST. Variables named `number` count all periods, and those named `traced` count the
    traced ones.
    """

    def __init__(
        self,
        graph: fx.Graph,
        trace: StepTrace,
        repetition: Repetition,
        placeholders: dict[int, tuple[fx.Node, ...]],
    ) -> None:
        self._graph = graph
        self._trace = trace
        self._run = repetition
        self._numbers = repetition.traced
        """The numbers of the traced periods."""
        self._inputs: list[dict[fx.Node, fx.Node]] = []
        """By number of a period, from each placeholder of the pattern to that of the period."""
        self._layer_names: list[dict[str, str]] = []
        """By number of a period, from the name of each layer of the pattern to that of the period.
        """
        for number in range(repetition.periods):
            inputs: dict[fx.Node, fx.Node] = {}
            names = {}
            first = number * repetition.period
            for layer in range(first, first + repetition.period):
                names[repetition.names[repetition.sample(layer)]] = repetition.names[layer]
                for sample, tensor in repetition.counterparts[layer].items():
                    nodes = zip(placeholders[sample], placeholders[id(tensor)], strict=True)
                    # a tensor that all layers share has the same placeholders
                    inputs.update({node: other for node, other in nodes if other is not node})
            self._inputs.append(inputs)
            self._layer_names.append(names)
        self._pattern_inputs = {node for inputs in self._inputs for node in inputs}
        """The placeholders for tensors that each period has for itself."""
        self._place_of: dict[fx.Node, _Place] = {}
        """Of each node of a layer, with periods counted as traced."""
        self._alias_of: dict[fx.Node, fx.Node] = {}
        """From the results of layers that were left out to those of a traced period."""
        self._nodes: dict[tuple[str, int], list[fx.Node]] = {}
        """By phase and traced period."""
        for phase in (FORWARD, BACKWARD):
            for traced in range(len(self._numbers)):
                self._nodes[phase, traced] = []
        self._find_periods()

        self._new_graph = fx.Graph()
        self._new_nodes: dict[fx.Node, fx.Node] = {}
        """From the nodes of the traced graph to those of the new one."""
        self._new_layer_nodes: dict[_Place, fx.Node] = {}
        """Nodes of the new graph, with the numbers of their periods."""
        self._sizes: dict[int, dict[Any, torch.SymInt]] = defaultdict(dict)
        """By number of a period, from the expressions of sizes in the pattern to the period's."""
        self._names = _Names(self._nodes)

    def _find_periods(self) -> None:
        """Find the places of all nodes, and check that the nodes of a period stand together."""
        traced_of = {number: traced for traced, number in enumerate(self._numbers)}
        stack, _, _ = self._run.names[0].rpartition(".")
        prefix = f"{stack}." if stack else ""
        layers = {name: layer for layer, name in enumerate(self._run.names)}
        # the phases and periods of consecutive nodes; None for nodes outside the layers
        runs: list[tuple[str, int] | None] = [None]
        for node in self._graph.nodes:
            module = module_of(node) or ""
            name = ""
            if module.startswith(prefix):
                name = prefix + module.removeprefix(prefix).partition(".")[0]
            run = None
            if name in layers:
                number = layers[name] // self._run.period
                if number not in traced_of:  # a result of a layer that was left out
                    if node.target is not torch.ops.aten.alias.default or is_backward(node):
                        raise NotRepeated(f"{node.name} of '{name}' is more than its result")
                    self._alias_of[node] = node.all_input_nodes[0]
                    continue
                run = (str(phase_of(node)), traced_of[number])
                if run not in self._nodes:
                    raise NotRepeated(f"{node.name} of '{name}' belongs to the loss")
                self._place_of[node] = _Place(*run, position=len(self._nodes[run]))
                self._nodes[run].append(node)
            if runs[-1] != run:
                runs.append(run)
        forward = [(FORWARD, traced) for traced in (FIRST, SECOND, MIDDLE, LAST)]
        backward = [(BACKWARD, traced) for traced in (LAST, MIDDLE, SECOND, FIRST)]
        if runs not in ([None, *forward, None], [None, *forward, None, *backward, None]):
            raise NotRepeated("other ops stand between those of its layers")

    # --- the pattern -----------------------------------------------------------------------

    def check(self) -> None:
        """Check that the other traced periods are the second one shifted.

        Raises:
            NotRepeated: with the first node that differs, or that reads one layer from outside.
        """
        for (phase, traced), nodes in self._nodes.items():
            pattern = self._nodes[phase, SECOND]
            if len(nodes) != len(pattern):
                raise NotRepeated(
                    f"{phase} has {len(pattern)} nodes of '{self._run.names[self._run.period]}' "
                    f"and its period, and {len(nodes)} of another period"
                )
            for node, other in zip(pattern, nodes, strict=True):
                if traced != SECOND and not self._is_alike(node, other, traced):
                    raise NotRepeated(
                        f"{other.name} ({other.target}, module '{module_of(other)}') differs from "
                        f"{node.name} in module '{module_of(node)}'"
                    )
        for node in self._graph.nodes:
            if node in self._alias_of or node in self._place_of or node.op == "output":
                continue
            for source in self._reads(node):
                # the middle period stands for those that were left out, too
                is_of_one_layer = self._traced_period(source) in (SECOND, MIDDLE)
                if is_of_one_layer or source in self._pattern_inputs:
                    raise NotRepeated(
                        f"{node.name} ({node.target}), which is of no layer, reads {source.name} "
                        "of one layer"
                    )

    def _traced_period(self, node: fx.Node) -> int | None:
        return self._place_of[node].period if node in self._place_of else None

    def _reads(self, node: fx.Node) -> list[fx.Node]:
        """List the nodes that a node reads, in order and each as often as it is read."""
        sources = argument_nodes((node.args, node.kwargs))
        return [self._alias_of.get(source, source) for source in sources]

    def _is_alike(self, node: fx.Node, other: fx.Node, traced: int) -> bool:
        """Return whether a node of a traced period does what a node of the pattern does."""
        sources = self._reads(node)
        other_sources = self._reads(other)
        names = self._layer_names[self._numbers[traced]]
        return (
            node.op == other.op
            and node.target == other.target
            and len(sources) == len(other_sources)
            and _constants(node) == _constants(other)
            and renamed_annotations(node, names) == annotations_of(other)
            and _described(node) == _described(other)
            and all(
                self._is_shifted(source, other_source, traced)
                for source, other_source in zip(sources, other_sources, strict=True)
            )
        )

    def _is_shifted(self, source: fx.Node, other: fx.Node, traced: int) -> bool:
        """Return whether a traced period reads the counterpart of what the pattern reads."""
        place = self._place_of.get(source)
        if place is None:
            return self._inputs[self._numbers[traced]].get(source, source) is other
        expected = place.shifted(traced - SECOND)
        if FIRST <= expected.period <= LAST:
            return self._place_of.get(other) == expected
        return other not in self._place_of  # it comes before the first layer, or after the last

    # --- the graph -------------------------------------------------------------------------

    def write_graph(self) -> fx.Graph:
        """Write the graph with all periods."""
        # the periods that were left out, by the node next to which they are written
        after: dict[fx.Node, _Gap] = {}
        before: dict[fx.Node, _Gap] = {}
        for traced in (SECOND, MIDDLE):
            numbers = range(self._numbers[traced] + 1, self._numbers[traced + 1])
            after[self._nodes[FORWARD, traced][-1]] = _Gap(traced, numbers)
            if self._nodes[BACKWARD, traced]:
                before[self._nodes[BACKWARD, traced][0]] = _Gap(traced, numbers[::-1])
        for node in self._graph.nodes:
            if node in self._alias_of:
                self._names.leave_out(node)
                continue
            if node in before:
                self._copy_pattern(BACKWARD, before[node])
            if node.op == "output":
                self._new_graph.output(self._outputs()).meta.update(node.meta)
                continue
            new = self._copy_traced(node)
            self._new_nodes[node] = new
            if node in self._place_of:
                place = self._place_of[node]
                self._new_layer_nodes[place.in_period(self._numbers[place.period])] = new
            if node in after:
                self._copy_pattern(FORWARD, after[node])
        return self._new_graph

    def _copy_traced(self, node: fx.Node) -> fx.Node:
        """Copy a node of the traced graph into the new one."""
        if node in self._place_of:
            traced = self._place_of[node].period
            read = self._reader(self._numbers[traced], traced)
        else:
            read = self._read_outside
        new = node_like(self._new_graph, node, read, self._names.of(node))
        new.meta.update(node.meta)
        return new

    def _read_outside(self, node: fx.Node) -> fx.Node:
        """Return the new node for one that a node outside of the layers reads."""
        return self._new_nodes[self._alias_of.get(node, node)]

    def _reader(self, number: int, traced: int) -> Callable[[fx.Node], fx.Node]:
        """Return a function from what a traced period reads to what period `number` reads."""

        def read(node: fx.Node) -> fx.Node:
            node = self._alias_of.get(node, node)
            if node not in self._place_of:  # an input, or an op outside of the layers
                return self._new_nodes[self._inputs[number].get(node, node)]
            # of the same period, or of a neighbour
            place = self._place_of[node]
            return self._new_layer_nodes[place.shifted(number - traced)]

        return read

    def _copy_pattern(self, phase: str, gap: _Gap) -> None:
        """Write the pattern once for each period of a gap."""
        pattern = self._nodes[phase, SECOND]
        # what all copies have in common is looked up once
        outside = {source for node in pattern for source in node.all_input_nodes}
        outside.difference_update(pattern)
        annotations = [tuple(annotations_of(node).items()) for node in pattern]
        node_of_annotations = dict(zip(annotations, pattern, strict=True))
        values = [pytree.tree_flatten(value_of(node)) for node in pattern]
        has_sizes = [any(map(depends_on_data, leaves)) for leaves, _ in values]
        names_of_copies = self._names.of_copies(phase, gap.traced, len(gap.numbers))
        for number, names in zip(gap.numbers, names_of_copies, strict=True):
            read = self._reader(number, SECOND)
            new_nodes = {node: read(node) for node in outside}
            layer_names = self._layer_names[number]
            renamed = {
                key: renamed_annotations(node, layer_names)
                for key, node in node_of_annotations.items()
            }
            for position, node in enumerate(pattern):
                new = node_like(self._new_graph, node, new_nodes.__getitem__, names[position])
                new.meta.update(node.meta, custom=renamed[annotations[position]])
                if has_sizes[position]:
                    leaves, structure = values[position]
                    copies = [value_of_copy(leaf, self._sizes[number]) for leaf in leaves]
                    new.meta["val"] = pytree.tree_unflatten(copies, structure)
                    # these repeat the sizes of the pattern
                    new.meta.pop("tensor_meta", None)
                    new.meta.pop("eager_input_vals", None)
                new_nodes[node] = new
                self._new_layer_nodes[_Place(phase, number, position)] = new

    def _outputs(self) -> tuple[fx.Node, ...]:
        """Return the outputs of the new graph, and complete the trace's lists."""
        trace = self._trace
        values: Any = self._graph.output_node().args[0]
        outputs: list[Output] = []
        returned: list[fx.Node] = []
        gradients: dict[str, tuple[Output, tuple[fx.Node, ...]]] = {}
        for spec, nodes in with_parts(trace.outputs, values):
            if spec.kind is OutputKind.GRADIENT:
                gradients[spec.name] = (spec, nodes)
            else:  # an op outside of the layers has detached it
                outputs.append(spec)
                returned += [self._new_nodes[node] for node in nodes]
        layer_parameters = self._layer_parameters()
        without_grad: list[str] = []
        for parameter in trace.inputs if trace.step.backward else ():
            if parameter.kind is not InputKind.PARAMETER or not parameter.requires_grad:
                continue
            of_layer = layer_parameters.get(parameter.name)
            sample = parameter.name if of_layer is None else of_layer.sample
            if sample not in gradients:
                without_grad.append(parameter.name)
                continue
            output, nodes = gradients[sample]
            outputs.append(Output(output.kind, parameter.name, output.layout))
            for node in nodes:
                if (self._traced_period(node) == SECOND) != (of_layer is not None):
                    raise NotRepeated(f"the gradient of '{sample}' is not made in its layer")
                if of_layer is None:
                    returned.append(self._new_nodes[node])
                else:
                    place = self._place_of[node].in_period(of_layer.number)
                    returned.append(self._new_layer_nodes[place])
        trace.outputs = outputs
        trace.without_grad = without_grad
        return tuple(returned)

    def _layer_parameters(self) -> dict[str, _LayerParameter]:
        """Return the inputs of the pattern and of the periods that it stands for, by name.

        The first and the last period return gradients of their own, which the trace has.
        """
        specs = with_parts(self._trace.inputs, self._graph.find_nodes(op="placeholder"))
        spec_of = {nodes[0]: spec for spec, nodes in specs if nodes}
        parameters = {}
        for number in range(1, self._numbers[LAST]):
            for sample in self._pattern_inputs & spec_of.keys():
                placeholder = self._inputs[number].get(sample, sample)
                name = spec_of[placeholder].name
                parameters[name] = _LayerParameter(number, spec_of[sample].name)
        return parameters


class _Names:
    """The names that the nodes would have if all layers were traced.

    fx numbers the nodes of an op: mm, mm_1, mm_2. Each copy of the pattern adds the number of such
    nodes in a period to the numbers of all nodes after it.
    """

    def __init__(self, nodes: dict[tuple[str, int], list[fx.Node]]) -> None:
        self._nodes = nodes
        self._steps: dict[str, dict[str, int]] = {}
        """By phase and op, the difference of numbers from one period to the next."""
        self._offset: dict[str, int] = defaultdict(int)
        """By op, what is added to the numbers of the nodes that follow."""
        # backward runs the periods in reverse order
        for phase, before in ((FORWARD, FIRST), (BACKWARD, MIDDLE)):
            steps = self._steps[phase] = {}
            for node, next_node in zip(nodes[phase, before], nodes[phase, SECOND], strict=True):
                op, number = _numbered(node.name)
                _, next_number = _numbered(next_node.name)
                steps[op] = next_number - number

    def of(self, node: fx.Node) -> str:
        """Return the name of a traced node."""
        op, number = _numbered(node.name)
        return _name(op, number + self._offset[op])

    def leave_out(self, node: fx.Node) -> None:
        """Give the number of a node that is not written to the next one of its op."""
        op, _ = _numbered(node.name)
        self._offset[op] -= 1

    def of_copies(self, phase: str, traced: int, count: int) -> list[list[str]]:
        """Return the names of the nodes of `count` copies next to a traced period, in the order in
        which they are written, and add to the numbers of all nodes that follow."""
        numbered = [_numbered(node.name) for node in self._nodes[phase, traced]]
        steps = self._steps[phase]
        # in forward the traced period comes before the copies, in backward after them
        first = 1 if phase == FORWARD else 0
        copies = []
        for copy in range(first, first + count):
            names = []
            for op, number in numbered:
                names.append(_name(op, number + self._offset[op] + copy * steps[op]))
            copies.append(names)
        for op, step in steps.items():
            self._offset[op] += count * step
        return copies


def _numbered(name: str) -> tuple[str, int]:
    """Split the name of a node into its op and its number."""
    op, _, number = name.rpartition("_")
    return (op, int(number)) if op and number.isdecimal() else (name, 0)


def _name(op: str, number: int) -> str:
    return f"{op}_{number}" if number else op


def _constants(node: fx.Node) -> str:
    """Return the arguments of a node without the nodes among them, as text: 0.0 is not -0.0."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: None))


def _described(node: fx.Node) -> list[object]:
    """Describe a node's value: of tensors, kind and layout; sizes that data decide are equal."""
    described: list[object] = []
    for value in pytree.tree_leaves(value_of(node)):
        described.append(type(value))
        if isinstance(value, torch.Tensor):
            sizes = value.ndim if has_data_sizes(value) else exact_layout(value)
            described.append((value.dtype, value.device, value.requires_grad, sizes))
    return described
