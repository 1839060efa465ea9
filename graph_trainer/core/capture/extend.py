"""Extend the graph of a step in which only three periods of alike layers were traced to all."""

# The idea: the nodes of a period stand together, once in forward and, in reverse order of the
# periods, once in backward. The second period is the pattern. What one of its nodes reads is of the
# same period, of a neighbour, of the period's own inputs, or common to all. The first and the last
# period must be this pattern too, shifted. Then the graph is written anew, with a copy of the
# pattern for each period that was left out: after the second in forward, before it in backward.

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graph_trainer.core.capture.repeated_layers import NotRepeated, Repetition
from graph_trainer.core.capture.trace import StepTrace
from graph_trainer.core.graph.annotations import (
    Phase,
    annotations_of,
    infer_value,
    module_of,
    phase_of,
    renamed_annotations,
    value_of,
)
from graph_trainer.core.graph.data_sizes import exact_layout, has_data_sizes
from graph_trainer.core.graph.signature import InputKind, Output, OutputKind, with_parts
from graph_trainer.core.torch_private import LazyGraphModule, pytree

FIRST, SECOND, LAST = range(3)
"""The periods that were traced."""

_Place = tuple[str, int, int]
"""Where a node is: its phase, which of the traced periods, and the position there."""


def extend(graph_module: fx.GraphModule, trace: StepTrace, repetition: Repetition) -> fx.GraphModule:
    """Write the graph with all layers, and complete the outputs of its trace.

    Linear in nodes of the result.

    Args:
        graph_module: of a step in which `repetition` skipped layers.
        trace: made it. Its lists of outputs, of parameters without a gradient and of remarks on
            rounding are completed.

    Raises:
        NotRepeated: the traced periods differ, or something else reads what is of one layer.
    """
    extension = _Extension(graph_module.graph, trace, repetition)
    extension.check()
    return LazyGraphModule(graph_module, extension.written())


class _Extension:
    def __init__(self, graph: fx.Graph, trace: StepTrace, repetition: Repetition) -> None:
        self._graph = graph
        self._trace = trace
        self._run = repetition
        self._last = repetition.periods - 1
        placeholders = graph.find_nodes(op="placeholder")
        by_tensor: dict[int, tuple[fx.Node, ...]] = {}
        pairs = zip(with_parts(trace.inputs, placeholders), trace.state.tensors, strict=False)
        for (_, nodes), tensor in pairs:
            by_tensor[id(tensor)] = nodes
        self._inputs: list[dict[fx.Node, fx.Node]] = []
        """By period, from each placeholder of the pattern to its own."""
        self._names: list[dict[str, str]] = []
        """By period, from the name of each layer of the pattern to that of its own."""
        for period in range(repetition.periods):
            inputs, names = {}, {}
            for place in range(period * repetition.period, (period + 1) * repetition.period):
                names[repetition.names[repetition.sample(place)]] = repetition.names[place]
                for tensor, own in repetition.counterparts[place].items():
                    nodes = zip(by_tensor[tensor], by_tensor[id(own)], strict=True)
                    if any(inputs.setdefault(node, its) is not its for node, its in nodes):
                        raise NotRepeated("layers share their tensors in different ways")
            self._inputs.append({node: its for node, its in inputs.items() if its is not node})
            self._names.append(names)
        self._own = {node for inputs in self._inputs for node in inputs}
        self._place_of: dict[fx.Node, _Place] = {}
        phases = (Phase.FORWARD.value, Phase.BACKWARD.value)
        self._nodes: dict[tuple[str, int], list[fx.Node]] = {
            (phase, period): [] for phase in phases for period in (FIRST, SECOND, LAST)
        }
        """By phase and traced period."""
        self._find_periods()

    def _find_periods(self) -> None:
        traced = {}
        for place, name in enumerate(self._run.names):
            if self._run.is_traced(place):
                period = place // self._run.period
                traced[name] = LAST if period == self._last else period
        stack, _, _ = self._run.names[0].rpartition(".")
        depth = len(stack) + 1 if stack else 0
        begins = f"{stack}." if stack else ""
        order: list[tuple[str, int]] = []
        for node in self._graph.nodes:
            module = module_of(node) or ""
            name = begins + module[depth:].partition(".")[0] if module.startswith(begins) else ""
            if name not in traced:
                order.append(("", -1))
                continue
            key = str(phase_of(node)), traced[name]
            if key not in self._nodes:
                raise NotRepeated(f"{node.name} of '{name}' is neither of forward nor of backward")
            self._place_of[node] = (*key, len(self._nodes[key]))
            self._nodes[key].append(node)
            order.append(key)
        # the nodes of each period stand together, next to those of the next
        runs = [key for place, key in enumerate(order) if place == 0 or order[place - 1] != key]
        runs = [key for key in runs if key[0]]
        forward = [(Phase.FORWARD.value, period) for period in (FIRST, SECOND, LAST)]
        backward = [(Phase.BACKWARD.value, period) for period in (LAST, SECOND, FIRST)]
        if runs not in (forward, forward + backward):
            raise NotRepeated(f"the nodes of its layers are not in one piece each: {runs}")

    # --- the pattern -----------------------------------------------------------------------

    def check(self) -> None:
        """Check that the first and the last period are the second one shifted."""
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
        skipped = {node for inputs in self._inputs[2:-1] for node in inputs.values()}
        for node in self._graph.nodes:
            _, period, _ = self._place_of.get(node, ("", -1, 0))
            for source in node.all_input_nodes:
                _, source_period, _ = self._place_of.get(source, ("", -1, 0))
                of_pattern = source_period == SECOND or source in self._own
                if source in skipped or (of_pattern and period == -1 and node.op != "output"):
                    raise NotRepeated(
                        f"{node.name} ({node.target}), which is of no layer, reads {source.name} of "
                        "one layer"
                    )

    def _is_alike(self, node: fx.Node, its: fx.Node, period: int) -> bool:
        whole = 0 if period == FIRST else self._last
        reads, does = _arguments(node), _arguments(its)
        return (
            node.op == its.op
            and node.target == its.target
            and len(reads) == len(does)
            and fx.map_arg((node.args, node.kwargs), lambda _: None)
            == fx.map_arg((its.args, its.kwargs), lambda _: None)
            and renamed_annotations(node, self._names[whole]) == annotations_of(its)
            and _described(node) == _described(its)
            and all(
                self._reads_alike(a, b, period, whole) for a, b in zip(reads, does, strict=True)
            )
        )

    def _reads_alike(self, read: fx.Node, its: fx.Node, period: int, whole: int) -> bool:
        """Tell whether a node of a period reads what the pattern reads, `read`, shifted."""
        place = self._place_of.get(read)
        if place is None:
            return self._inputs[whole].get(read, read) is its
        phase, of_period, position = place
        shifted = of_period + period - SECOND
        if shifted in (FIRST, SECOND, LAST):
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
        names = _Names(self._nodes)

        def read_by(period: int | None) -> Callable[[fx.Node], fx.Node]:
            def read(node: fx.Node) -> fx.Node:
                place = self._place_of.get(node)
                if period is None or period == 0:
                    return made[node]
                if period == self._last:  # its neighbour was left out
                    before = place is not None and place[1] == SECOND
                    return copies[place[0], period - 1, place[2]] if before else made[node]
                if place is None:
                    return made[self._inputs[period].get(node, node)]
                phase, of_period, position = place
                return copies[phase, period + of_period - SECOND, position]

            return read

        def write(node: fx.Node, name: str, period: int | None) -> fx.Node:
            args, kwargs = fx.map_arg((node.args, node.kwargs), read_by(period))
            new = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            new.meta = dict(node.meta)
            return new

        def copy_pattern(phase: str, periods: Sequence[int]) -> None:
            for distance, period in enumerate(periods, 1):
                for position, node in enumerate(self._nodes[phase, SECOND]):
                    new = write(node, names.of_copy(node, phase, distance), period)
                    new.meta["custom"] = renamed_annotations(node, self._names[period])
                    if _depends_on_data(node):
                        _infer_anew(new)
                    copies[phase, period, position] = new
            names.pass_copies(phase, len(periods))

        between = range(2, self._last)
        second_backward = next(iter(self._nodes[Phase.BACKWARD.value, SECOND]), None)
        second_forward = self._nodes[Phase.FORWARD.value, SECOND][-1]
        for node in self._graph.nodes:
            if node is second_backward:
                copy_pattern(Phase.BACKWARD.value, between[::-1])
            if node.op == "output":
                new = graph.output(self._outputs(made, copies))
                new.meta = dict(node.meta)
                continue
            place = self._place_of.get(node)
            period = None if place is None else (0, 1, self._last)[place[1]]
            made[node] = write(node, names.of(node), period)
            if place is not None:
                copies[place[0], period, place[2]] = made[node]  # type: ignore[index]
            if node is second_forward:
                copy_pattern(Phase.FORWARD.value, between)
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
            else:
                outputs.append(spec)
                returned += [made[node] for node in nodes]
        # by name of a parameter that was left out, its period and the parameter of the pattern
        spec_of = {}
        for spec, nodes in with_parts(trace.inputs, self._graph.find_nodes(op="placeholder")):
            spec_of[nodes[0]] = spec
        left_out: dict[str, tuple[int, str]] = {}
        for period in range(2, self._last):
            for sample, own in self._inputs[period].items():
                if own in spec_of:
                    left_out[spec_of[own].name] = period, spec_of[sample].name
        without_grad = []
        for spec in trace.inputs if trace.backward else ():
            if spec.kind is not InputKind.PARAMETER or not spec.requires_grad:
                continue
            period, sample = left_out.get(spec.name, (None, spec.name))
            if sample not in gradients:
                without_grad.append(spec.name)
                continue
            output, nodes = gradients[sample]
            outputs.append(Output(output.kind, spec.name, output.layout))
            for node in nodes:
                place = self._place_of.get(node)
                if period is None:
                    returned.append(made[node])
                elif place is None or place[1] != SECOND:
                    raise NotRepeated(f"the gradient of '{sample}' is not made in its layer")
                else:
                    returned.append(copies[place[0], period, place[2]])
        trace.outputs, trace.without_grad = outputs, without_grad
        texts = set(trace.rounding)
        for names in self._names[2:-1]:
            for sample, own in names.items():
                begins = re.compile(rf"(?<=module '){re.escape(sample)}(?=['.])")
                texts.update(begins.sub(own, text) for text in trace.rounding)
        trace.rounding = sorted(texts)
        return tuple(returned)


class _Names:
    """The names that the nodes would have if all layers were traced.

    fx numbers the nodes of an op: mm, mm_1, mm_2. Each copy of the pattern moves the numbers of what
    comes after it on by as many nodes as a period has.
    """

    def __init__(self, nodes: dict[tuple[str, int], list[fx.Node]]) -> None:
        self._steps: dict[str, dict[str, int]] = {}
        """By phase and op, the difference of numbers from one period to the next."""
        self._moved: dict[str, int] = defaultdict(int)
        for phase, before in ((Phase.FORWARD.value, FIRST), (Phase.BACKWARD.value, LAST)):
            steps = self._steps[phase] = {}
            for one, next_one in zip(nodes[phase, before], nodes[phase, SECOND], strict=True):
                op, number = _numbered(one.name)
                steps[op] = _numbered(next_one.name)[1] - number

    def of(self, node: fx.Node, more: int = 0) -> str:
        """Return the name of a traced node, or of one with a number that is greater by `more`."""
        op, number = _numbered(node.name)
        number += self._moved[op] + more
        return f"{op}_{number}" if number else op

    def of_copy(self, node: fx.Node, phase: str, distance: int) -> str:
        """Return the name of a pattern's node in the copy that is the first, second, ... written."""
        # in forward the pattern stands before its copies, in backward after them
        periods = distance if phase == Phase.FORWARD.value else distance - 1
        return self.of(node, periods * self._steps[phase].get(_numbered(node.name)[0], 0))

    def pass_copies(self, phase: str, count: int) -> None:
        """Move the numbers of all that follows so many copies."""
        for op, step in self._steps[phase].items():
            self._moved[op] += count * step


def _numbered(name: str) -> tuple[str, int]:
    op, _, number = name.rpartition("_")
    return (op, int(number)) if op and number.isdecimal() else (name, 0)


def _arguments(node: fx.Node) -> list[fx.Node]:
    """List the nodes that a node reads, in order and each as often as it is read."""
    read: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), read.append)
    return read


def _described(node: fx.Node) -> list[object]:
    """Describe a node's value: of tensors, kind and layout; sizes that data decide are equal."""
    described: list[object] = []
    for value in pytree.tree_leaves(value_of(node)):
        described.append(type(value))
        if isinstance(value, torch.Tensor):
            sizes = value.ndim if has_data_sizes(value) else exact_layout(value)
            described.append((value.dtype, value.device, value.requires_grad, sizes))
    return described


def _depends_on_data(node: fx.Node) -> bool:
    return any(
        isinstance(value, torch.SymInt)
        or (isinstance(value, torch.Tensor) and has_data_sizes(value))
        for value in pytree.tree_leaves(value_of(node))
    )


def _infer_anew(node: fx.Node) -> None:
    """Set the value of a node whose sizes data decide: those of each layer have their own symbols."""
    if node.target is torch.ops.aten._local_scalar_dense.default:
        (source,) = node.all_input_nodes
        # a fake tensor remembers the symbol that it gave
        source.meta["val"] = value_of(source).detach()
    infer_value(node)
    for stale in ("tensor_meta", "eager_input_vals"):
        node.meta.pop(stale, None)
