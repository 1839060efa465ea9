"""The memory of a run beside the graph: optimizer state and gradients, predicted and measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from graph_trainer.core.graph.annotations import tensors_of
from graph_trainer.core.graph.data_sizes import storage_bytes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.passes.context import OtherMemoryOf
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.simulation.simulate import OtherMemory
from graph_trainer.titan.config.run_config import GraphTrainerConfig

# The number of tensors of the parameter's size in the state of each optimizer.
_STATES = {"Adam": 2, "AdamW": 2, "DistMuon": 1}


def other_memory_of(config: GraphTrainerConfig, data_parallel_degree: int) -> OtherMemoryOf:
    """Make the function that predicts, from the captured graph, the other memory during a step.

    Args:
        data_parallel_degree: how many different batches a step has.
    """
    backend = find_backend(config.compile.backend)
    several = microbatches(config, data_parallel_degree) > 1

    def other_memory(joint: JointGraph) -> OtherMemory:
        return OtherMemory(
            optimizer_bytes(joint, config),
            # Validation runs after a step, whose gradients stay alive until the next step.
            trained_bytes(joint) if several or not joint.signature.backward else 0,
            fused=backend.fuses_ops,
            in_regions=backend.compiles_regions,
            expert_imbalance=config.compile.expert_imbalance or 1.0,
        )

    return other_memory


def microbatches(config: GraphTrainerConfig, data_parallel_degree: int) -> int:
    """Return the number of times that the graph runs in a step."""
    training, parallelism = config.training, config.parallelism
    rows = training.local_batch_size
    of_pipeline = 1
    if parallelism.pipeline_parallel_degree > 1:
        of_pipeline = rows // parallelism.pipeline_parallel_microbatch_size
    return of_pipeline * max(1, training.global_batch_size // (rows * data_parallel_degree))


def optimizer_bytes(joint: JointGraph, config: GraphTrainerConfig) -> int:
    """Sum the bytes of optimizer state on this rank, from the second step on.

    A parameter belongs to the first group whose pattern is found in its name; one that no
    group matches is not trained.
    """
    groups = [
        (re.compile(g.pattern), _STATES[g.optimizer_name] + bool(g.optimizer_kwargs.get("amsgrad")))
        for g in config.optimizer.param_groups
    ]
    return sum(
        num * next((states for pattern, states in groups if pattern.search(name)), 0)
        for name, num in _trained(joint)
    )


def trained_bytes(joint: JointGraph) -> int:
    """Sum the bytes of the trained parameters, and so of their gradients, on this rank."""
    return sum(num for _, num in _trained(joint))


def _trained(joint: JointGraph) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of every parameter that gets a gradient and so has optimizer state."""
    without = set(joint.signature.parameters_without_grad)
    for spec, nodes in joint.inputs_of(InputKind.PARAMETER):
        if spec.requires_grad and spec.name not in without:
            yield spec.name, sum(storage_bytes(t) for n in nodes for t in tensors_of(n))


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of the tensors' elements on this rank."""
    return sum(part.nbytes for t in tensors for part in unwrap(t)[0])


def optimizer_state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Sum the bytes of the optimizers' state tensors on this rank."""
    return local_bytes(
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
