"""A partitioned step as AOTAutograd's joint graph, rewritten and tagged before it is compiled.

The order of the steps matters and is enforced: rewrites of structure, descriptors refreshed, unused
waits removed, tags, compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from torch import fx

from graph_trainer.core.graph.ops import has_effect
from graph_trainer.core.partition.again import partition_again
from graph_trainer.core.partition.step import PartitionedStep
from graph_trainer.core.torch_private_compile import (
    Compiled,
    ExportedJoint,
    compile_joint,
    descriptor_of,
    export_joint,
    set_flat_arguments,
    standard_partition,
)
from graph_trainer.errors import PassError


class ExportStage(IntEnum):
    """What has been done to an exported step, in the only order that there is."""

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
            exported.tag(my_tags)
            step = exported.compile(partition="min_cut")
        step(tokens, labels).backward()
    """

    def __init__(self, step: PartitionedStep, *args: Any, **kwargs: Any) -> None:
        self._step = step
        self._batch = (args, kwargs)
        self._stack = contextlib.ExitStack()
        self._stage = ExportStage.EXPORTED
        self._joint: ExportedJoint | None = None

    def __enter__(self) -> ExportedStep:
        tensors = self._step.checked_tensors(*self._batch)
        self._joint = export_joint(self._stack, self._step.call_on_tensors, tensors)
        return self

    def __exit__(self, *error: Any) -> None:
        self._joint = None
        self._stack.close()

    @property
    def graph_module(self) -> fx.GraphModule:
        """AOTAutograd's joint graph, with the annotations of the two graphs.

        Raises:
            PassError: outside of the context.
        """
        if self._joint is None:
            raise PassError(
                "an exported step has a graph only within its context: `with ExportedStep(...) as "
                "exported:`"
            )
        return self._joint.graph_module

    def rewrite(self, function: Callable[[fx.GraphModule], None]) -> None:
        """Let a function change the structure of the graph. May be called several times."""
        self._enter(ExportStage.REWRITE)
        function(self.graph_module)

    def refresh(self) -> None:
        """Bring the flat list of arguments in line with the graph, and check it and the outputs
        against their descriptors.

        Raises:
            PassError: an input or output and its descriptor do not fit; the message names both.
        """
        self._enter(ExportStage.REFRESH)
        graph = self.graph_module.graph
        output = graph.output_node()
        values, described = output.args[0], output.meta["desc"]
        assert isinstance(values, (tuple, list))
        for value, descriptor in zip(values, described, strict=False):
            if isinstance(value, (tuple, list, dict)):
                raise PassError(
                    f"the exported graph returns the nested {value!r} where the flat descriptor is "
                    f"{descriptor}: return one flat list"
                )
        if len(values) != len(described):
            raise PassError(
                f"the exported graph returns {len(values)} values and has {len(described)} "
                "descriptors of outputs: a rewrite keeps what the graph returns"
            )
        placeholders = graph.find_nodes(op="placeholder")
        for node in placeholders:
            if descriptor_of(node) is None:
                raise PassError(
                    f"input '{node.name}' of the exported graph has no descriptor: a rewrite adds "
                    "no inputs"
                )
        assert self._joint is not None
        missing = set_flat_arguments(self._joint, placeholders)
        if missing:
            raise PassError(
                f"the exported graph has no input for the descriptor {missing[0]}: a rewrite keeps "
                "all inputs, read or not, in their order"
            )
        graph.lint()
        self.graph_module.recompile()

    def remove_unused_waits(self) -> None:
        """Remove waits that nothing reads, with what only they read: AOTAutograd would keep them.
        Linear in nodes."""
        self._enter(ExportStage.REMOVE_WAITS)
        graph = self.graph_module.graph
        for node in reversed(list(graph.nodes)):
            if not node.users and not has_effect(node):
                graph.erase_node(node)

    def tag(self, function: Callable[[fx.GraphModule], None]) -> None:
        """Let a function write tags: `set_recompute_policy` on a node.

        Raises:
            PassError: it changes the structure, which tags come after.
        """
        self._enter(ExportStage.TAG)
        before = str(self.graph_module.graph)
        function(self.graph_module)
        if str(self.graph_module.graph) != before:
            raise PassError(
                "a function given to tag() changes the structure of the exported graph: give it to "
                "rewrite(), which comes first"
            )

    def compile(self, *, partition: str = "tags", compiler: Compiled | None = None) -> Compiled:
        """Partition and compile.

        Args:
            partition: "tags" repeats the cut of the step; "min_cut" asks PyTorch's partitioner,
                which reads the recompute tags.
            compiler: `compiler(graph_module, inputs)` of each half; None runs them op by op.

        Returns:
            the step: a function of a batch, for `backward()` on what it returns.
        """
        partitions = {"tags": partition_again, "min_cut": standard_partition}
        if partition not in partitions:
            raise PassError(
                f"partition is {partition!r}; it must be one of {', '.join(partitions)}"
            )
        self._enter(ExportStage.COMPILE)
        self.graph_module.recompile()
        assert self._joint is not None
        compiled = compile_joint(self._joint, partitions[partition], compiler)
        step = self._step

        def call(*args: Any, **kwargs: Any) -> Any:
            return step.returned(compiled(*step.checked_tensors(args, kwargs)))

        return call

    def _enter(self, stage: ExportStage) -> None:
        """Go on to a stage.

        Raises:
            PassError: a later one has run, or one that has to come before it has not.
        """
        again = stage == self._stage and stage in (ExportStage.REWRITE, ExportStage.TAG)
        needed = min(stage - 1, ExportStage.REMOVE_WAITS)
        if stage <= self._stage and not again:
            raise PassError(
                f"an exported step is at {self._stage.name}, after which {stage.name} may not "
                f"come; the order is {', '.join(s.name for s in ExportStage)}"
            )
        if stage >= ExportStage.REMOVE_WAITS and self._stage < needed:
            raise PassError(
                f"an exported step is at {self._stage.name}, and {stage.name} needs "
                f"{ExportStage(needed).name} before it; the order is "
                f"{', '.join(s.name for s in ExportStage)}"
            )
        self._stage = stage
