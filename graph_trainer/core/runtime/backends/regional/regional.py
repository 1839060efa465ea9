"""Compile the runs of compute between collectives with Inductor, equal runs once."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef

from graph_trainer.core.analysis.regions import Region, find_regions
from graph_trainer.core.graph.annotations import tensor_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import aliased_input, is_getitem, written_arguments
from graph_trainer.core.graph.subclasses import Layout, unwrap
from graph_trainer.core.graph.value_numbers import ValueNumbers
from graph_trainer.core.runtime.backends.backend import Backend, BoxedFunction
from graph_trainer.core.runtime.backends.eager import run_nodes
from graph_trainer.core.runtime.backends.regional.cache import compile_all
from graph_trainer.core.torch_private import FakeTensorMode
from graph_trainer.core.torch_private_inductor import compile_part_with_inductor

Program = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
CompilePart = Callable[[fx.GraphModule, list[torch.Tensor]], Program]

_ALIGNMENT = 16  # bytes; Inductor's kernels assume it of inputs that have it when compiled


def compile_graph(
    joint: JointGraph, compile_part: CompilePart = compile_part_with_inductor
) -> BoxedFunction:
    """Replace each region by a call of its program; all else runs as in the eager backend.

    The order of what is in no region is the graph's. Equal regions share a program, so that the
    time to compile does not grow with the number of layers. Linear in nodes.
    """
    regions = find_regions(joint.graph)
    keys = [program_key(region) for region in regions]

    def compiled(region: Region) -> Program:
        run = compile_part(_module_of_region(region), _examples_of_region(region))
        return checked(run, [tensor_of(node).stride() for node in region.outputs])

    kinds = dict(zip(keys, regions, strict=True))
    programs = compile_all({key: partial(compiled, region) for key, region in kinds.items()})
    graph = _graph_of_calls(joint.graph, regions, [programs[key] for key in keys])
    return run_nodes(joint.graph_module, graph)


def _spec_of(tensor: torch.Tensor) -> tuple[Layout, bool]:
    """Return what code is compiled for: the layout of a (fake) tensor of fixed shape, and whether
    its first element is where Inductor assumes it."""
    return unwrap(tensor)[1], tensor.storage_offset() * tensor.itemsize % _ALIGNMENT == 0


def program_key(region: Region) -> str:
    """Return the same text for two regions exactly when one program serves both: they have equal
    ops, constants, inputs and outputs. Linear in nodes."""
    numbers = ValueNumbers()
    for node in (*region.inputs, *region.nodes):
        numbers.number_alone(node)
    lines = [repr(_spec_of(tensor_of(node))) for node in region.inputs]
    lines += [numbers.call(node) for node in region.nodes]
    lines += [f"{numbers[node]} {_spec_of(tensor_of(node))}" for node in region.outputs]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _module_of_region(region: Region) -> fx.GraphModule:
    """Make a graph of a region, with its inputs as placeholders and its outputs in a tuple."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(region.inputs)}
    for index, node in enumerate(region.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(
            "call_function", node.target, args, kwargs, name=f"node_{index}"
        )
    graph.output(tuple(copies[node] for node in region.outputs))
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Region")


def _examples_of_region(region: Region) -> list[torch.Tensor]:
    """Make fake tensors like the inputs of a region, in a fake mode of their own: what a program
    is compiled for then depends on nothing else of the step."""
    with FakeTensorMode(shape_env=ShapeEnv()):  # without one, Inductor's cache is left out
        examples = []
        for layout, aligned in (_spec_of(tensor_of(node)) for node in region.inputs):
            shape, stride = layout.shape, layout.stride
            dtype, device = layout.dtype, layout.device
            if aligned:
                examples.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
                continue
            span = 2 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            base = torch.empty(max(span, 1), dtype=dtype, device=device)
            examples.append(base.as_strided(shape, stride, 1))
        return examples


def checked(run: Program, strides: Sequence[tuple[int, ...]]) -> Program:
    """Copy results of a program that have other strides or share memory with inputs or results.

    There are two such cases: a kernel gives other strides than its fake one, or the compiler makes
    two equal results once. A program does the same in every call: the results that the first call
    has to copy are copied in all.
    """
    wrong: list[int] | None = None

    def call(boxed: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        nonlocal wrong
        if wrong is None:
            memory = set(map(_memory, boxed))
            results = run(boxed)
            wrong = []
            for index, (result, stride) in enumerate(zip(results, strides, strict=True)):
                if result.numel() and (_memory(result) in memory or result.stride() != stride):
                    wrong.append(index)
                memory.add(_memory(result))
        else:
            results = run(boxed)
        if wrong:
            results = list(results)
            for index in wrong:
                strided = results[index].new_empty_strided(results[index].shape, strides[index])
                results[index] = strided.copy_(results[index])
        return results

    return call


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    # not the address: a result may get that of an input which the program has freed
    return StorageWeakRef(tensor.untyped_storage())


def _graph_of_calls(
    graph: fx.Graph, regions: Sequence[Region], programs: Sequence[Program]
) -> fx.Graph:
    """Copy a graph with a call of its program for each region, where its last op was."""
    calls = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inside = {node for region in regions for node in (*region.nodes, *region.after)}
    ops = [[node for node in region.nodes if not is_getitem(node)] for region in regions]
    ends = {nodes[-1]: index for index, nodes in enumerate(ops)}

    def copy(node: fx.Node) -> None:
        copies[node] = calls.node_copy(node, copies.__getitem__)

    for node in graph.nodes:
        if node not in inside:
            copy(node)
        elif (index := ends.get(node)) is not None:
            region = regions[index]
            # the list is the program's alone, so that it frees what nothing else reads
            boxed = calls.call_function(_boxed, tuple(copies[n] for n in region.inputs))
            results = calls.call_function(programs[index], (boxed,))
            for place, output in enumerate(region.outputs):
                copies[output] = calls.call_function(operator.getitem, (results, place))
            for other in region.after:
                written = aliased_input(other) if written_arguments(other) else None
                if written is None:
                    copy(other)
                else:
                    copies[other] = copies[written]
    return calls


def _boxed(*values: torch.Tensor) -> list[torch.Tensor]:
    return list(values)


REGIONAL = Backend(
    name="regional",
    compile=compile_graph,
    fuses_ops=True,
    dispatches_ops=False,
    compiles_regions=True,
    needs_cpp_compiler=True,
)
