"""Export a partitioned step as AOTAutograd's joint graph, to rewrite and tag it before compilation.

The order of the stages matters and is enforced: rewrite the structure, refresh descriptors, remove
unused waits, tag, compile. The graph has the phases, modules and roles of the step, and the tags on
which `rematerialize` has not acted, so that passes can run on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import fx

from graph_trainer.core.analysis.unshard_chains import is_layout_only, unshard_chains
from graph_trainer.core.graph.annotations import (
    Phase,
    Role,
    annotate_node,
    annotation,
    copy_annotations,
    is_backward,
    phase_of,
    restore_recompute_policy,
    role_of,
    set_input_name,
    value_of,
)
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import erase_unused, is_collective, is_getitem, is_wait
from graph_trainer.core.graph.signature import Input, InputKind, Output, OutputKind, Signature
from graph_trainer.core.graph.subclasses import Layout, unwrap
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.partition.partitioned_step import PartitionedStep
from graph_trainer.core.partition.repartition import PARTITIONS
from graph_trainer.core.partition.torch_compile_backend import OnPartition, observed, run_as_it_is
from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.core.passes.pipeline import run_tags
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.runtime.step import run_compiled
from graph_trainer.core.torch_private_compile import (
    Compiled,
    ExportedJoint,
    argument_of,
    boxed,
    compile_joint,
    descriptor_of,
    export_joint,
    gradient_of,
    must_be_in_forward,
    set_flat_arguments,
    traced_in_forward,
)
from graph_trainer.errors import PassError

_NOTHING = unwrap(torch.empty(0, device="meta"))[1]
"""The layout of a value that is not a tensor: an opaque value, or a gradient that AOTAutograd does
not compute."""


class ExportStage(IntEnum):
    """The last stage that an exported step has reached, in their only order."""

    EXPORTED = 0
    REWRITE = 1
    REFRESH = 2
    REMOVE_WAITS = 3
    TAG = 4
    COMPILE = 5


class ExportedStep:
    """A context in which a partitioned step is AOTAutograd's joint graph.

    Args:
        step: the partitioned step.
        args, kwargs: a batch of the captured shape.

    Example::

        with gt.ExportedStep(gt.partition(joint), tokens, labels) as exported:
            exported.rewrite(my_rewrite)
            exported.refresh()
            exported.remove_unused_waits()
            exported.tag(gt.PassConfig(reshard_after_forward="always"))
            step = exported.compile(partition="min_cut")
        step(tokens, labels).backward()  # outside of the context, in which tensors are fake
    """

    def __init__(self, step: PartitionedStep, *args: Any, **kwargs: Any) -> None:
        self._step = step
        self._batch = (args, kwargs)
        self._stack = contextlib.ExitStack()
        self._stage = ExportStage.EXPORTED
        self._joint: ExportedJoint | None = None
        self._graph: JointGraph | None = None

    def __enter__(self) -> ExportedStep:
        tensors = self._step.checked_tensors(*self._batch)
        with contextlib.ExitStack() as stack:
            self._joint = export_joint(stack, self._step.call_on_tensors, tensors)
            self._graph = _as_joint_graph(self._joint.graph_module, self._step.joint)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._joint = self._graph = None
        self._stack.close()

    @property
    def joint(self) -> JointGraph:
        """AOTAutograd's joint graph, with the annotations of the two graphs and the names of their
        parameters. Its outputs may be None, for gradients that are not computed.

        Raises:
            PassError: outside of the context.
        """
        if self._graph is None:
            raise PassError(
                "an exported step has a graph only within its context: `with ExportedStep(...) as "
                "exported:`"
            )
        return self._graph

    @property
    def graph_module(self) -> fx.GraphModule:
        """The module of `joint`."""
        return self.joint.graph_module

    def rewrite(self, function: Callable[[JointGraph], None]) -> None:
        """Let a function, or a pass, change the structure of the graph, once or several times."""
        self._enter(ExportStage.REWRITE)
        function(self.joint)

    def refresh(self) -> None:
        """Update the flat list of arguments from the graph, and check inputs and outputs against
        their descriptors.

        Raises:
            PassError: an input or output does not match its descriptor; the message names both.
        """
        self._enter(ExportStage.REFRESH)
        graph = self.graph_module.graph
        values = self.joint.output_values()
        descriptors = graph.output_node().meta["desc"]
        for value, descriptor in zip(values, descriptors, strict=False):
            if isinstance(value, (tuple, list, dict)):
                raise PassError(
                    f"the exported graph returns the nested {value!r} where the flat descriptor is "
                    f"{descriptor}: return one flat list"
                )
        if len(values) != len(descriptors):
            raise PassError(
                f"the exported graph returns {len(values)} values and has {len(descriptors)} "
                "descriptors of outputs: a rewrite must keep the outputs of the graph"
            )
        placeholders = graph.find_nodes(op="placeholder")
        for node in placeholders:
            if descriptor_of(node) is None:
                raise PassError(
                    f"input '{node.name}' of the exported graph has no descriptor: a rewrite must "
                    "not add inputs"
                )
        assert self._joint is not None
        missing = set_flat_arguments(self._joint, placeholders)
        if missing:
            raise PassError(
                f"the exported graph has no input for the descriptor {missing[0]}: a rewrite must "
                "keep all inputs, also unused ones, in their order"
            )
        graph.lint()
        self.graph_module.recompile()

    def remove_unused_waits(self) -> None:
        """Remove unused waits, which AOTAutograd would keep, and the nodes that only they read.

        Linear in nodes.
        """
        self._enter(ExportStage.REMOVE_WAITS)
        graph = self.graph_module.graph
        erase_unused(graph, among={node for node in graph.nodes if is_wait(node)})

    def tag(self, tags: PassConfig | Callable[[JointGraph], None]) -> None:
        """Write tags, by the passes of stage TAG that a config names, with its settings, or by a
        function that calls `set_recompute_policy` on nodes. May be called several times.

        Raises:
            PassError: the function changes the structure, which must come before tags; the config
                needs other passes; or it reshards in another way than the step was cut with, where
                tags cannot change that any more.
        """
        self._enter(ExportStage.TAG)
        if isinstance(tags, PassConfig):
            _check_reshard_policy(self.joint, tags.reshard_after_forward)
            run_tags(self.joint, tags)
            return
        before = str(self.graph_module.graph)
        tags(self.joint)
        if str(self.graph_module.graph) != before:
            raise PassError(
                "a function passed to tag() changes the structure of the exported graph: pass it "
                "to rewrite(), which comes first"
            )

    def compile(
        self,
        *,
        partition: str = "tags",
        compiler: str | Compiled = "eager",
        on_partition: OnPartition | None = None,
        compare_ranks: bool = True,
    ) -> Compiled:
        """Partition and compile.

        Args:
            partition: "tags" repeats the cut of the step, except for nodes that were tagged later;
                "min_cut" lets PyTorch's partitioner decide about all nodes without a tag. Backward
                still repeats the gathers and recomputation that the cut placed there, and the
                gathers of parameters that the cut keeps are kept.
            compiler: the name of one of `backends.registry`, or `compiler(graph_module, inputs)`,
                which is called for each half.
            on_partition: called with the forward and the backward graph.
            compare_ranks: whether the first call compares the collectives of all ranks.

        Returns:
            The step: a function of a batch; call `backward()` on its result.

        Raises:
            PassError: an unknown partition, or steps out of order.
            ConfigError: an unknown compiler.
        """
        if partition not in PARTITIONS:
            raise PassError(
                f"partition is {partition!r}; it must be one of {', '.join(PARTITIONS)}"
            )
        self._enter(ExportStage.COMPILE)
        self.graph_module.recompile()
        step = self._step
        unchecked: list[JointGraph] = []

        def compile_half(kind: OutputKind, module: fx.GraphModule, inputs: Any) -> Compiled:
            half = half_of(module, kind)
            if compare_ranks:
                unchecked.append(half)
            if callable(compiler):
                return compiler(module, inputs)
            if compiler == "eager":
                run = run_as_it_is(module, inputs)
            else:
                run = find_backend(compiler).compile(half)
            return boxed(lambda values: run_compiled(run, half, values))

        compiled = compile_joint(
            self._joint,
            observed(PARTITIONS[partition], on_partition),
            forward=partial(compile_half, OutputKind.SAVED),
            backward=partial(compile_half, OutputKind.GRADIENT),
        )

        def call(*args: Any, **kwargs: Any) -> Any:
            while unchecked:
                check_order_across_ranks(unchecked.pop(0))
            return step.returned(compiled(*step.checked_tensors(args, kwargs)))

        return call

    def _enter(self, stage: ExportStage) -> None:
        """Enter a stage.

        Raises:
            PassError: a later stage has run, or a stage that must come before it has not.
        """
        repeats = stage == self._stage and stage in (ExportStage.REWRITE, ExportStage.TAG)
        # rewriting is optional, and so is tagging
        needed = min(stage - 1, ExportStage.REMOVE_WAITS)
        problem = ""
        if stage <= self._stage and not repeats:
            problem = f"after which {stage.name} may not come"
        elif stage >= ExportStage.REMOVE_WAITS and self._stage < needed:
            problem = f"and {stage.name} needs {ExportStage(needed).name} before it"
        if problem:
            raise PassError(
                f"an exported step is at {self._stage.name}, {problem}; the order is "
                f"{', '.join(s.name for s in ExportStage)}"
            )
        self._stage = stage


def _check_reshard_policy(joint: JointGraph, policy: str | None) -> None:
    """Refuse a reshard policy that tags can no longer apply to an exported step.

    A merged gather is not the unshard chain of one parameter, and backward repeats the gathers that
    the cut placed there.
    """
    if policy is None:
        return
    in_chains = {node for chain in unshard_chains(joint) for node in chain.nodes}
    merged: set[fx.Node] = set()  # merged gathers of forward, and views and copies of their results
    is_kept = False  # whether backward reads a merged gather of forward
    regathers = False  # whether backward gathers
    for node in joint.graph.nodes:
        gathers = is_collective(node) and role_of(node) is Role.UNSHARD
        reads_merged = not merged.isdisjoint(node.all_input_nodes)
        if is_backward(node):
            is_kept |= reads_merged
            regathers |= gathers
        elif (gathers and node not in in_chains) or (reads_merged and is_layout_only(node)):
            merged.add(node)
    too_late = {"always": is_kept, "default": is_kept and not regathers, "never": regathers}
    if too_late.get(policy):
        raise PassError(
            f'reshard_after_forward = "{policy}" comes too late for this step, which was cut with '
            "another policy: pass it to run_passes, before gt.partition"
        )


def _as_joint_graph(module: fx.GraphModule, traced: JointGraph) -> JointGraph:
    """Return AOTAutograd's joint graph of a step with the metadata that passes read: names of
    inputs, a phase of every node, and the tags that were carried."""
    inputs: list[Input] = []
    for node in module.graph.find_nodes(op="placeholder"):
        place = argument_of(node)
        if place is None:
            inputs.append(Input(InputKind.OUTPUT_GRADIENT, node.name, _layout(node)))
        elif isinstance(value_of(node), torch.Tensor):
            inputs.append(replace(traced.signature.inputs[place], layout=_layout(node)))
            set_input_name(node, inputs[-1].name)
        else:  # a DTensor's mesh, which AOTAutograd passes beside its tensor
            inputs.append(Input(InputKind.BATCH, node.name, _NOTHING))
    for node in module.graph.nodes:
        if is_getitem(node):
            copy_annotations(node.all_input_nodes[0], node)
        elif node.op == "call_function" and phase_of(node) is None:
            forward = traced_in_forward(node) or must_be_in_forward(node)
            phase = Phase.FORWARD if forward else Phase.BACKWARD
            annotate_node(node, annotation(phase=phase))
        restore_recompute_policy(node)
    output: Any = module.graph.output_node()
    outputs = []
    for value, descriptor in zip(output.args[0], output.meta["desc"], strict=True):
        place = gradient_of(descriptor)
        kind = OutputKind.OUTPUT if place is None else OutputKind.GRADIENT
        name = str(descriptor) if place is None else traced.signature.inputs[place].name
        outputs.append(Output(kind, name, _layout(value)))
    signature = Signature(tuple(inputs), tuple(outputs), traced.signature.parameters_without_grad)
    return replace(
        traced, graph_module=module, signature=signature, history=[], decisions={}, remarks=[]
    )


def _layout(node: Any) -> Layout:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return unwrap(value)[1] if isinstance(value, torch.Tensor) else _NOTHING


def half_of(module: fx.GraphModule, kind: OutputKind) -> JointGraph:
    """Make a JointGraph, for analyses and backends, from a partitioner's forward or backward.

    Its inputs have no names.

    Args:
        kind: the kind of its outputs: SAVED for forward, GRADIENT for backward.
    """
    nodes = module.graph.find_nodes(op="placeholder")
    inputs = [Input(InputKind.SAVED, node.name, _layout(node)) for node in nodes]
    values: Any = module.graph.output_node().args[0]
    outputs = [Output(kind, str(value), _layout(value)) for value in values]
    return JointGraph(module, Signature(tuple(inputs), tuple(outputs)))
