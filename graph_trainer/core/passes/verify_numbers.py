"""The expensive checks after a pass: every value on fake tensors against its metadata, and the
results on the same small real values against those before the pass."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from torch import fx

from graph_trainer.core.analysis.lifetimes import lifetimes
from graph_trainer.core.analysis.node_diff import first_differing_node, result_name
from graph_trainer.core.analysis.one_process import REDUCTIONS, SIMULATED, run
from graph_trainer.core.graph.annotations import tensor_of, tensors_of, value_of
from graph_trainer.core.graph.data_sizes import data_sizes_of, storage_bytes
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import argument, collective_name, is_collective, subgraphs
from graph_trainer.core.graph.signature import Input, Output, with_parts
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.ordering.sequences import may_communicate
from graph_trainer.core.passes.report import EQUAL
from graph_trainer.core.tensor_diff import Difference, Results, compare, tensors_in
from graph_trainer.core.torch_private import FakeTensor, FakeTensorMode, detect_fake_mode
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


class Numbers:
    """The numbers of a graph, given before the first pass, as passes change it. Linear in nodes,
    and a run of the step a pass."""

    def __init__(self, joint: JointGraph) -> None:
        self.start(joint)

    def start(self, joint: JointGraph) -> None:
        """Compare the next pass's graph with this one."""
        self._before = copy_graph(joint)
        self._ran: tuple[Results, dict[str, str]] | None = None
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
        before, ran = self._before, self._ran
        reason = self._why_not or why_not(joint)
        if ran is None or reason:
            self.start(joint)
            return f"{NOT_COMPARED}{reason}"
        try:
            now, mismatches = self._ran = _run(joint)
        except Exception as error:
            raise VerificationError(
                f"it does not run on the values on which it ran before: {_text(error)}"
            ) from error
        was, mismatches_before = ran
        if new := [name for name in mismatches if name not in mismatches_before]:
            raise VerificationError(f"node '{new[0]}' {mismatches[new[0]]}")
        verdict = _compared(before, joint, was, now, changes_sums)
        self._before = copy_graph(joint)
        return verdict


def _compared(
    before: JointGraph, after: JointGraph, was: Results, now: Results, changes_sums: bool
) -> str:
    """Return how the results of two graphs compare, or raise."""
    # units in the last place of 1, of the coarsest dtype
    dtypes = {t.dtype for node in before.graph.nodes for t in tensors_of(node)}
    fractions = [d for d in dtypes if d.is_floating_point or d.is_complex]
    coarsest = max((torch.finfo(d).eps for d in fractions), default=0.0)
    grain = ROUNDING * coarsest if changes_sums else 0.0
    differences = compare(was, now)
    wrong = [d for d in differences if not _is_rounding(d, was, grain)]
    issued, issued_now = _issued(before), _issued(after)
    # new collectives where others are gone; a pass that only adds or removes some has none
    replaced = list(issued_now - issued) if wrong and issued - issued_now else []
    where = ""
    if replaced:
        # a gather over other ranks, or of bytes, gives other multiples of this rank's values
        was, now = _run(before, alike=True)[0], _run(after, alike=True)[0]
        differences = compare(was, now)
        wrong = [d for d in differences if not _is_rounding(d, was, grain)]
        where = f"{ALIKE}; graph-trainer bisect-passes compares real ranks"
    if wrong:
        repeated = compare(now, _run(after, alike=bool(replaced))[0])
        unstable = [difference.name for difference in repeated]
        wrong = [d for d in wrong if d.name not in unstable]
        if unstable and not wrong:
            return f"{NOT_COMPARED}{unstable[0]} differs from run to run"
    if wrong:
        # fewer collectives of one kind and more of another: not simulated by one process
        kinds = {kind for kind, *_ in replaced}
        of_kind = Counter(kind for kind, *_ in issued.elements())
        of_kind_now = Counter(kind for kind, *_ in issued_now.elements())
        if of_kind - of_kind_now and not kinds.isdisjoint(of_kind_now - of_kind):
            return (
                f"{NOT_COMPARED}{', '.join(sorted(kinds))} replaces another collective, which "
                "one process cannot simulate; graph-trainer bisect-passes compares real ranks"
            )
        first, others = wrong[0], len(wrong) - 1
        node = first_differing_node(
            lambda joint, observe: run(joint, alike=bool(replaced), observe=observe),
            before,
            after,
            [difference.name for difference in wrong],
        )
        raise VerificationError(
            f"{first.name} is another than before the pass, on the same values: "
            f"{first.note or f'by at most {first.max_abs:.3g}'}"
            f"{f'; so are {others} more results' if others else ''}"
            f"{f'; the first node that differs: {node.after}' if node else ''}. "
            "A pass keeps every bit; with changes_sums=True it may round otherwise"
        )
    if differences:
        most = max(differences, key=lambda difference: difference.max_abs)
        return f"equal up to rounding{where}: {most.name} by at most {most.max_abs:.3g}"
    for name, parts in was.items():
        if not all(bool(part.isfinite().all()) for part in parts):
            return f"{EQUAL}{where}, and {name} is not finite"
    return f"{EQUAL}{where}"


def why_not(joint: JointGraph) -> str:
    """Return why a graph cannot be run here in one process; empty where it can. Linear in nodes."""
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


def _run(joint: JointGraph, *, alike: bool = False) -> tuple[Results, dict[str, str]]:
    """Run a graph on made-up values; with `alike`, as if all ranks had the same values.

    Returns:
        the outputs and the final values of the inputs; and, by node, how its value differs from
        its metadata.
    """
    mismatches: dict[str, str] = {}

    def compare_with_metadata(node: fx.Node, value: Any) -> None:
        if node.op != "call_function":
            return
        made, traced = tensors_in(value), tensors_of(node)
        if len(made) != len(traced) or not all(map(_matches, made, traced)):
            real = [(tuple(t.shape), t.dtype) for t in made]
            said = [(tuple(t.shape), t.dtype) for t in traced]
            mismatches[node.name] = f"makes {real} of real values and its metadata says {said}"

    tensors = run(joint, alike=alike, observe=compare_with_metadata)
    specs: tuple[Input | Output, ...] = (*joint.signature.outputs, *joint.signature.inputs)
    return {
        result_name(spec): list(parts) for spec, parts in with_parts(specs, tensors)
    }, mismatches


def _matches(real: torch.Tensor, traced: torch.Tensor) -> bool:
    """Tell whether shape and dtype are those of metadata; sizes that data decide are any."""
    if real.dtype != traced.dtype or real.ndim != traced.ndim:
        return False
    sizes = zip(real.shape, traced.shape, strict=True)
    return all(size == said for size, said in sizes if isinstance(said, int))


def _is_rounding(difference: Difference, was: Results, grain: float) -> bool:
    """Tell whether a result differs by at most `grain` times its largest number."""
    if difference.note:
        return False
    finite = (tensor[tensor.isfinite()].abs() for tensor in was[difference.name])
    largest = max((float(each.max()) for each in finite if each.numel()), default=0.0)
    return difference.max_abs <= grain * largest


def _issued(joint: JointGraph) -> Counter[tuple[str, str, str]]:
    """Count the collectives of a graph by kind, group and dtype."""
    return Counter(
        (collective_name(n), str(argument(n, "group_name")), str(tensors_of(n)[0].dtype))
        for n in joint.graph.nodes
        if is_collective(n)
    )


def _text(error: Exception) -> str:
    # fx puts the whole graph after the first line
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
