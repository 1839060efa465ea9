"""Run one step of one model many times from the same state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graph_trainer.core.analysis.node_diff import Observe, Observed
from graph_trainer.core.capture.capture import capture
from graph_trainer.core.capture.refusals.second_step import ModuleAttributes
from graph_trainer.core.capture.tracing.trace import LossFn, without_fused_layers
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.subclasses import unwrap
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.runtime.step import Gradients, Step, compile
from graph_trainer.core.tensor_diff import Results
from graph_trainer.core.torch_private import pytree, swap_tensors


class StartingPoint:
    """Copies of a model's tensors, of a nest of batches and of the random state, to start from
    again. Attributes that the model changes are restored as well."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, batches: Any) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._state = [*model.parameters(), *model.buffers()]
        batch = [t for t in pytree.tree_leaves(batches) if isinstance(t, torch.Tensor)]
        parts = [part.detach() for tensor in (*self._state, *batch) for part in unwrap(tensor)[0]]
        self._stored = [(part, part.clone()) for part in parts]
        self._random = torch.get_rng_state()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Start from the stored state, and restore it afterwards."""
        unchanged = {id(tensor): tensor for tensor in self._state}
        gradients = [(p, p.grad) for p in self._model.parameters()]
        with ModuleAttributes(self._model), swap_tensors(self._model, unchanged):
            torch.set_rng_state(self._random)
            try:
                yield
            finally:
                for part, stored in self._stored:
                    part.copy_(stored)
                torch.set_rng_state(self._random)
                for parameter, gradient in gradients:
                    parameter.grad = gradient


def eager_step(
    model: nn.Module, loss_fn: LossFn, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, Gradients]:
    """Take a step of the model itself, without a graph and with the kernels of a captured step."""
    for parameter in model.parameters():
        parameter.grad = None
    with without_fused_layers():
        loss = loss_fn(model, *args, **kwargs)
        loss.backward()
    return loss, gradients_of(model)


def gradients_of(model: nn.Module) -> Gradients:
    """Return the gradients that a model's parameters have accumulated, by FQN."""
    return {clean_fqn(n): p.grad for n, p in model.named_parameters() if p.grad is not None}


def named_results(
    model: nn.Module, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]
) -> Results:
    """Return copies of the plain tensors of a step's loss and gradients and of the buffers."""
    tensors = {"loss": loss}
    for name, _ in model.named_parameters():
        if (gradient := gradients.get(clean_fqn(name))) is not None:
            tensors[f"gradient of {clean_fqn(name)}"] = gradient
    for name, buffer in model.named_buffers():
        tensors[f"buffer {clean_fqn(name)}"] = buffer
    results: Results = {}
    for name, tensor in tensors.items():
        parts, _ = unwrap(tensor)
        results[name] = [part.detach().clone() for part in parts]
    return results


class Runs:
    """Runs a step, of loss `loss_fn(model, *args, **kwargs)`, as the model itself, as a compiled
    graph, or node by node: always from the `StartingPoint` of when this object was made."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.model = model
        self._loss_fn = loss_fn
        self._args, self._kwargs = tuple(args), dict(kwargs)
        self._start = StartingPoint(model, loss_fn, (self._args, self._kwargs))

    def capture(self) -> JointGraph:
        """Capture the graph of the step, without any pass."""
        with self._start.again():
            return capture(self.model, self._loss_fn, self._args, self._kwargs)

    def eager(self) -> Results:
        """Run the model itself, without a graph."""
        with self._start.again():
            step = eager_step(self.model, self._loss_fn, self._args, self._kwargs)
            return named_results(self.model, *step)

    def graph(self, joint: JointGraph) -> Results:
        """Run a graph with the eager backend."""
        return self._step(compile(joint, compare_ranks=False))

    def node_by_node(self, joint: JointGraph, observe: Observe) -> None:
        """Run a graph, and call `observe(node, value)` after each node."""

        def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return Observed(joint.graph_module, observe).run(*values)

        self._step(Step(joint, run))

    def _step(self, step: Step) -> Results:
        with self._start.again():
            return named_results(self.model, *step(self.model, *self._args, **self._kwargs))
