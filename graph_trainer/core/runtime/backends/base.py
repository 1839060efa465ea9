"""Backends: a joint graph becomes a function of a list of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.runtime.backends import eager, inductor
from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError

BoxedFunction = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
"""Takes the placeholders' tensors in a list, which it empties, and returns the outputs."""

BACKENDS: dict[str, Callable[[JointGraph], BoxedFunction]] = {
    "eager": eager.compile_graph,
    "inductor": inductor.compile_graph,
}


def compile_with(joint: JointGraph, backend: str) -> BoxedFunction:
    """Compile with the backend of that name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    if backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS, otherwise=".")
        raise ConfigError(
            f"compile.backend is '{backend}'{hint} It must be one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[backend](joint)
