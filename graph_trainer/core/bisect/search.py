"""Growing prefixes of a pass list, each run on the same batch and compared with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from graph_trainer.core.bisect.node_diff import first_difference
from graph_trainer.core.bisect.replay import Runs
from graph_trainer.core.bisect.tensor_diff import compare
from graph_trainer.core.bisect.verdict import CAPTURE, Row, Verdict
from graph_trainer.core.capture.capture import LossFn
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.ordering.exchange import LargestOfAllRanks, check_order_across_ranks
from graph_trainer.core.passes.catalogue import resolve_passes
from graph_trainer.core.passes.pipeline import PassConfig, pass_by_pass
from graph_trainer.core.sharding.process_groups import groups_agreed_on
from graph_trainer.errors import VerificationError

T = TypeVar("T")


def bisect_passes(
    model: nn.Module,
    loss_fn: LossFn,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    passes: PassConfig | None = None,
    on_event: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Find the first pass after which a step's numbers are not the model's own any more.

    Runs the model eagerly, then the graph as captured and after each pass with the eager
    backend, all from the same state and random numbers on the same batch, and compares loss,
    gradients and buffers bit by bit. In the first pass that differs it looks for the first
    node. Every rank must call it, with a model and a batch on CPU; all get the same verdict,
    and leave with the model as it was. Costs a run of the step for each pass and five node by
    node.

    Arguments:
        loss_fn: `loss_fn(model, *args, **kwargs)` -> scalar loss.
        args, kwargs: one batch.
        passes: which passes, and how; they may be your own.
        on_event: called with a line before and after each run.

    Raises:
        VerificationError: the model gives other numbers when it runs again, so that there is
            nothing to compare with; or the ranks' graphs issue other collectives.
        CaptureError, PassError: as `capture` and `run_passes` raise them.
    """
    passes = passes or PassConfig()
    total = len(resolve_passes(passes.passes, passes.disable_passes))
    runs = Runs(model, loss_fn, args, kwargs or {})
    on_event("eager: running the model itself, twice")
    reference = runs.eager()
    unlike = _from_all_ranks(compare(reference, runs.eager()))
    _refuse_unrepeatable(unlike)
    on_event(f"eager: {len(reference)} values to compare (loss, gradients, buffers)")
    joint = _together(runs.capture)
    largest = LargestOfAllRanks()
    steps = pass_by_pass(joint, passes, all_reduce_max=largest)
    rows: list[Row] = []
    before: JointGraph | None = None
    while True:
        with groups_agreed_on(largest):
            report = _together(lambda: next(steps, None), largest)
        if report is None:
            return Verdict(rows, len(reference), [])
        check_order_across_ranks(joint)
        mine = compare(reference, runs.graph(joint))
        said = _from_all_ranks((report.nodes, mine))
        row = Row(report.name, said[0][0], [differences for _, differences in said])
        rows.append(row)
        place = f"{len(rows) - 1} of {total} passes, up to {row.name}" if before else CAPTURE
        on_event(f"{place}: {_said(row)}")
        if row.ranks:
            break
        before = copy_graph(joint)
    if before is None:
        return Verdict(rows, len(reference), [])
    on_event(f"{row.name}: looking for the first node that differs, node by node")
    node = first_difference(runs, before, joint, [difference.name for difference in mine])
    return Verdict(rows, len(reference), _from_all_ranks(node))


def _together(work: Callable[[], T], largest: LargestOfAllRanks | None = None) -> T:
    """Do what needs no other rank; one that fails says so where the others will ask it next."""
    try:
        return work()
    except Exception as error:
        if largest is not None and largest.received_failure:
            raise
        check_order_across_ranks(error)
        raise AssertionError("an error is raised where it is handed in") from error


def _from_all_ranks(mine: T) -> list[T]:
    """What every rank has, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _refuse_unrepeatable(unlike: list[list[Any]]) -> None:
    for rank, differences in enumerate(unlike):
        if differences:
            raise VerificationError(
                f"rank {rank}: the model itself, run twice on one batch from one state, gives "
                f"another {differences[0].name} (max difference {differences[0].max_abs:.3g}), so "
                "no pass can be blamed: set debug.deterministic = true, or look for random "
                "numbers from a generator of the model's own"
            )


def _said(row: Row) -> str:
    if not row.ranks:
        return "bitwise equal on every rank"
    return f"differs on {len(row.ranks)} of {len(row.found)} ranks"
