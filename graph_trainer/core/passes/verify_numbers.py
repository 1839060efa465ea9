"""The expensive checks after a pass: every value on fake tensors against its metadata, and the
results on the same small real values against those before the pass."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.analysis.node_digests import (
    GraphRun,
    Observed,
    first_differing_node,
    partners_of,
    run_graph,
)
from graph_trainer.core.analysis.one_process import (
    REDUCTIONS,
    SIMULATED,
    OneProcess,
    same_random_numbers,
    values_for,
)
from graph_trainer.core.graph.annotations import (
    module_of,
    phase_of,
    tensor_of,
    tensors_of,
    value_of,
)
from graph_trainer.core.graph.data_sizes import data_sizes_of, storage_bytes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument, collective_name, is_collective, subgraphs
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.agreement import (
    Agreement,
    OneRank,
    is_collective_failure,
    reason_of,
)
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.ordering.sequences import may_communicate
from graph_trainer.core.passes.report import EQUAL
from graph_trainer.core.tensor_diff import Difference, Results, compare, tensors_in
from graph_trainer.core.torch_private import FakeTensor, FakeTensorMode, detect_fake_mode
from graph_trainer.core.units import GIB
from graph_trainer.errors import CollectiveError, VerificationError

NOT_COMPARED = "numbers not compared: "
"""How a reason begins."""
ALIKE = " where all ranks hold the same"
"""What is added where only that could be compared."""
MOST_BYTES = GIB
"""The most bytes of inputs, and of what a run makes at once, of a graph that is run."""
ROUNDING = 8
"""How many units in the last place, of the coarsest dtype of the graph and of the largest number
of a result, a pass with `changes_sums` may change a result by."""

_Issued = tuple[str, str, str]
"""Kind, group and dtype of a collective."""


def verify_values(joint: JointGraph) -> None:
    """Check that the result of every node is what its metadata says: shape, stride, dtype, device.

    Runs each op once on fake tensors; linear in nodes, but as slow as capture's second half.

    Raises:
        VerificationError: for the first node that differs, with its result and its metadata, or
            that cannot run at all.
    """
    mode = detect_fake_mode([value_of(n) for n in joint.placeholders()]) or FakeTensorMode()
    # constants in the subgraph of a higher-order op are real tensors
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode, torch.no_grad():
            checker = _Checker(joint.graph_module)
            checker.extra_traceback = False  # its errors name the node themselves
            checker.run(*[value_of(n) for n in joint.placeholders()])
    finally:
        mode.allow_non_fake_inputs = allowed


class _Checker(fx.Interpreter):
    def run_node(self, n: fx.Node) -> object:
        if isinstance(value_of(n), torch.SymInt):
            return value_of(n)  # another reading would give another symbol
        try:
            result = super().run_node(n)
        except Exception as error:
            raise VerificationError(
                f"node '{n.name}' ({n.target}) cannot run on what it reads: "
                f"{type(error).__name__}: {error}"
            ) from error
        if n.op == "call_function":
            real = list(map(_describe, tensors_in(result)))
            traced = list(map(_describe, tensors_of(n)))
            if real != traced:
                raise VerificationError(
                    f"node '{n.name}' ({n.target}) makes {real} and its metadata says {traced}"
                )
        return result


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tuple(tensor.stride())} {tensor.dtype} {tensor.device}"


@dataclass(frozen=True, slots=True)
class _Verified:
    """A graph, its run, and by node how its value differs from its metadata."""

    joint: JointGraph
    run: GraphRun
    mismatches: dict[str, str]


class Numbers:
    """The numbers of a graph, given before the first pass, as passes change it. Linear in nodes,
    and a run of the step a pass.

    Args:
        agreement: the ranks that run the passes together. Several ranks issue the collectives of
            the graph, each on values of its own; one rank simulates them, see `OneProcess`.
    """

    def __init__(self, joint: JointGraph, agreement: Agreement | None = None) -> None:
        self._ranks = agreement or OneRank()
        self._is_simulated = len(self._ranks.ranks) == 1
        self.start(joint)

    def start(self, joint: JointGraph) -> None:
        """Compare the next pass's graph with this one."""
        self._before: _Verified | None = None
        self._why_not = self._why_not_run(joint)
        if self._why_not:
            return
        try:
            self._before = self._run(copy_graph(joint))
        except Exception as error:
            _raise_if_of_other_rank(error)
            self._why_not = f"it does not run on made-up values: {_text(error)}"
        self._why_not = max(self._ranks.gather(self._why_not))

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
        before = self._before
        reason = self._why_not or self._why_not_run(joint)
        if before is None or reason:
            self.start(joint)
            return f"{NOT_COMPARED}{reason}"
        if not self._is_simulated:
            check_order_across_ranks(joint, self._ranks)
        try:
            after = self._before = self._run(copy_graph(joint))
        except Exception as error:
            _raise_if_of_other_rank(error)
            raise VerificationError(
                f"it does not run on the values on which it ran before: {_text(error)}"
            ) from error
        if new := [name for name in after.mismatches if name not in before.mismatches]:
            raise VerificationError(f"node '{new[0]}' {after.mismatches[new[0]]}")
        return self._compared(before, after, changes_sums)

    def _why_not_run(self, joint: JointGraph) -> str:
        """Return why a graph is not run, on this rank or another; empty where it is."""
        return max(self._ranks.gather(why_not(joint, self._is_simulated)))

    def _run(self, joint: JointGraph, *, alike: bool = False) -> _Verified:
        """Run a graph on made-up values; with `alike`, as if all ranks had the same values."""
        mismatches: dict[str, str] = {}

        def compare_with_metadata(node: fx.Node, value: Any) -> None:
            if node.op != "call_function":
                return
            results, traced = tensors_in(value), tensors_of(node)
            if len(results) != len(traced) or not all(map(_matches, results, traced)):
                real = [(tuple(t.shape), t.dtype) for t in results]
                expected = [(tuple(t.shape), t.dtype) for t in traced]
                mismatches[node.name] = (
                    f"makes {real} of real values and its metadata says {expected}"
                )

        simulated = functools.partial(OneProcess, alike=alike)
        values = values_for(joint, seed=0 if self._is_simulated else dist.get_rank())
        with same_random_numbers():
            run = run_graph(
                joint,
                values,
                interpreter=simulated if self._is_simulated else Observed,
                observe=compare_with_metadata,
            )
        return _Verified(joint, run, mismatches)

    def _compared(self, before: _Verified, after: _Verified, changes_sums: bool) -> str:
        """Return how the results of two graphs compare, or raise. All ranks decide together."""
        grain = _grain(before.joint) if changes_sums else 0.0
        differences, wrong = _differences(before, after, grain)
        replaced: list[_Issued] = []
        where, alike = "", False
        if self._is_simulated and wrong:
            replaced = _replaced(before.joint, after.joint)
            alike = bool(replaced)
        if alike:
            # a gather over other ranks, or of bytes, gives other multiples of this rank's values
            before, after = self._run(before.joint, alike=True), self._run(after.joint, alike=True)
            differences, wrong = _differences(before, after, grain)
            where = f"{ALIKE}; graph-trainer bisect-passes compares real ranks"
        if any(self._ranks.gather(bool(wrong))):
            repeated = self._run(after.joint, alike=alike).run
            unstable = {d.name for d in compare(after.run.results, repeated.results)}
            stable = [d for d in wrong if d.name not in unstable]
            kinds = {kind for kind, *_ in replaced}
            if stable and kinds & _kinds_for_others(before.joint, after.joint):
                return (
                    f"{NOT_COMPARED}{', '.join(sorted(kinds))} replaces another collective, which "
                    "one process cannot simulate; graph-trainer bisect-passes compares real ranks"
                )
            self._refuse(before, after, repeated, stable)
            unstable_name = wrong[0].name if wrong else "a result of another rank"
            return f"{NOT_COMPARED}{unstable_name} differs from run to run"
        if differences:
            most = max(differences, key=lambda difference: difference.max_abs)
            return f"equal up to rounding{where}: {most.name} by at most {most.max_abs:.3g}"
        for name, parts in after.run.results.items():
            if not all(bool(part.isfinite().all()) for part in parts):
                return f"{EQUAL}{where}, and {name} is not finite"
        return f"{EQUAL}{where}"

    def _refuse(
        self, before: _Verified, after: _Verified, repeated: GraphRun, wrong: list[Difference]
    ) -> None:
        """Raise where results of a rank differ: on all ranks, with the earliest node of any."""
        message, position = "", len(after.joint.graph.nodes)
        if wrong:
            first, others = wrong[0], len(wrong) - 1
            node = first_differing_node(
                (before.joint, before.run),
                (after.joint, after.run),
                repeated,
                [difference.name for difference in wrong],
            )
            message = (
                f"{first.name} is another than before the pass, on the same values: "
                f"{first.note or f'by at most {first.max_abs:.3g}'}"
                f"{f'; so are {others} more results' if others else ''}"
            )
            if node is not None:
                position = list(after.joint.graph.nodes).index(node)
                message += f"; the first node that differs: {_described(node, before, after)}"
        messages = [
            (at, rank, text)
            for rank, (at, text) in zip(
                self._ranks.ranks, self._ranks.gather((position, message)), strict=True
            )
            if text
        ]
        if messages:
            _, rank, text = min(messages)
            on_rank = "" if self._is_simulated else f"on rank {rank}: "
            raise VerificationError(
                f"{on_rank}{text}. A pass keeps every bit; with changes_sums=True it may round "
                "otherwise"
            )


def _raise_if_of_other_rank(error: Exception) -> None:
    """Raise a CollectiveError where another rank has ended or did not arrive."""
    if isinstance(error, RuntimeError) and is_collective_failure(error):
        place = "a collective of the graph that verify_passes runs"
        raise CollectiveError(place, reason_of(error)) from error


def _described(node: fx.Node, before: _Verified, after: _Verified) -> str:
    """Describe a node: what it calls, where it is from, and what it is compared with."""
    partner = partners_of(before.joint, after.joint).get(node)
    phase, module = phase_of(node), module_of(node)
    was = "" if partner is None else partner.format_node() or ""
    is_kept = partner is not None and partner.name == node.name
    facts = [
        "kept by the pass" if is_kept else "inserted by the pass",
        phase.value if phase else "",
        f"module {module}" if module else "",
        f"before: {was}" if was else "",
    ]
    text = node.format_node() or "the values that the graph returns"
    return f"{text} ({', '.join(filter(None, facts))})"


def _grain(joint: JointGraph) -> float:
    """Return `ROUNDING` units in the last place of 1, of the coarsest dtype of a graph."""
    dtypes = {t.dtype for node in joint.graph.nodes for t in tensors_of(node)}
    fractions = [d for d in dtypes if d.is_floating_point or d.is_complex]
    return ROUNDING * max((torch.finfo(d).eps for d in fractions), default=0.0)


def _differences(
    before: _Verified, after: _Verified, grain: float
) -> tuple[list[Difference], list[Difference]]:
    """Return the results that differ, and those of them that differ by more than rounding."""
    was = before.run.results
    differences = compare(was, after.run.results)
    return differences, [d for d in differences if not _is_rounding(d, was, grain)]


def _replaced(before: JointGraph, after: JointGraph) -> list[_Issued]:
    """List the new collectives of a pass that has taken others out."""
    issued, issued_now = _issued(before), _issued(after)
    return list(issued_now - issued) if issued - issued_now else []


def _kinds_for_others(before: JointGraph, after: JointGraph) -> set[str]:
    """Return the kinds of collectives of which there are more, where there are fewer of others."""
    issued = Counter(kind for kind, *_ in _issued(before).elements())
    issued_now = Counter(kind for kind, *_ in _issued(after).elements())
    return set(issued_now - issued) if issued - issued_now else set()


def why_not(joint: JointGraph, is_simulated: bool) -> str:
    """Return why a graph cannot be run here, in one process where the other ranks are simulated;
    empty where it can. Linear in nodes."""
    tensors = [t for node in joint.graph.nodes for t in tensors_of(node)]
    devices = {t.device.type for t in tensors}
    if devices - {"cpu", "cuda"} or ("cuda" in devices and not torch.cuda.is_available()):
        return f"no real values on {', '.join(sorted(devices))} here"
    inputs = [tensor_of(node) for node in joint.placeholders()]
    sizes = data_sizes_of(inputs[0]) if inputs else None
    # of sizes that data decide the greatest: the values made here may send all tokens to one rank
    with sizes.assuming(sizes.most_rows()) if sizes is not None else contextlib.nullcontext():
        needed = sum(map(storage_bytes, inputs)) + lifetimes(joint).peak_bytes
    if needed > MOST_BYTES:
        return f"a run needs {needed / GIB:.1f} GiB, more than {MOST_BYTES / GIB:.1f} GiB"
    # an unknown op may wait for the other ranks, which may not run it
    alone = len(Agreement().ranks) == 1
    for node, inner in _all_nodes(joint.graph):
        if node.op == "get_attr" and not inner:
            value = getattr(joint.graph_module, str(node.target), None)
            if isinstance(value, FakeTensor):
                return f"the constant '{node.target}' has no values"
        if not is_simulated or not may_communicate(node):
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


def _matches(real: torch.Tensor, traced: torch.Tensor) -> bool:
    """Tell whether shape and dtype are those of metadata; sizes that data decide are any."""
    if real.dtype != traced.dtype or real.ndim != traced.ndim:
        return False
    sizes = zip(real.shape, traced.shape, strict=True)
    return all(size == expected for size, expected in sizes if isinstance(expected, int))


def _is_rounding(difference: Difference, was: Results, grain: float) -> bool:
    """Tell whether a result differs by at most `grain` times its largest number."""
    if difference.note:
        return False
    finite = [tensor[tensor.isfinite()] for tensor in was[difference.name]]
    largest = max(
        (float(numbers.abs().max()) for numbers in finite if numbers.numel()), default=0.0
    )
    return difference.max_abs <= grain * largest


def _issued(joint: JointGraph) -> Counter[_Issued]:
    """Count the collectives of a graph by kind, group and dtype."""
    return Counter(
        (collective_name(n), str(argument(n, "group_name")), str(tensors_of(n)[0].dtype))
        for n in joint.graph.nodes
        if is_collective(n)
    )


def _text(error: Exception) -> str:
    # fx puts the whole graph after the first line
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
