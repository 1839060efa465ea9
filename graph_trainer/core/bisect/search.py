"""Growing prefixes of a pass list, each run on the same batch and compared with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graph_trainer.core.analysis.node_diff import NodeDifference, first_differing_node
from graph_trainer.core.bisect.check_capture import check_capture
from graph_trainer.core.bisect.replay import Runs
from graph_trainer.core.capture.tracing.trace import LossFn
from graph_trainer.core.graph.joint_graph import JointGraph, compute_nodes
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.ordering.exchange import check_order_across_ranks
from graph_trainer.core.passes.catalogue import resolve_passes
from graph_trainer.core.passes.pipeline import PassConfig, pass_by_pass
from graph_trainer.core.tensor_diff import Difference, compare
from graph_trainer.errors import VerificationError

CAPTURE = "capture"


@dataclass(frozen=True, slots=True)
class Prefix:
    """One prefix of the pass list: the graph as captured, or after one more pass."""

    name: str
    """The pass, or "capture" for the graph before any pass."""
    nodes: int
    """Number of nodes of rank 0's graph that compute."""
    differences: list[list[Difference]]
    """By rank, what differs from eager: the loss, then gradients and buffers in the model's
    order."""

    @property
    def ranks(self) -> list[int]:
        """The ranks on which something differs."""
        return [rank for rank, each in enumerate(self.differences) if each]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every prefix that ran; the last one differs if any does."""

    prefixes: list[Prefix]
    compared: int
    """Number of values (loss, gradients, buffers) compared for each prefix."""
    nodes: list[NodeDifference | None]
    """By rank, the first node that differs; empty where no prefix differs, or the capture does."""

    @property
    def culprit(self) -> str | None:
        """The pass that changes the numbers, "capture", or None."""
        return self.prefixes[-1].name if self.prefixes[-1].ranks else None

    @property
    def first_node(self) -> NodeDifference | None:
        """The first node that differs, over all ranks."""
        differing = [node for node in self.nodes if node is not None]
        return min(differing, key=lambda node: node.position, default=None)


def bisect_passes(
    model: nn.Module,
    loss_fn: LossFn,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    passes: PassConfig | None = None,
    on_event: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Find the first pass after which a step's numbers differ from the model's.

    Runs the model eagerly, then the graph as captured and after each pass with the eager
    backend, all from the same state and random numbers on the same batch, and compares loss,
    gradients and buffers bit by bit; the graph as captured for two steps. In the first pass that
    differs it finds the first node that differs. Every rank must call it, with a model and a batch
    on CPU; all get the same verdict, and the model is left as it was. Costs one run of the step
    for each pass, and five runs node by node.

    Args:
        model: the model.
        loss_fn: `loss_fn(model, *args, **kwargs)` -> scalar loss.
        args: positional arguments of one batch.
        kwargs: keyword arguments of one batch.
        passes: which passes, and how; passes of a user's own too.
        on_event: called with a line before and after each run.

    Raises:
        VerificationError: the model gives other numbers when it runs again, so that there is
            nothing to compare with; the second captured step differs from the model's (see
            `check_capture`); or the ranks' graphs issue other collectives.
        CaptureError, PassError: as `capture` and `run_passes` raise them.
    """
    passes = passes or PassConfig()
    total = len(resolve_passes(passes.passes, passes.disable_passes))
    runs = Runs(model, loss_fn, args, kwargs or {})
    on_event("eager: running the model itself, twice")
    reference = runs.eager()
    ranks = Agreement()
    for rank, differences in enumerate(ranks.gather(compare(reference, runs.eager()))):
        if differences:
            raise VerificationError(
                f"rank {rank}: the model itself, run twice on one batch from one state, gives "
                f"another {differences[0].name} (max difference {differences[0].max_abs:.3g}), so "
                "no pass can be blamed: set debug.deterministic = true, or look for random "
                "numbers from a generator of the model's own"
            )
    on_event(f"eager: {len(reference)} values to compare (loss, gradients, buffers)")
    with ranks.errors_sent():
        joint = runs.capture()
    steps = pass_by_pass(joint, passes, agreement=ranks)
    prefixes: list[Prefix] = []
    before: JointGraph | None = None

    def loss_of(model: nn.Module, *args: Any) -> torch.Tensor:
        return loss_fn(model, *args, **(kwargs or {}))

    while True:
        with ranks.errors_sent():
            done = next(steps, None)
        if done is None:
            return Verdict(prefixes, len(reference), [])
        check_order_across_ranks(joint, ranks)
        mine = compare(reference, runs.graph(joint))
        nodes = sum(1 for _ in compute_nodes(joint.graph))
        gathered = ranks.gather((nodes, mine))
        prefix = Prefix(done.name, gathered[0][0], [differences for _, differences in gathered])
        prefixes.append(prefix)
        place = f"{len(prefixes) - 1} of {total} passes, up to {prefix.name}" if before else CAPTURE
        words = f"differs on {len(prefix.ranks)} of {len(prefix.differences)} ranks"
        on_event(f"{place}: {words if prefix.ranks else 'bitwise equal on every rank'}")
        if prefix.ranks:
            break
        if before is None:
            on_event(f"{CAPTURE}: comparing two steps, one after the other")
            captured = PassConfig(passes=())
            check_capture(model, loss_of, [args, args], passes=captured, attributes=False)
        before = copy_graph(joint)
    if before is None:
        return Verdict(prefixes, len(reference), [])
    on_event(f"{prefix.name}: looking for the first node that differs, node by node")
    node = first_differing_node(
        runs.node_by_node, before, joint, [difference.name for difference in mine]
    )
    return Verdict(prefixes, len(reference), ranks.gather(node))
