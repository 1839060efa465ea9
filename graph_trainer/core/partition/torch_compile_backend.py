"""A backend of torch.compile that keeps the decisions of a partitioned step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.host_copies import WAIT_COPY, complete_copy
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.partition import repartition
from graph_trainer.core.partition.partitioned_step import PartitionedStep
from graph_trainer.core.partition.repartition import PARTITIONS
from graph_trainer.core.runtime.backends.eager import run_nodes
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.core.torch_private import storage_id
from graph_trainer.core.torch_private_compile import (
    Compiled,
    Partition,
    boxed,
    compile_partitioned_with_inductor,
    compile_plainly,
    compile_without_compiler,
    settings_of,
    standard_partition,
)
from graph_trainer.core.torch_private_inductor import settings_in_order
from graph_trainer.errors import ConfigError

logger = logging.getLogger(__name__)

_COMPILERS = ("inductor", "eager")

_OURS = {
    "cse": "merging equal nodes would undo repeated gathers and recomputation",
    "custom_partitioner_fn": "gt.backend partitions by its argument `partition`",
    "enable_autograd_cache": "AOTAutograd's cache identifies a partitioned step by its name alone",
    "_pre_fusion_custom_pass": "gt.backend sets this pass, to keep the order of collectives",
}
"""Settings that `gt.backend` alone decides, with the reasons."""

OnPartition = Callable[[fx.GraphModule, fx.GraphModule], None]


class CompileBackend:
    """The result of `gt.backend`, which torch.compile calls with every graph that it finds."""

    def __init__(
        self,
        compiler: str,
        partition: str,
        settings: Mapping[str, Any],
        on_partition: OnPartition | None,
    ) -> None:
        self._compiler = compiler
        self._repartition = PARTITIONS[partition]
        self._inductor_settings, self._autograd_settings = _checked(compiler, partition, settings)
        self._on_partition = on_partition
        self._warned = False

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile a graph of torch.compile.

        At each run, the steps in it check their models, because torch.compile's guards do not.
        """
        steps = []
        for node in module.graph.nodes:
            step: PartitionedStep | None = getattr(node.target, "partitioned_step", None)
            if step is not None:
                steps.append((step, _inputs_of_batch(module.graph, node, step)))
        compiled = self._compile(module, inputs, partitioned=bool(steps))

        def checked(*values: Any) -> Any:
            for step, places in steps:
                step.check_model([None if place is None else values[place] for place in places])
            return compiled(*values)

        return checked if steps else compiled

    def _compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, partitioned: bool
    ) -> Compiled:
        if not partitioned and not self._warned:
            self._warned = True
            logger.warning(
                "gt.backend: this module has no partitioned step, so it is compiled as by plain "
                "torch.compile: give it gt.partition(joint)"
            )
        if not partitioned and self._compiler == "eager":
            return compile_without_compiler(module, inputs, standard_partition, run_as_it_is)
        if not partitioned:
            return compile_plainly(module, inputs)
        partition = observed(self._repartition, self._on_partition)
        if self._compiler == "eager":
            return compile_without_compiler(
                module, inputs, partition, run_as_it_is, self._autograd_settings
            )
        settings = settings_in_order() | self._inductor_settings
        uuid = self._repartition.__name__.encode() + Path(repartition.__file__).read_bytes()
        return compile_partitioned_with_inductor(
            module, inputs, settings, self._autograd_settings, partition, uuid
        )


def observed(partition: Partition, on_partition: OnPartition | None) -> Partition:
    """Call `on_partition`, if any, with the two graphs of each partition."""

    def partition_observed(*args: Any, **rest: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves = partition(*args, **rest)
        if on_partition is not None:
            on_partition(*halves)
        return halves

    return partition_observed


def _inputs_of_batch(graph: fx.Graph, call: fx.Node, step: PartitionedStep) -> list[int | None]:
    """Return, for each tensor of a step's batch, the input of the graph that has its memory."""
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    specs = step.halves.forward.signature.inputs
    batch = [n for n, s in zip(call.args, specs, strict=True) if s.kind is InputKind.BATCH]
    # The model's inputs first, so that others override them: if two inputs share memory in this
    # call, which the next call need not repeat, a computed tensor is probably a view of the other.
    state = set(call.args).difference(batch)
    place_of_storage = {}
    for node in sorted(places, key=lambda n: n not in state):
        place_of_storage.update(dict.fromkeys(_storages_of(node), places[node]))

    def source(node: Any) -> int | None:
        if node in places:
            return places[node]
        for storage in _storages_of(node):
            if storage in place_of_storage:
                return place_of_storage[storage]
        return None

    return [source(node) for node in batch]


def _storages_of(node: Any) -> list[int]:
    value = node.meta.get("example_value")  # torch.compile's name for "val"
    parts = unwrap(value)[0] if isinstance(value, torch.Tensor) else []
    return [storage_id(part) for part in parts]


def run_as_it_is(module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Run a graph of AOTAutograd op by op."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    # AOTAutograd refuses an op that returns its input unless its schema declares that; a function
    # has no schema.
    for node in graph.find_nodes(op="call_function", target=WAIT_COPY):
        node.target = complete_copy
    return boxed(run_nodes(module, graph))


def _checked(
    compiler: str, partition: str, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of Inductor and of AOTAutograd."""
    if not settings:
        return {}, {}
    of_inductor, of_autograd, of_partitioner = settings_of(compiler)
    if partition == "min_cut":
        of_autograd |= of_partitioner - _OURS.keys()
    for name, value in settings.items():
        if name in _OURS:
            raise ConfigError(
                f"gt.backend(settings={{'{name}': ...}}): this setting has no effect, because "
                f"{_OURS[name]}: leave it out"
            )
        if name in of_partitioner - of_autograd:
            raise ConfigError(
                f"gt.backend(settings={{'{name}': ...}}): PyTorch's partitioner alone reads this "
                "setting, and partition='tags' repeats the cut of gt.partition: pass "
                "partition='min_cut', or an activation policy to run_passes"
            )
        if name == "activation_memory_budget" and not (
            isinstance(value, (int, float)) and 0 < value <= 1
        ):
            raise ConfigError(
                f"gt.backend(settings={{'{name}': {value!r}}}): the budget is a part of the bytes "
                "that are saved without one, and must be a number above 0 and at most 1 (at 0, "
                "PyTorch's partitioner saves inputs alone and draws random numbers twice)"
            )
        if name not in of_inductor | of_autograd:
            hint = did_you_mean(name, of_inductor | of_autograd, otherwise=".")
            raise ConfigError(
                f"gt.backend('{compiler}', settings={{'{name}': ...}}): there is no such "
                f"setting{hint} Settings are those of torch._functorch.config, and with 'inductor' "
                "also those of torch._inductor.config"
            )
    return (
        {name: value for name, value in settings.items() if name in of_inductor},
        {name: value for name, value in settings.items() if name not in of_inductor},
    )


def backend(
    compiler: str = "inductor",
    *,
    partition: str = "tags",
    settings: Mapping[str, Any] | None = None,
    on_partition: OnPartition | None = None,
) -> CompileBackend:
    """Make a backend of torch.compile for a partitioned step.

    AOTAutograd partitions the graphs of torch.compile. This backend repeats the cut of `partition`:
    the same values are saved, backward repeats the same gathers and recomputation, and the
    collectives keep their order; with "min_cut" PyTorch's partitioner decides which activations are
    saved. A graph without a partitioned step is compiled as by plain torch.compile, and one warning
    is logged.

    Args:
        compiler: "inductor", or "eager", which calls the ops one by one.
        partition: "tags" repeats the cut; "min_cut" lets PyTorch's partitioner decide where no pass
            has decided, as in `ExportedStep.compile`.
        settings: settings of torch._inductor.config and torch._functorch.config, by name; they
            replace those that keep the order of collectives. They hold for the partitioned step
            and its backward, even if that is compiled much later, and for no other compilation.
            Settings of activations, such as `activation_memory_budget`, act with "min_cut" only.
        on_partition: called with the forward and the backward graph of each partition.

    Raises:
        ConfigError: an unknown compiler, partition or setting, or a setting without effect here.

    Example::

        step = torch.compile(gt.partition(joint), backend=gt.backend("inductor"))
        step(tokens, labels).backward()
    """
    if compiler not in _COMPILERS:
        hint = did_you_mean(compiler, _COMPILERS, otherwise=".")
        raise ConfigError(
            f"gt.backend('{compiler}'): there is no such compiler{hint} It must be one of "
            f"{', '.join(_COMPILERS)}"
        )
    if partition not in PARTITIONS:
        raise ConfigError(
            f"gt.backend: partition is {partition!r}; it must be one of {', '.join(PARTITIONS)}"
        )
    return CompileBackend(compiler, partition, settings or {}, on_partition)
