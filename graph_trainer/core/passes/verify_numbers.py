"""Run a graph before and after a pass on the same small real values, and compare the results."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.analysis.one_process import (
    REDUCTIONS,
    SIMULATED,
    OneProcess,
    same_random_numbers,
    values_for,
)
from graph_trainer.core.graph.annotations import tensor_of, tensors_of
from graph_trainer.core.graph.data_sizes import storage_bytes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument, collective_name, is_collective, subgraphs
from graph_trainer.core.graph.signature import OutputKind, with_parts
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.sequences import may_communicate
from graph_trainer.core.passes.report import EQUAL
from graph_trainer.core.tensor_diff import Difference, Results, compare
from graph_trainer.core.torch_private import FakeTensor
from graph_trainer.core.units import GIB
from graph_trainer.errors import VerificationError

NOT_COMPARED = "numbers not compared: "
"""How a reason begins."""
ALIKE = " where all ranks hold the same"
"""What is added where only that could be compared."""
MOST_BYTES = GIB
"""The most bytes of inputs, and of what a run makes at once, of a graph that is run."""
ROUNDING = 8
"""How many units in the last place, of the coarsest dtype of the graph and of the largest number
of a result, a pass with `changes_sums` may change a result by."""


@dataclass(slots=True)
class _Ran:
    """What a graph gave."""

    results: Results
    odd: dict[str, str] = field(default_factory=dict)
    """By node, how its result differs from its metadata."""


class Numbers:
    """The numbers of a graph as passes change it. Linear in nodes, and a run of the step a pass.

    Args:
        joint: the graph before the first pass.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.start(joint)

    def start(self, joint: JointGraph) -> None:
        """Compare the next pass's graph with this one."""
        self._before = copy_graph(joint)
        self._ran: _Ran | None = None
        self._why_not = why_not(joint)
        if not self._why_not:
            try:
                self._ran = _run(joint)
            except Exception as error:
                self._why_not = f"it does not run on made-up values: {_text(error)}"

    def check(self, joint: JointGraph, *, changes_sums: bool = False) -> str:
        """Compare a graph with that before the pass, and take it for the next comparison.

        Args:
            changes_sums: whether the pass may change results by rounding.

        Returns:
            how the numbers compare, or why they were not compared.

        Raises:
            VerificationError: with the first result that differs, or the first node that cannot
                run or makes another shape or dtype than its metadata says.
        """
        before, was = self._before, self._ran
        reason = self._why_not or why_not(joint)
        if was is None or reason:
            self.start(joint)
            return f"{NOT_COMPARED}{reason}"
        try:
            now = _run(joint)
        except Exception as error:
            raise VerificationError(
                f"it does not run on the values on which it ran before: {_text(error)}"
            ) from error
        for name, text in now.odd.items():
            if name not in was.odd:
                raise VerificationError(f"node '{name}' {text}")
        verdict = self._compared(before, joint, was, now, changes_sums)
        self._before, self._ran = copy_graph(joint), now
        return verdict

    def _compared(
        self, before: JointGraph, after: JointGraph, was: _Ran, now: _Ran, changes_sums: bool
    ) -> str:
        grain = ROUNDING * _coarsest(before) if changes_sums else 0.0
        differences, wrong = _differences(was, now, grain)
        where, replaced = "", _replaced(before, after) if wrong else ()
        if replaced:
            # a gather over other ranks, or of bytes, gives other multiples of this rank's values
            was, now = _run(before, alike=True), _run(after, alike=True)
            differences, wrong = _differences(was, now, grain)
            where = (
                " where all ranks hold the same; graph-trainer bisect-passes compares real ranks"
            )
        if wrong:
            again = compare(now.results, _run(after, alike=bool(replaced)).results)
            unstable = [difference.name for difference in again]
            wrong = [d for d in wrong if d.name not in unstable]
            if unstable and not wrong:
                return f"{NOT_COMPARED}{unstable[0]} differs from run to run"
        kinds = {kind for kind, *_ in replaced}
        if wrong and _are_other_kinds(before, after, kinds):
            return (
                f"{NOT_COMPARED}{', '.join(sorted(kinds))} replaces another collective, "
                "which one process cannot simulate; graph-trainer bisect-passes compares real ranks"
            )
        if wrong:
            first, more = wrong[0], len(wrong) - 1
            raise VerificationError(
                f"{first.name} is another than before the pass, on the same values: "
                f"{first.note or f'by at most {first.max_abs:.3g}'}"
                f"{f'; so are {more} more results' if more else ''}. A pass keeps every bit; with "
                "changes_sums=True it may round otherwise"
            )
        if differences:
            most = max(differences, key=lambda difference: difference.max_abs)
            return f"equal up to rounding{where}: {most.name} by at most {most.max_abs:.3g}"
        lost = [n for n, parts in was.results.items() if not all(map(_is_finite, parts))]
        return f"{EQUAL}{where}" + (f", and {lost[0]} is not finite" if lost else "")


def why_not(joint: JointGraph) -> str:
    """Return why a graph cannot be run here in one process; empty where it can. Linear in nodes."""
    tensors = [t for node in joint.graph.nodes for t in tensors_of(node)]
    devices = {t.device.type for t in tensors}
    if devices - {"cpu", "cuda"} or ("cuda" in devices and not torch.cuda.is_available()):
        return f"no real values on {', '.join(sorted(devices))} here"
    if any(not isinstance(n, int) for t in tensors for n in (*t.shape, *t.stride())):
        return "data decides its sizes"
    inputs = sum(storage_bytes(tensor_of(node)) for node in joint.placeholders())
    needed = inputs + lifetimes(joint).peak_bytes
    if needed > MOST_BYTES:
        return f"a run needs {needed / GIB:.1f} GiB, more than {MOST_BYTES / GIB:.1f} GiB"
    # an unknown op may wait for the other ranks, which may not run it
    alone = not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_world_size() == 1
    for node, inner in _all_nodes(joint.graph):
        if node.op == "get_attr" and not inner:
            value = getattr(joint.graph_module, str(node.target), None)
            if isinstance(value, FakeTensor):
                return f"the constant '{node.target}' has no values"
        if not may_communicate(node):
            continue
        reduction = argument(node, "reduce_op", "sum")
        simulated = is_collective(node) and collective_name(node) in SIMULATED and not inner
        if (is_collective(node) or not alone) and not (simulated and reduction in REDUCTIONS):
            return (
                f"node '{node.name}' ({node.target}) communicates, or may, in a way that is not "
                "simulated"
            )
    return ""


def _all_nodes(graph: fx.Graph, inner: bool = False) -> list[tuple[fx.Node, bool]]:
    """List the nodes of a graph and of its subgraphs, and whether each is in a subgraph."""
    nodes = []
    for node in graph.nodes:
        nodes.append((node, inner))
        for module in subgraphs(node):
            nodes += _all_nodes(module.graph, True)
    return nodes


class _Watched(OneProcess):
    """Also compares what every node makes with its metadata."""

    odd: dict[str, str]

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            several = result if isinstance(result, (tuple, list)) else [result]
            made = [(tuple(t.shape), t.dtype) for t in several if isinstance(t, torch.Tensor)]
            said = [(tuple(t.shape), t.dtype) for t in tensors_of(n)]
            if made != said:
                self.odd[n.name] = f"makes {made} of real values and its metadata says {said}"
        return result


def _run(joint: JointGraph, *, alike: bool = False) -> _Ran:
    inputs = values_for(joint)
    watched = _Watched(joint.graph_module, alike=alike)
    watched.odd = {}
    with same_random_numbers(), torch.no_grad():
        outputs = watched.run(*inputs)
    results: Results = {}
    for output, parts in with_parts(joint.signature.outputs, list(outputs)):
        gradient = output.kind is OutputKind.GRADIENT
        results[f"gradient of '{output.name}'" if gradient else "the loss"] = list(parts)
    for spec, tensors in with_parts(joint.signature.inputs, inputs):
        results[f"what the step leaves in {spec.kind.value} '{spec.name}'"] = list(tensors)
    return _Ran(results, watched.odd)


def _differences(was: _Ran, now: _Ran, grain: float) -> tuple[list[Difference], list[Difference]]:
    """List the results that differ, and those of them that do by more than `grain` times their
    largest number."""
    differences = compare(was.results, now.results)
    return differences, [
        d for d in differences if d.note or not d.max_abs <= grain * _largest(was.results[d.name])
    ]


def _largest(tensors: list[torch.Tensor]) -> float:
    finite = [t[t.isfinite()].abs() for t in tensors]
    return max((float(t.max()) for t in finite if t.numel()), default=0.0)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _coarsest(joint: JointGraph) -> float:
    """The largest unit in the last place of 1 among the dtypes of a graph."""
    dtypes = {t.dtype for node in joint.graph.nodes for t in tensors_of(node)}
    return max(
        (torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex), default=0.0
    )


_Issued = tuple[str, str, str]
"""Kind, group and dtype of a collective."""


def _issued(joint: JointGraph) -> Counter[_Issued]:
    return Counter(
        (collective_name(n), str(argument(n, "group_name")), str(tensors_of(n)[0].dtype))
        for n in joint.graph.nodes
        if is_collective(n)
    )


def _replaced(before: JointGraph, after: JointGraph) -> tuple[_Issued, ...]:
    """Return the collectives that are new where others are gone; none where a pass only adds
    collectives or only removes some."""
    was, now = _issued(before), _issued(after)
    return tuple(now - was) if was - now else ()


def _are_other_kinds(before: JointGraph, after: JointGraph, kinds: set[str]) -> bool:
    """Return whether there are more collectives of these kinds and fewer of another."""
    was, now = (Counter(kind for kind, *_ in _issued(j).elements()) for j in (before, after))
    return bool(was - now) and not kinds.isdisjoint(now - was)


def _text(error: Exception) -> str:
    # fx puts the whole graph after the first line
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
