"""Compile the whole graph with Inductor, and keep its collectives as they are."""

from __future__ import annotations

import torch

from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import OutputKind
from graph_trainer.core.runtime.backends.backend import Backend, BoxedFunction
from graph_trainer.core.torch_private_inductor import compile_with_inductor


def compile_graph(joint: JointGraph) -> BoxedFunction:
    """Compile one Inductor program for forward, loss and backward, on CPU or CUDA.

    Compiles at once and not at the first call, while the settings that it needs are in
    effect. Raises what Inductor raises where it cannot compile an op.
    """
    examples = [value_of(node) for node in joint.placeholders()]
    compiled = compile_with_inductor(joint.graph_module, examples, _half(joint))

    def run(boxed: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values = tuple(boxed)
        boxed.clear()
        with torch.no_grad():
            return tuple(compiled(*values))

    return run


def _half(joint: JointGraph) -> str:
    """Return "forward" or "backward" for a half of a partitioned step, "" for a whole step."""
    kinds = {output.kind for output in joint.signature.outputs}
    if all(kind.is_gradient for kind in kinds):
        return "backward"
    return "forward" if OutputKind.SAVED in kinds else ""


INDUCTOR = Backend(
    name="inductor",
    compile=compile_graph,
    fuses_ops=True,
    dispatches_ops=False,
    needs_cpp_compiler=True,
)
