"""Run the graph as the Python that FX generates for it."""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.profiler import record_function

from graph_trainer.core.graph.annotations import module_of, phase_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.runtime.backends.backend import Backend, BoxedFunction
from graph_trainer.core.torch_private import profiler_enabled


class _BoxedCode(fx.graph.CodeGen):
    """Code whose one argument is a list of the placeholders' values, which it empties.

    With plain arguments the caller's frame would keep every argument alive until the step
    ends. Intermediates need no such code: FX deletes each after its last reader.
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


def compile_graph(joint: JointGraph) -> BoxedFunction:
    """Generate Python that calls the graph's ops one by one on plain tensors, without autograd.

    Each intermediate is freed right after its last reader, so the order of the nodes alone
    decides the memory that the step needs.
    """
    # a copy, because the joint graph's own code generator prints the graph
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    return run_nodes(joint.graph_module, graph)


def run_nodes(root: fx.GraphModule, graph: fx.Graph) -> BoxedFunction:
    """Run the nodes of a graph in their order, each value freed after its last reader.

    While a profiler records, other code runs that names modules: see `_with_ranges`.

    Args:
        root: has the attributes that the graph reads.
        graph: becomes the function's own.
    """
    graph.set_codegen(_BoxedCode())
    boxed = fx.GraphModule(root, graph, class_name="JointStep")

    @cache
    def profiled() -> fx.GraphModule:
        with record_function("make the step's ranges"):  # in the first step that is recorded
            return fx.GraphModule(root, _with_ranges(graph), class_name="ProfiledStep")

    def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (profiled() if profiler_enabled() else boxed).forward(values)

    return run


def _with_ranges(graph: fx.Graph) -> fx.Graph:
    """Copy a graph, with a range of torch's profiler around each run of nodes of one module, named
    as "forward layers.0.attention". Linear in nodes."""

    def name_of(node: fx.Node) -> str:
        return " ".join(filter(None, dict.fromkeys((phase_of(node), module_of(node)))))

    ranged = fx.Graph()
    ranged.output(ranged.graph_copy(graph, {}))
    ranged.set_codegen(_BoxedCode())
    ops = [node for node in ranged.nodes if node.op not in ("placeholder", "output")]
    for name, run in groupby(ops, name_of):
        nodes = list(run)
        if name:
            with ranged.inserting_before(nodes[0]):
                entered = ranged.call_function(record_function, (name,))
                ranged.call_method("__enter__", (entered,))
            with ranged.inserting_after(nodes[-1]):
                ranged.call_method("__exit__", (entered, None, None, None))
    return ranged


EAGER = Backend(name="eager", compile=compile_graph, fuses_ops=False, dispatches_ops=True)
