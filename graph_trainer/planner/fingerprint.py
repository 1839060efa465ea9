"""Compare two captured steps: their inputs, ops and collectives."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

from graph_trainer.core.analysis.collectives import entry_text
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.graph.annotations import module_of, tensors_of
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.ordering.members import first_difference
from graph_trainer.core.ordering.sequences import issued_by, waited_text
from graph_trainer.core.simulation.op_costs import CostKind, flops_of, is_causal
from graph_trainer.titan.strict import Strict

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

    Raises:
        VerificationError: a collective of an unknown kind (see `collectives`).
    """

    @cache
    def group(ranks: Ranks) -> str:
        return group_name(ranks, rank, classes)

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
    for issued in issued_by(joint, classes.num_ranks):
        text = entry_text(issued.entry, group(issued.entry[1]))
        collectives.append((f"{text}, {waited_text(issued)}", issued.where))
    return Fingerprint(inputs=tuple(inputs), ops=tuple(ops), collectives=tuple(collectives))


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def group_name(ranks: Ranks, rank: int, classes: RankClasses) -> str:
    """Name a group alike for all parallel groups through the ranks of a class."""
    axes = classes.axes_of_group(ranks, rank)
    if axes is None:  # of experts, over part of an axis: named by what its ranks have in common
        strides = {after - before for before, after in pairwise(ranks)}
        return f"{len(ranks)} ranks {strides.pop()} apart" if len(strides) == 1 else f"{[*ranks]}"
    along = (f"{classes.names[axis]} ({classes.sizes[axis]})" for axis in axes)
    return " and ".join(along) or "self"
