"""Run the graph as the Python that FX generates for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graph_trainer.core.graph.joint_graph import JointGraph


class _BoxedCode(fx.graph.CodeGen):
    """Code whose one argument is a list of the placeholders' values, which it empties.

    A plain call would hold every argument alive in its caller's frame until the step is
    over. Intermediates need no such care: FX drops each after its last reader.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [entry.split(":")[0].split("=")[0].strip() for entry in free_vars]
        boxed = "boxed"
        while boxed in names:
            boxed = f"_{boxed}"
        lines = [f"def forward(self, {boxed}){maybe_return_annotation}:"]
        if names:
            lines += [f"    [{', '.join(names)}] = {boxed}", f"    {boxed}.clear()"]
        return "\n".join(lines)


def compile_graph(joint: JointGraph) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """The graph's own ops, one after the other, without autograd and without subclasses.

    Every intermediate is freed right after its last reader, so that the order of nodes is
    the whole truth about memory.
    """
    # a copy, so that the joint graph keeps its own module and its own way of printing itself
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    graph.set_codegen(_BoxedCode())
    boxed = fx.GraphModule(joint.graph_module, graph, class_name="JointStep")

    def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return boxed.forward(values)

    return run
