"""Run one step of one model many times from the same state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from graph_trainer.core.bisect.tensor_diff import Results
from graph_trainer.core.capture.capture import LossFn, capture
from graph_trainer.core.capture.subclasses import unwrap
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.names import clean_fqn
from graph_trainer.core.runtime.step import Step, compile
from graph_trainer.core.torch_private import pytree, swap_tensors

Observe = Callable[[fx.Node, Any], None]


class Runs:
    """Runs a step as the model itself, as a compiled graph, or node by node.

    Every run begins with the parameters, buffers, module attributes, batch and random state of
    the moment when this object was made. It stores a copy of all of these.

    Args:
        model: the model.
        loss_fn: `loss_fn(model, *args, **kwargs)` -> scalar loss.
        args: positional arguments of one batch.
        kwargs: keyword arguments of one batch.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.model = model
        self._loss_fn = loss_fn
        self._args, self._kwargs = tuple(args), dict(kwargs)
        self._state = [*model.parameters(), *model.buffers()]
        leaves, _ = pytree.tree_flatten((self._args, self._kwargs))
        batch = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        parts = [part.detach() for tensor in (*self._state, *batch) for part in unwrap(tensor)[0]]
        self._stored = [(part, part.clone()) for part in parts]
        self._random = torch.get_rng_state()

    def capture(self) -> JointGraph:
        """Capture the graph of the step, without any pass."""
        with self._fresh():
            return capture(self.model, self._loss_fn, self._args, self._kwargs)

    def eager(self) -> Results:
        """Run the model itself, without a graph."""
        gradients = {p: p.grad for p in self.model.parameters()}
        try:
            with self._fresh():
                for parameter in gradients:
                    parameter.grad = None
                loss = self._loss_fn(self.model, *self._args, **self._kwargs)
                loss.backward()
                named = {
                    clean_fqn(name): p.grad
                    for name, p in self.model.named_parameters()
                    if p.grad is not None
                }
                return self._results(loss, named)
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def graph(self, joint: JointGraph) -> Results:
        """Run a graph with the eager backend."""
        return self._step(compile(joint))

    def node_by_node(self, joint: JointGraph, observe: Observe) -> None:
        """Run a graph, and call `observe(node, value)` after each node."""

        def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return _Observed(joint.graph_module, observe).run(*values)

        self._step(Step(joint, run))

    def _step(self, step: Step) -> Results:
        with self._fresh():
            return self._results(*step(self.model, *self._args, **self._kwargs))

    def _results(self, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> Results:
        tensors = {"loss": loss}
        for name, _ in self.model.named_parameters():
            if (gradient := gradients.get(clean_fqn(name))) is not None:
                tensors[f"gradient of {clean_fqn(name)}"] = gradient
        for name, buffer in self.model.named_buffers():
            tensors[f"buffer {clean_fqn(name)}"] = buffer
        return {n: [p.detach().clone() for p in unwrap(t)[0]] for n, t in tensors.items()}

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[None]:
        """Start from the stored state, and restore it afterwards."""
        with swap_tensors(self.model, {id(tensor): tensor for tensor in self._state}):
            torch.set_rng_state(self._random)
            try:
                yield
            finally:
                for part, stored in self._stored:
                    part.copy_(stored)
                torch.set_rng_state(self._random)


class _Observed(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, observe: Observe) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._observe = observe

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self._observe(n, result)
        return result
