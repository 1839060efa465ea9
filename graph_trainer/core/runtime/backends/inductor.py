"""Compile the whole graph with Inductor, and keep its collectives as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graph_trainer.core.graph.joint_graph import JointGraph, value_of
from graph_trainer.core.torch_private import compile_with_inductor


def compile_graph(joint: JointGraph) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """One Inductor program for forward, loss and backward, on CPU or CUDA.

    Compiled here and now, not at the first call, so that the settings it needs hold. Raises
    what Inductor raises where it cannot compile an op.
    """
    examples = [value_of(node) for node in joint.placeholders()]
    run_compiled = compile_with_inductor(joint.graph_module, examples)

    def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(run_compiled(values))

    return run
