"""Extend the graph of a step in which only four periods of alike layers were traced to all."""

# The idea: the nodes of a period stand together, once in forward and, in reverse order of the
# periods, once in backward. The second period is the pattern. What one of its nodes reads is of the
# same period, of a neighbour, of the period's own inputs, or common to all. The other traced
# periods must be this pattern too, shifted. Then the graph is written anew, with a copy of the
# pattern for each period that was left out: in forward after the traced one before it, in backward
# before that.

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graph_trainer.core.capture.refusals.inputs import names_of_storages
from graph_trainer.core.capture.repetition.repeated_layers import NotRepeated, Repetition
from graph_trainer.core.capture.tracing.model_state import ModelState
from graph_trainer.core.capture.tracing.trace import StepTrace
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
from graph_trainer.core.graph.signature import Input, InputKind, Output, OutputKind, with_parts
from graph_trainer.core.graph.snapshot import node_like
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.torch_private import LazyGraphModule, pytree, storage_id, value_of_copy

FIRST, SECOND, MIDDLE, LAST = range(4)
"""The periods that were traced."""

_Place = tuple[str, int, int]
"""Where a node is: its phase, which of the traced periods, and the position there."""


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
        graph_module: of a step in which `repetition` skipped layers.
        trace: made it. Its lists of inputs, of outputs and of parameters without a gradient are
            completed.
        state: of the model, with the tensors of layers that were left out.
        fake_of: makes the fake tensor, in the trace, of a plain one.

    Raises:
        NotRepeated: the traced periods differ, or something else reads what is of one layer.
    """
    placeholders = _add_inputs(graph_module.graph, trace, repetition, state, fake_of)
    extension = _Extension(graph_module.graph, trace, repetition, placeholders)
    extension.check()
    return LazyGraphModule(graph_module, extension.written())


def check_left_out_unused(
    graph_module: fx.GraphModule, left_out: Sequence[tuple[Input, torch.Tensor, torch.Tensor]]
) -> None:
    """Check that no constant of a graph is the stand-in of a tensor of a layer that was left out.

    Args:
        left_out: of each such tensor its input, its stand-in in the trace and the tensor.

    Raises:
        NotRepeated: with the name of the tensor.
    """
    names = names_of_storages((spec, stand_in) for spec, stand_in, _ in left_out)
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
    samples: dict[int, int] = {}  # by id of a tensor, that of the sample's
    for tensors in repetition.counterparts:
        samples.update({id(tensor): sample for sample, tensor in tensors.items()})
    of_traced = list(with_parts(trace.inputs, graph.find_nodes(op="placeholder")))
    count = len(trace.state.tensors)
    mutated: dict[int, bool] = {}
    placeholders: dict[int, tuple[fx.Node, ...]] = {}
    for (spec, nodes), tensor in zip(of_traced[:count], trace.state.tensors, strict=True):
        mutated[id(tensor)] = spec.mutated
        placeholders[id(tensor)] = nodes
    end = next(node for node in graph.nodes if node.op != "placeholder")
    following = next((nodes[0] for _, nodes in of_traced[count:] if nodes), end)
    for tensor in reversed(state.tensors):
        if id(tensor) in placeholders:
            following = next(iter(placeholders[id(tensor)]), following)
            continue
        made: list[fx.Node] = []
        pairs = zip(unwrap(tensor)[0], placeholders[samples[id(tensor)]], strict=True)
        for part, sample in reversed(list(pairs)):
            with graph.inserting_before(following):
                following = graph.placeholder(sample.name)
            following.meta.update(sample.meta, val=fake_of(part))
            made.insert(0, following)
        placeholders[id(tensor)] = tuple(made)
    of_state = [
        dataclasses.replace(spec, mutated=mutated[samples.get(id(tensor), id(tensor))])
        for spec, tensor in zip(state.inputs, state.tensors, strict=True)
    ]
    trace.inputs = [*of_state, *trace.inputs[count:]]
    return placeholders


class _Extension:
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
        """Of the traced periods, among all."""
        self._inputs: list[dict[fx.Node, fx.Node]] = []
        """By period, from each placeholder of the pattern to its own."""
        self._names: list[dict[str, str]] = []
        """By period, from the name of each layer of the pattern to that of its own."""
        for period in range(repetition.periods):
            inputs: dict[fx.Node, fx.Node] = {}
            names = {}
            for place in range(period * repetition.period, (period + 1) * repetition.period):
                names[repetition.names[repetition.sample(place)]] = repetition.names[place]
                for sample, own in repetition.counterparts[place].items():
                    pairs_of_nodes = zip(placeholders[sample], placeholders[id(own)], strict=True)
                    inputs.update({node: its for node, its in pairs_of_nodes if its is not node})
            self._inputs.append(inputs)
            self._names.append(names)
        self._own = {node for inputs in self._inputs for node in inputs}
        self._place_of: dict[fx.Node, _Place] = {}
        self._alias_of: dict[fx.Node, fx.Node] = {}
        """From the results of layers that were left out to those of the second period."""
        phases = (Phase.FORWARD.value, Phase.BACKWARD.value)
        self._nodes: dict[tuple[str, int], list[fx.Node]] = {
            (phase, period): [] for phase in phases for period in range(len(self._numbers))
        }
        """By phase and traced period."""
        self._find_periods()

    def _find_periods(self) -> None:
        traced = {number: period for period, number in enumerate(self._numbers)}
        periods = {
            name: traced.get(place // self._run.period)
            for place, name in enumerate(self._run.names)
        }
        stack, _, _ = self._run.names[0].rpartition(".")
        depth = len(stack) + 1 if stack else 0
        begins = f"{stack}." if stack else ""
        runs: list[tuple[str, int] | None] = [None]  # nodes that stand together are one
        for node in self._graph.nodes:
            module = module_of(node) or ""
            name = begins + module[depth:].partition(".")[0] if module.startswith(begins) else ""
            period = periods.get(name)
            key = None
            if name in periods and period is None:  # what a layer returned that was left out
                if node.target is not torch.ops.aten.alias.default or is_backward(node):
                    raise NotRepeated(f"{node.name} of '{name}' is more than its result")
                self._alias_of[node] = node.all_input_nodes[0]
                continue
            if period is not None:
                key = str(phase_of(node)), period
                if key not in self._nodes:
                    raise NotRepeated(f"{node.name} of '{name}' is of the loss")
                self._place_of[node] = (*key, len(self._nodes[key]))
                self._nodes[key].append(node)
            if runs[-1] != key:
                runs.append(key)
        # the nodes of a period stand together, next to those of the next, and nothing between
        forward = [(Phase.FORWARD.value, period) for period in traced.values()]
        backward = [(Phase.BACKWARD.value, period) for period in reversed(traced.values())]
        if runs not in ([None, *forward, None], [None, *forward, None, *backward, None]):
            raise NotRepeated("other ops stand between those of its layers")

    # --- the pattern -----------------------------------------------------------------------

    def check(self) -> None:
        """Check that the other traced periods are the second one shifted."""
        for (phase, period), nodes in self._nodes.items():
            pattern = self._nodes[phase, SECOND]
            if len(nodes) != len(pattern):
                raise NotRepeated(
                    f"{phase} of '{self._run.names[0]}' and of those like it has {len(pattern)} "
                    f"and {len(nodes)} nodes"
                )
            for node, its in zip(pattern, nodes, strict=True):
                if period != SECOND and not self._is_alike(node, its, period):
                    raise NotRepeated(
                        f"{its.name} ({its.target}, module '{module_of(its)}') is not what "
                        f"{node.name} is in module '{module_of(node)}'"
                    )
        for node in self._graph.nodes:
            is_outside = self._period_of(node) is None and node.op != "output"
            for source in () if node in self._alias_of else self._reads(node):
                # of the middle one, which stands for others too
                stands_for_others = self._period_of(source) in (SECOND, MIDDLE)
                of_pattern = stands_for_others or source in self._own
                if of_pattern and is_outside:
                    raise NotRepeated(
                        f"{node.name} ({node.target}), which is of no layer, reads {source.name} "
                        "of one layer"
                    )

    def _period_of(self, node: fx.Node) -> int | None:
        return self._place_of[node][1] if node in self._place_of else None

    def _reads(self, node: fx.Node) -> list[fx.Node]:
        """List the nodes that a node reads, in order and each as often as it is read."""
        read = argument_nodes((node.args, node.kwargs))
        return [self._alias_of.get(each, each) for each in read]

    def _is_alike(self, node: fx.Node, its: fx.Node, period: int) -> bool:
        number = self._numbers[period]
        reads, its_reads = self._reads(node), self._reads(its)
        return (
            node.op == its.op
            and node.target == its.target
            and len(reads) == len(its_reads)
            and _constants(node) == _constants(its)
            and renamed_annotations(node, self._names[number]) == annotations_of(its)
            and _described(node) == _described(its)
            and all(
                self._reads_alike(a, b, period, number)
                for a, b in zip(reads, its_reads, strict=True)
            )
        )

    def _reads_alike(self, read: fx.Node, its: fx.Node, period: int, number: int) -> bool:
        """Return whether a node of a period reads what the pattern reads, `read`, shifted."""
        place = self._place_of.get(read)
        if place is None:
            return self._inputs[number].get(read, read) is its
        phase, of_period, position = place
        shifted = of_period + period - SECOND
        if 0 <= shifted < len(self._numbers):
            return self._place_of.get(its) == (phase, shifted, position)
        return its not in self._place_of  # what is before the first layer, or after the last

    # --- the graph -------------------------------------------------------------------------

    def written(self) -> fx.Graph:
        """Write the graph with all periods."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        """From the nodes of the traced graph."""
        copies: dict[tuple[str, int, int], fx.Node] = {}
        """By phase, period of all and position."""
        sizes: dict[int, dict[Any, torch.SymInt]] = defaultdict(dict)
        """By period, from the expressions of sizes in the pattern to its own sizes."""
        names = _Names(self._nodes)

        def read_by(number: int, traced_as: int) -> Callable[[fx.Node], fx.Node]:
            """Find what a node of a period reads that stands for what a traced node reads."""

            def read(node: fx.Node) -> fx.Node:
                node = self._alias_of.get(node, node)
                if node not in self._place_of:  # an input, or an op beside the layers
                    return made[self._inputs[number].get(node, node)]
                phase, period, position = self._place_of[node]
                return copies[phase, number + period - traced_as, position]

            return read

        def read_outside(node: fx.Node) -> fx.Node:
            return made[self._alias_of.get(node, node)]

        def copy_pattern(phase: str, traced_as: int, periods: Sequence[int]) -> None:
            pattern = self._nodes[phase, SECOND]
            # what all copies have in common is looked up once
            from_outside = {each for node in pattern for each in node.all_input_nodes}
            from_outside.difference_update(pattern)
            annotated = [tuple(annotations_of(node).items()) for node in pattern]
            samples = dict(zip(annotated, pattern, strict=True))
            values = [pytree.tree_flatten(value_of(node)) for node in pattern]
            of_data = [any(map(depends_on_data, leaves)) for leaves, _ in values]
            copied_names = names.of_copies(phase, traced_as, len(periods))
            for period, node_names in zip(periods, copied_names, strict=True):
                read = read_by(period, SECOND)
                reads = dict(zip(from_outside, map(read, from_outside), strict=True))
                layers = self._names[period]
                renamed = {key: renamed_annotations(n, layers) for key, n in samples.items()}
                for position, node in enumerate(pattern):
                    new = node_like(graph, node, reads.__getitem__, node_names[position])
                    new.meta.update(node.meta, custom=renamed[annotated[position]])
                    if of_data[position]:
                        leaves, structure = values[position]
                        own = [value_of_copy(leaf, sizes[period]) for leaf in leaves]
                        new.meta["val"] = pytree.tree_unflatten(own, structure)
                        for stale in ("tensor_meta", "eager_input_vals"):
                            new.meta.pop(stale, None)
                    reads[node] = copies[phase, period, position] = new

        forward, backward = Phase.FORWARD.value, Phase.BACKWARD.value
        # the periods after the second and after the middle one, by the node next to which they go
        after: dict[fx.Node, tuple[int, range]] = {}
        before: dict[fx.Node, tuple[int, range]] = {}
        for period in (SECOND, MIDDLE):
            between = range(self._numbers[period] + 1, self._numbers[period + 1])
            after[self._nodes[forward, period][-1]] = period, between
            if self._nodes[backward, period]:
                before[self._nodes[backward, period][0]] = period, between[::-1]
        for node in self._graph.nodes:
            if node in self._alias_of:
                names.leave_out(node)
                continue
            if node in before:
                copy_pattern(backward, *before[node])
            if node.op == "output":
                graph.output(self._outputs(made, copies)).meta.update(node.meta)
                continue
            place = self._place_of.get(node)
            if place is None:
                made[node] = node_like(graph, node, read_outside, names.of(node))
            else:
                phase, period, position = place
                number = self._numbers[period]
                made[node] = node_like(graph, node, read_by(number, period), names.of(node))
                copies[phase, number, position] = made[node]
            made[node].meta.update(node.meta)
            if node in after:
                copy_pattern(forward, *after[node])
        return graph

    def _outputs(
        self, made: dict[fx.Node, fx.Node], copies: dict[tuple[str, int, int], fx.Node]
    ) -> tuple[fx.Node, ...]:
        """Return what the graph returns, and complete the trace's lists."""
        trace = self._trace
        values: Any = self._graph.output_node().args[0]
        outputs: list[Output] = []
        returned: list[fx.Node] = []
        gradients: dict[str, tuple[Output, tuple[fx.Node, ...]]] = {}
        for spec, nodes in with_parts(trace.outputs, values):
            if spec.kind is OutputKind.GRADIENT:
                gradients[spec.name] = (spec, nodes)
                continue
            outputs.append(spec)  # detached from what a layer computes, by an op of no layer
            returned += [made[node] for node in nodes]
        # by name of a parameter of the pattern or of a copy, its period and that of the pattern
        taken = with_parts(trace.inputs, self._graph.find_nodes(op="placeholder"))
        spec_of = {nodes[0]: spec for spec, nodes in taken}
        of_layer: dict[str, tuple[int, str]] = {}
        for period in range(1, self._numbers[LAST]):
            for sample in self._own & spec_of.keys():
                own = self._inputs[period].get(sample, sample)
                of_layer[spec_of[own].name] = period, spec_of[sample].name
        without_grad: list[str] = []
        for given in trace.inputs if trace.step.backward else ():
            if given.kind is not InputKind.PARAMETER or not given.requires_grad:
                continue
            name = given.name
            period, of_pattern = of_layer.get(name, (-1, name))
            if of_pattern not in gradients:
                without_grad.append(name)
                continue
            output, nodes = gradients[of_pattern]
            outputs.append(Output(output.kind, name, output.layout))
            for node in nodes:
                if (self._period_of(node) == SECOND) != (period != -1):
                    raise NotRepeated(f"the gradient of '{of_pattern}' is not made in its layer")
                phase, _, position = self._place_of.get(node, ("", -1, 0))
                its = made[node] if period == -1 else copies[phase, period, position]
                returned.append(its)
        trace.outputs, trace.without_grad = outputs, without_grad
        return tuple(returned)


class _Names:
    """The names that the nodes would have if all layers were traced.

    fx numbers the nodes of an op: mm, mm_1, mm_2. Each copy of the pattern moves the numbers of
    what comes after it on by as many nodes as a period has.
    """

    def __init__(self, nodes: dict[tuple[str, int], list[fx.Node]]) -> None:
        self._nodes = nodes
        self._steps: dict[str, dict[str, int]] = {}
        """By phase and op, the difference of numbers from one period to the next."""
        self._moved: dict[str, int] = defaultdict(int)
        for phase, before in ((Phase.FORWARD.value, FIRST), (Phase.BACKWARD.value, MIDDLE)):
            steps = self._steps[phase] = {}
            for one, next_one in zip(nodes[phase, before], nodes[phase, SECOND], strict=True):
                op, number = _numbered(one.name)
                steps[op] = _numbered(next_one.name)[1] - number

    def of(self, node: fx.Node) -> str:
        """Return the name of a traced node."""
        op, number = _numbered(node.name)
        return _name(op, number + self._moved[op])

    def leave_out(self, node: fx.Node) -> None:
        """Give the number of a node that is not written to the next one of its op."""
        self._moved[_numbered(node.name)[0]] -= 1

    def of_copies(self, phase: str, period: int, count: int) -> list[list[str]]:
        """Return the names of the nodes of so many copies beside a traced period, in the order in
        which these are written, and move the numbers of all that follows."""
        numbered = [_numbered(node.name) for node in self._nodes[phase, period]]
        steps = self._steps[phase]
        # in forward the traced period stands before the copies, in backward after them
        first = 1 if phase == Phase.FORWARD.value else 0
        copies = [
            [_name(op, n + self._moved[op] + periods * steps[op]) for op, n in numbered]
            for periods in range(first, first + count)
        ]
        for op, step in steps.items():
            self._moved[op] += count * step
        return copies


def _numbered(name: str) -> tuple[str, int]:
    op, _, number = name.rpartition("_")
    return (op, int(number)) if op and number.isdecimal() else (name, 0)


def _name(op: str, number: int) -> str:
    return f"{op}_{number}" if number else op


def _constants(node: fx.Node) -> str:
    """Return the arguments of a node but for what it reads, as text: 0.0 differs from -0.0."""
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
