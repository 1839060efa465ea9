"""Compile a joint graph into a step that a train loop calls with its model and its batch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graph_trainer.core.graph.captured_call import device_types
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument, is_collective
from graph_trainer.core.graph.signature import Output, OutputKind, with_parts
from graph_trainer.core.graph.subclasses import with_stride, wrap
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.runtime.backends.backend import BoxedFunction
from graph_trainer.core.runtime.backends.registry import find_backend
from graph_trainer.core.runtime.collective_failure import failed_collective
from graph_trainer.core.runtime.guard import Guard
from graph_trainer.core.torch_private_groups import group_backend, group_ranks
from graph_trainer.errors import CaptureError

Gradients = dict[str, torch.Tensor]


class Step:
    """A compiled train step: `loss, gradients = step(model, *args, **kwargs)`.

    Gradients are by parameter FQN: DTensors where the parameter is one, and absent for
    parameters that the loss does not depend on. A graph without backward returns none. `.grad`
    is not written; buffers that forward changes are changed in place. `compile` makes it of a joint
    graph, which it has as `joint`.
    """

    def __init__(self, joint: JointGraph, run: BoxedFunction, compare_ranks: bool = False) -> None:
        self.joint = joint
        self._run = run
        self._compare_ranks = compare_ranks
        self._guard: Guard | None = None

    def __call__(
        self, model: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Gradients]:
        """Run the step.

        Raises:
            CaptureError: the model's tensors, modes or hooks, or the batch, differ from those of
                the capture.
            VerificationError: the ranks' graphs issue different collectives (first call only).
            CollectiveError: a collective timed out or lost its connection (gloo; see
                `collective_failure`).
        """
        if not isinstance(model, nn.Module):
            raise CaptureError(
                f"the step's first argument is the model, and it is a {type(model).__name__}"
            )
        if self._compare_ranks:
            check_order_across_ranks(self.joint)
            self._compare_ranks = False
        if self._guard is None:
            self._guard = Guard(self.joint)
        return self.run(self._guard.values(self._guard.tensors(model, args, kwargs)))

    def run(self, values: list[torch.Tensor]) -> tuple[torch.Tensor, Gradients]:
        """Run the step on the values of its placeholders; see `__call__`."""
        results = run_compiled(self._run, self.joint, values)
        loss: torch.Tensor | None = None
        gradients: Gradients = {}
        for spec, parts in with_parts(self.joint.signature.outputs, results):
            if spec.kind is OutputKind.LOSS:
                loss = wrap(parts, spec.layout)
            else:
                gradients[spec.name] = output_tensor(spec, parts)
        assert loss is not None
        return loss, gradients


def run_compiled(
    compiled: BoxedFunction, graph: JointGraph, values: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run a compiled graph, without autocast, because the graph already contains its casts.
    A CollectiveError names the collective that failed (gloo; see `collective_failure`)."""
    try:
        with contextlib.ExitStack() as stack:
            for device_type in device_types():
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            return compiled(values)
    except RuntimeError as error:
        failed = failed_collective(error, graph)
        if failed is None:
            raise
        raise failed from error


def output_tensor(spec: Output, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put an output of a graph together, with the strides of the capture."""
    # A kernel may have given other strides than its fake one; a norm sums in their order.
    return with_stride(wrap(parts, spec.layout), spec.layout.stride)


def compile(joint: JointGraph, backend: str = "eager", *, compare_ranks: bool = True) -> Step:
    """Compile a joint graph into a step.

    Args:
        joint: as captured, or after `run_passes`.
        backend: the name of one of `backends.registry`: "eager", "inductor" or "regional".
        compare_ranks: whether the first call of the step compares the collectives of all ranks
            of the default process group, so that a difference is an error and not a hang. Every
            rank has to make that call then.

    Returns:
        the step, a function of the model and the batch.

    Raises:
        ConfigError: an unknown backend.

    Example::

        step = gt.compile(joint, backend="eager")
        loss, gradients = step(model, tokens, labels)
    """
    joint.validate()
    if joint.outputs is not None:
        raise CaptureError(
            "the graph was captured without a loss, and its backward takes gradients: use "
            "gt.partition(joint), or capture with a loss"
        )
    groups = {str(argument(n, "group_name")) for n in joint.graph.nodes if is_collective(n)}
    if any(group_backend(g) == "gloo" and len(group_ranks(g)) > 1 for g in groups - {"None"}):
        warnings.warn(
            "the graph communicates over plain gloo, which may crash with several all-gathers in "
            "flight, and is slow: write torch.distributed.init_process_group(gt.cpu_backend())",
            stacklevel=2,
        )
    return Step(joint, find_backend(backend).compile(joint), compare_ranks)
