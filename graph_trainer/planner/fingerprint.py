"""Compare two captured steps: their inputs, ops and collectives."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import torch
from torch import fx

from graph_trainer.core.analysis.collectives import collectives, entry_text
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.graph.annotations import (
    annotations_of,
    input_name,
    module_of,
    tags_of,
    tensor_of,
    tensors_of,
)
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.graph.data_sizes import exact_layout
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.ops import argument, aten, is_collective
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.ordering.members import first_difference
from graph_trainer.core.ordering.sequences import issued_by, waited_text
from graph_trainer.core.simulation.collective_costs import placement
from graph_trainer.core.simulation.op_costs import CostKind, flops_of, is_causal
from graph_trainer.titan.strict import Strict

_OF_INDICES = (aten.ge.Scalar, aten.lt.Scalar, aten.sub.Tensor)
"""Ops that compare an index with a number, or subtract one from it."""

Item = tuple[str, str]
"""What both steps must have at the same position, compared literally; and for messages its module
and node, which are not compared."""


class Fingerprint(Strict):
    """The step of any rank of a class; groups are named by the mesh axes that they lie along."""

    inputs: tuple[Item, ...]
    """Parameters, buffers and batch: names, dtypes and local shapes."""
    ops: tuple[Item, ...]
    """Every op with FLOPs, in order, with its result. All kernels of attention count as one op,
    causal or full, because the machine chooses among them. Views, copies and elementwise ops are
    left out, because they depend on the memory layout that a kernel needs."""
    collectives: tuple[Item, ...]
    """Every collective in order: kind, reduction, size, dtype, group, and its wait."""

    def difference(self, captured: Fingerprint) -> str | None:
        """Describe the first item that a captured step has otherwise; None where none is."""
        for kind, planned, now in (
            ("input", self.inputs, captured.inputs),
            ("op", self.ops, captured.ops),
            ("collective", self.collectives, captured.collectives),
        ):
            before, after = [what for what, _ in planned], [what for what, _ in now]
            if before != after:
                place = first_difference(before, after)
                return (
                    f"{kind} {place} of {len(now)} (planned {len(planned)}): planned "
                    f"{_text(planned, place)}; captured {_text(now, place)}"
                )
        return None


def _text(items: tuple[Item, ...], place: int) -> str:
    return " ".join(items[place]).rstrip() if place < len(items) else "nothing more"


def fingerprint_of(joint: JointGraph, rank: int, classes: RankClasses) -> Fingerprint:
    """Compute the fingerprint of the graph that a rank captured. Linear in nodes.

    The process groups of the capture must still exist.

    Raises:
        VerificationError: a collective of an unknown kind (see `collectives`).
    """

    @cache
    def group(ranks: Ranks) -> str:
        """Name a group alike for all parallel groups through the ranks of a class."""
        axes = classes.axes_of_group(ranks, rank)
        if axes is None:
            return f"ranks {list(ranks)}"
        along = (f"{classes.names[axis]} ({classes.sizes[axis]})" for axis in axes)
        return " and ".join(along) or "self"

    inputs, ops, collectives = [], [], []
    for kind in InputKind:
        for spec, placeholders in joint.inputs_of(kind):
            shapes = [_shape(t) for node in placeholders for t in tensors_of(node)]
            trained = "trained " if spec.requires_grad else ""
            inputs.append((f"{trained}{kind.value} '{spec.name}' {' '.join(shapes)}", ""))
    for node in compute_nodes(joint.graph):
        flops, kind_of_op = flops_of(node)
        if not flops:
            continue
        name = str(node.target)
        if kind_of_op is CostKind.ATTENTION:
            name = "attention backward" if "backward" in name else "attention"
            name = f"{'causal' if is_causal(node) else 'full'} {name}"
        where = f"in module '{module_of(node)}' (node {node.name})"
        ops.append((f"{name} {_shape(tensors_of(node)[0])}", where))
    for each in issued_by(joint, classes.num_ranks):
        text = entry_text(each.entry, group(each.entry[1]))
        collectives.append((f"{text}, {waited_text(each)}", each.where))
    return Fingerprint(inputs=tuple(inputs), ops=tuple(ops), collectives=tuple(collectives))


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def step_key(joint: JointGraph, rank: int, classes: RankClasses, devices_per_node: int) -> bytes:
    """Return what decides the plan of a rank, by its step as captured: equal for equal plans.

    Two ranks have it if their graphs are equal node by node, annotations included, but for the
    names of process groups, which lie along the same axes of the mesh, on as many machines each,
    and for numbers that are compared with indices or added to them, such as the first row of an
    embedding that a rank has. Passes must see nothing of a rank but its graph. Linear in nodes.
    """
    ranks_of = {str(argument(c.node, "group_name")): c.ranks for c in collectives(joint)}
    place_of = {name: place for place, name in enumerate(ranks_of)}
    groups: list[object] = [[place_of[name] for name in sorted(place_of)]]
    for ranks in ranks_of.values():
        shifted = tuple(member - min(ranks) for member in ranks)
        machines = [placement(group, devices_per_node) for group in (ranks, shifted)]
        groups.append((len(ranks), machines, classes.axes_of_group(ranks, rank) or ranks))
    key = hashlib.sha256(repr((groups, joint.rounding)).encode())
    # a layout has the mesh of this rank; its tensors are those of the nodes
    for given in joint.signature.inputs:
        what = (given.kind, given.name, given.requires_grad, given.aliases, given.mutated)
        key.update(repr((what, given.layout.num_tensors)).encode())
    for returned in joint.signature.outputs:
        key.update(repr((returned.kind, returned.name, returned.layout.num_tensors)).encode())

    def without_offset(value: Any) -> Any:
        return "offset" if type(value) is int else value

    def without_name(value: Any) -> Any:
        known = isinstance(value, str) and value in place_of
        return f"group {place_of[value]}" if known else value

    for node in joint.graph.nodes:
        arguments: Any = (node.args, node.kwargs)
        if is_collective(node):
            arguments = fx.node.map_aggregate(arguments, without_name)
        elif node.target in _OF_INDICES and not tensor_of(node).is_floating_point():
            arguments = fx.node.map_aggregate(arguments, without_offset)
        annotated = {name: without_name(value) for name, value in annotations_of(node).items()}
        values = [(t.dtype, t.device, exact_layout(t)) for t in tensors_of(node)]
        tags = (tags_of(node), input_name(node))
        described = (node.name, node.op, str(node.target), arguments, annotated, tags, values)
        key.update(repr(described).encode())
    return key.digest()
