"""Compare two captured steps: their inputs, ops and collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import torch

from graph_trainer.core.analysis.collectives import entry_text
from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.core.graph.annotations import module_of, tensors_of
from graph_trainer.core.graph.collective_kinds import Ranks
from graph_trainer.core.graph.joint_graph import InputKind, JointGraph, compute_nodes
from graph_trainer.core.ordering.sequences import Issued, issued_by, waited_text
from graph_trainer.core.simulation.op_costs import Kind, flops_of, is_causal


@dataclass(frozen=True, slots=True)
class Entry:
    """An item that the planned and the captured step must share, at the same position."""

    what: str
    """The item; it is compared literally."""
    where: str
    """Module and node, for messages; they are not compared."""

    def __str__(self) -> str:
        return f"{self.what} {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The step of any rank of a class; groups are named by the mesh axes that they lie along."""

    inputs: tuple[Entry, ...]
    """Parameters, buffers and batch: names, dtypes and local shapes."""
    computes: tuple[Entry, ...]
    """Every op with FLOPs, in order, with its result. All kernels of attention count as one op,
    causal or full, because the machine chooses among them. Views, copies and elementwise ops are
    left out, because they depend on the memory layout that a kernel needs."""
    issues: tuple[Entry, ...]
    """Every collective in order: kind, reduction, size, dtype, group, and its wait."""

    @property
    def digest(self) -> str:
        """A hash of what is compared."""
        parts = [[entry.what for entry in part] for part in self.parts().values()]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def parts(self) -> dict[str, tuple[Entry, ...]]:
        """Return the three lists by the name of their items."""
        return {"input": self.inputs, "op": self.computes, "collective": self.issues}


def fingerprint_of(joint: JointGraph, rank: int, classes: RankClasses) -> Fingerprint:
    """Compute the fingerprint of the graph that a rank captured. Linear in nodes.

    The process groups of the capture must still exist.

    Raises:
        VerificationError: a collective of an unknown kind (see `collectives`).
    """

    @cache
    def group(ranks: Ranks) -> str:
        """Name a group alike for all parallel groups through the ranks of a class."""
        axes = classes.axes_of_group(ranks, rank) if rank in ranks else None
        if axes is None:
            return f"ranks {list(ranks)}"
        along = (f"{classes.names[axis]} ({classes.sizes[axis]})" for axis in axes)
        return " and ".join(along) or "self"

    def issue(each: Issued) -> Entry:
        text = entry_text(each.entry, group(each.entry[1]))
        return Entry(f"{text}, {waited_text(each)}", each.where)

    issued = issued_by(joint, classes.num_ranks)
    return Fingerprint(tuple(_inputs(joint)), tuple(_computes(joint)), tuple(map(issue, issued)))


def first_difference(planned: Fingerprint, captured: Fingerprint) -> str | None:
    """Describe the first item that differs, of both steps; None where nothing differs."""
    pairs = zip(planned.parts().items(), captured.parts().values(), strict=True)
    for (name, before), after in pairs:
        for place, (a, b) in enumerate(zip_longest(before, after)):
            if a is None or b is None or a.what != b.what:
                return (
                    f"{name} {place} of {len(after)} (planned {len(before)}): planned "
                    f"{a or 'nothing more'}; captured {b or 'nothing more'}"
                )
    return None


def _inputs(joint: JointGraph) -> Iterator[Entry]:
    for kind in InputKind:
        for spec, placeholders in joint.inputs_of(kind):
            shapes = [_tensor(t) for node in placeholders for t in tensors_of(node)]
            trained = "trained " if spec.requires_grad else ""
            yield Entry(f"{trained}{kind.value} '{spec.name}' {' '.join(shapes)}", "")


def _computes(joint: JointGraph) -> Iterator[Entry]:
    for node in compute_nodes(joint.graph):
        flops, kind = flops_of(node)
        if not flops:
            continue
        name = str(node.target)
        if kind is Kind.ATTENTION:
            name = "attention backward" if "backward" in name else "attention"
            name = f"{'causal' if is_causal(node) else 'full'} {name}"
        yield Entry(
            f"{name} {_tensor(tensors_of(node)[0])}",
            f"in module '{module_of(node)}' (node {node.name})",
        )


def _tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
