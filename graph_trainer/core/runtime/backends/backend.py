"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graph_trainer.core.graph.joint_graph import JointGraph

BoxedFunction = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
"""Takes the placeholders' tensors in a list, which it empties, and returns the outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to run a joint graph. `registry` lists all of them."""

    name: str
    """What `find_backend` finds it by."""
    compile: Callable[[JointGraph], BoxedFunction]
    """Compile a valid joint graph, which stays as it was, before the first call."""
    fuses_ops: bool
    """Whether elementwise ops become one kernel; memory and time are then simulated fused."""
    dispatches_ops: bool
    """Whether each node of the graph is one call through torch's dispatcher, so that a dispatch
    mode sees every tensor that the step allocates. Collectives must always be such calls."""
    compiles_regions: bool = False
    """Whether ops are fused only within the regions of `core.analysis.regions`."""
    needs_cpp_compiler: bool = False
    """Whether the machine needs a C++ compiler."""
