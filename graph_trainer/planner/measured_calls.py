"""The distinct ops and collectives of a plan's step, as calls that another process can repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from graph_trainer.core.graph.annotations import value_of
from graph_trainer.core.graph.data_sizes import expected, shape_of, stride_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument, schema_of
from graph_trainer.core.simulation.hardware import Hardware, OpKind
from graph_trainer.core.simulation.kernel_launches import moves_rows
from graph_trainer.core.simulation.op_costs import Cost, CostKind, costs, dtype_of, measured_name
from graph_trainer.core.simulation.simulate import Simulation
from graph_trainer.planner.calibration import CollectiveSample, OpSample

_ENDLESS = 1e30
"""Bytes per second at which nothing is bound by memory."""


class TensorSpec(NamedTuple):
    """A tensor to make."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op on arguments of some shapes, in which a TensorSpec stands for a tensor."""

    target: str
    """Such as "aten.mm.default"."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sample: OpSample
    """With seconds 0: what is predicted of it, and how often the step runs it."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective to issue and wait for."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    group_name: str
    """Its group's name in the arguments, in whose place another group is put."""
    sample: CollectiveSample
    """With seconds 0."""


def model_costs(joint: JointGraph, base: Hardware) -> dict[fx.Node, Cost]:
    """Return the costs that samples are compared with: at the scalar efficiencies of the base,
    without launches, and those of matmuls and attention without their bytes."""
    plain = replace(base, launch_seconds=0.0, efficiencies=())
    by_memory = costs(joint, plain)
    by_flops = costs(joint, replace(plain, memory_bytes_per_second=_ENDLESS))
    return {
        node: cost if cost.kind is CostKind.MEMORY else by_flops[node]._replace(bytes=cost.bytes)
        for node, cost in by_memory.items()
    }


def sample_of(node: fx.Node, cost: Cost) -> OpSample | None:
    """Return what is predicted of a node, as a sample of 0 seconds; None of what costs nothing.

    Args:
        cost: of `model_costs`.
    """
    schema = schema_of(node)
    if schema is None or cost.kind in (CostKind.FREE, CostKind.HOST_COPY) or cost.seconds <= 0:
        return None
    is_rows = cost.kind is CostKind.MEMORY and moves_rows(node)
    kind = OpKind.ROWS if is_rows else OpKind(cost.kind)
    by_bytes = kind in (OpKind.MEMORY, OpKind.ROWS)
    return OpSample(
        kind=kind,
        op=measured_name(node),
        dtype=str(dtype_of(node)).removeprefix("torch."),
        size=float(cost.bytes if by_bytes else cost.flops),
        model_seconds=cost.seconds,
        seconds=0.0,
        bytes=0 if by_bytes else cost.bytes,
        launches=max(1, cost.launches),
    )


def op_calls(simulation: Simulation, base: Hardware, most: int) -> list[OpCall]:
    """List the distinct ops of a step that take time, those with the greatest part of it first.

    Linear in nodes, but for the sort.

    Args:
        most: how many to list.
    """
    calls: dict[str, OpCall] = {}
    for node, cost in model_costs(simulation.joint, base).items():
        sample = sample_of(node, cost)
        if sample is None:
            continue
        args, kwargs = _arguments(node)
        key = f"{node.target} {args} {kwargs}"
        if key in calls:
            call = calls[key]
            counted = replace(call.sample, count=call.sample.count + 1)
            calls[key] = replace(call, sample=counted)
        else:
            calls[key] = OpCall(str(node.target), args, kwargs, sample)

    def share(call: OpCall) -> float:
        sample = call.sample
        least = base.launch_seconds * sample.launches
        return sample.count * max(sample.model_seconds, least)

    return sorted(calls.values(), key=share, reverse=True)[:most]


def collective_calls(
    simulation: Simulation, ranks: int, most: int
) -> tuple[list[CollectiveCall], int]:
    """List the distinct collectives of a step, those that move the most bytes in all first.

    Args:
        ranks: that measure. A group with another rank cannot be measured.
        most: how many to list.

    Returns:
        The calls, and the number of distinct collectives whose groups have more ranks.
    """
    calls: dict[tuple[object, ...], CollectiveCall] = {}
    beyond: set[tuple[object, ...]] = set()
    for issued in simulation.collectives:
        args, kwargs = _arguments(issued.node)
        key = (issued.kind, issued.ranks, repr(args), repr(kwargs))
        if len(issued.ranks) == 1:
            continue
        if max(issued.ranks) >= ranks:
            beyond.add(key)
        elif key in calls:
            call = calls[key]
            counted = replace(call.sample, count=call.sample.count + 1)
            calls[key] = replace(call, sample=counted)
        else:
            sample = CollectiveSample(
                kind=issued.kind,
                ranks=issued.ranks,
                input_bytes=issued.input_bytes,
                output_bytes=issued.output_bytes,
                largest_split_bytes=issued.largest_split_bytes,
                seconds=0.0,
            )
            group = str(argument(issued.node, "group_name"))
            calls[key] = CollectiveCall(str(issued.node.target), args, kwargs, group, sample)

    def moved(call: CollectiveCall) -> int:
        return call.sample.count * (call.sample.input_bytes + call.sample.output_bytes)

    return sorted(calls.values(), key=moved, reverse=True)[:most], len(beyond)


def _arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a node's arguments, with a TensorSpec for each tensor and a number for each size."""

    def value(source: fx.Node) -> Any:
        return _described(value_of(source))

    args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), value)
    return _plain(args), _plain(kwargs)


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(shape_of(value), stride_of(value), value.dtype)
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return an argument in Python's own containers, which pickle."""
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, torch.SymInt):
        return expected(value)
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def real_value(value: Any, device: torch.device, bound: int = 2) -> Any:
    """Return an argument with real tensors in the places of its TensorSpecs.

    Args:
        bound: integers of tensors are below it, so that they are indices of every other argument.
    """
    if isinstance(value, TensorSpec):
        return _tensor(value, device, bound)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, (list, tuple)):
        return type(value)([real_value(item, device, bound) for item in value])
    if isinstance(value, dict):
        return {key: real_value(item, device, bound) for key, item in value.items()}
    return value


def _tensor(spec: TensorSpec, device: torch.device, bound: int) -> torch.Tensor:
    """Return a tensor of random numbers, or of True, for which an assertion holds."""
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    if 0 in spec.shape:
        return tensor
    flat = tensor.as_strided((_span(spec),), (1,))
    if spec.dtype is torch.bool:
        return tensor.fill_(True)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        flat.normal_() if spec.dtype.itemsize > 1 or spec.dtype.is_complex else flat.zero_()
    else:
        flat.random_(0, max(1, bound))
    return tensor


def _span(spec: TensorSpec) -> int:
    """Return the elements of storage between the first and the last of a tensor."""
    pairs = zip(spec.shape, spec.stride, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def real_arguments(
    call: OpCall | CollectiveCall, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the arguments of a call."""
    bound = _least_size(list(call.args) + list(call.kwargs.values()))
    args, kwargs = real_value(call.args, device, bound), real_value(call.kwargs, device, bound)
    if call.target.startswith("aten._grouped_mm"):
        # offsets: the ends of groups of equal numbers of rows, or columns
        offsets = args[2] if len(args) > 2 else kwargs["offs"]
        a, b = args[:2]
        of_a = a.shape[-1] if b.ndim == 2 else a.shape[0]
        length = b.shape[-1] if a.ndim == 3 else of_a
        groups = offsets.numel()
        ends = [length * (place + 1) // groups for place in range(groups)]
        offsets.copy_(torch.tensor(ends, dtype=offsets.dtype))
    return args, kwargs


def _least_size(values: Sequence[Any]) -> int:
    """Return the least size above 1 of any dimension and number among arguments."""
    sizes = [2**31 - 1]
    for value in values:
        if isinstance(value, TensorSpec):
            sizes += [size for size in value.shape if size > 1]
        elif isinstance(value, (list, tuple)):
            sizes.append(_least_size(value))
        elif type(value) is int and value > 1:
            sizes.append(value)
    return min(sizes)


def op_named(target: str) -> Any:
    """Return the op of a name such as "aten.mm.default"."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
