"""A region as a graph of its own, which equal regions share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graph_trainer.core.analysis.regions import Region
from graph_trainer.core.graph.annotations import tensor_of
from graph_trainer.core.graph.value_numbers import ValueNumbers
from graph_trainer.core.torch_private import FakeTensorMode

_ALIGNMENT = 16  # bytes; Inductor's kernels assume it of inputs that have it when compiled


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What code is compiled for."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool
    """Whether its first element is where Inductor assumes it."""


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Describe a (fake) tensor of fixed shape."""
    aligned = tensor.storage_offset() * tensor.dtype.itemsize % _ALIGNMENT == 0
    return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, aligned)


def program_key(region: Region) -> str:
    """Return the same text for two regions exactly when one program serves both: they have equal
    ops, constants, inputs and outputs. Linear in nodes."""
    numbers = ValueNumbers()
    for node in (*region.inputs, *region.nodes):
        numbers.number_alone(node)
    lines = [repr(spec_of(tensor_of(node))) for node in region.inputs]
    lines += [numbers.call(node) for node in region.nodes]
    lines += [f"{numbers[node]} {spec_of(tensor_of(node))}" for node in region.outputs]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def module_of_region(region: Region) -> fx.GraphModule:
    """Make a graph of a region, with its inputs as placeholders and its outputs in a tuple."""
    graph = fx.Graph()
    made = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(region.inputs)}
    for index, node in enumerate(region.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        made[node] = graph.create_node(
            "call_function", node.target, args, kwargs, name=f"node_{index}"
        )
    graph.output(tuple(made[node] for node in region.outputs))
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Region")


def examples_of_region(region: Region) -> list[torch.Tensor]:
    """Make fake tensors like the inputs of a region, in a fake mode of their own: what a program
    is compiled for then depends on nothing else of the step."""
    with FakeTensorMode(shape_env=ShapeEnv()):  # without one, Inductor's cache is left out
        examples = []
        for spec in (spec_of(tensor_of(node)) for node in region.inputs):
            shape, stride, dtype, device = spec.shape, spec.stride, spec.dtype, spec.device
            if spec.aligned:
                examples.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
                continue
            span = 2 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            base = torch.empty(max(span, 1), dtype=dtype, device=device)
            examples.append(base.as_strided(shape, stride, 1))
        return examples
