"""A region as a graph of its own, which equal regions share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graph_trainer.core.analysis.regions import Region
from graph_trainer.core.graph.annotations import tensor_of
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
    number = {node: index for index, node in enumerate((*region.inputs, *region.nodes))}
    lines = [repr(spec_of(tensor_of(node))) for node in region.inputs]
    for node in region.nodes:
        lines.append(f"{node.target} {_text(node.args, number)} {_text(node.kwargs, number)}")
    lines += [f"{number[node]} {spec_of(tensor_of(node))}" for node in region.outputs]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _text(value: Any, number: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{number[value]}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(part, number) for part in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_text(v, number)}' for k, v in value.items())}}}"
    return f"{type(value).__name__} {value!r}"  # 1, 1.0 and True differ


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
