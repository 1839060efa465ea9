"""Name the collective that failed, and the ranks that did not reach it.

No code of this module runs in a step without failure. With gloo, a collective that times out or
loses a connection raises a RuntimeError in the rank that waits. The line of generated code that
raised names a node of the graph, and the node has its module and parameter. Then the waiting
ranks publish where they wait, through the store of the default process group: this needs no
collective, and under torchrun the store outlives every rank (but with MAX_RESTARTS rank 0 hosts
it, and what was published is lost when rank 0 ends). A rank that publishes nothing did not arrive.

With NCCL no error reaches this module: collectives return at once, and NCCL's watchdog thread
ends the process at the time-out, with the kind, number and sizes of the collective and, with
`comm.trace_buf_size`, a dump of the flight recorder of each rank. torch's `fr_trace` compares
these dumps.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections import defaultdict
from datetime import timedelta

import torch.distributed as dist
from torch import fx

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.collective_kinds import FUNCTIONAL_NAMESPACES
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.ordering.agreement import is_collective_failure, reason_of
from graph_trainer.core.torch_private_groups import default_store
from graph_trainer.errors import CollectiveError, TrainingError

_TIMEOUT = re.compile(r"[Tt]imed out|[Tt]imeout")
_ASSIGNED = re.compile(r"\s*(\w+)\s*(?::[^=]*)?=")
_LIBRARIES = ("/torch/", "/typing_extensions.py")  # the latter wraps deprecated torch functions
_PLACES, _TIMED_OUT, _REPORT, _FAILURE = (
    f"graph_trainer/collective_failure/{key}" for key in ("places", "first", "report", "failure")
)

GRACE = 10.0
"""Seconds by which the time-outs of the ranks may differ."""
_LOST = 2.0
_POLL = 0.1


def failed_collective(error: RuntimeError, joint: JointGraph) -> CollectiveError | None:
    """Make the error to raise for an error in a graph's code; None if no collective failed."""
    if not is_collective_failure(error):
        return None
    nodes = {node.name: node for node in joint.graph.nodes}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        line = frame.line or ""
        assigned = _ASSIGNED.match(line)
        if assigned and assigned[1] in nodes and frame.filename.startswith("<eval_with_key>"):
            return CollectiveError(_describe(nodes[assigned[1]], joint), reason_of(error))
        # code of another backend has names of its own
        if any(namespace in line for namespace in FUNCTIONAL_NAMESPACES):
            return CollectiveError(f"the compiled graph, at '{line}'", reason_of(error))
    return CollectiveError("the compiled graph", reason_of(error))


def failed_outside_graph(error: RuntimeError) -> CollectiveError | None:
    """Make the error to raise for an error in the train loop; None if no collective failed."""
    if not is_collective_failure(error):
        return None
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(library in frame.filename for library in _LIBRARIES)
    ]
    where = f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "torch"
    return CollectiveError(f"a collective outside the graph, in {where}", reason_of(error))


def publish_failure(text: str) -> None:
    """Publish why this rank ends, for the other ranks, whose collectives will fail."""
    if dist.is_initialized() and dist.get_backend() != "fake":
        default_store().set(_FAILURE, f"rank {dist.get_rank()} {text}")


def published_failure() -> str:
    """Return what an ended rank has published with `publish_failure`; "" if none has."""
    try:
        store = default_store()
        return store.get(_FAILURE).decode() if store.check([_FAILURE]) else ""
    except dist.DistError:  # the ended rank hosted the store; that rank shows its error itself
        return ""


def with_missing_ranks(error: CollectiveError, step: int) -> TrainingError:
    """Make an error that names the step, where the other ranks wait and which did not arrive.

    Waits for the other ranks up to GRACE seconds if a time-out was the reason.
    """
    what = f"step {step}: {error.place} failed: {error.reason}"
    try:
        words = published_failure() or find_missing_ranks(
            error, default_store(), dist.get_rank(), dist.get_world_size()
        )
    except Exception as lost:  # the store has ended with the launcher or with rank 0
        words = f"The other ranks could not be asked: {type(lost).__name__}: {lost}"
    return TrainingError(f"{what}. {words}")


def find_missing_ranks(error: CollectiveError, store: dist.Store, rank: int, world: int) -> str:
    """Publish where this rank waits, and return the report on all ranks.

    The first rank whose time ran out reads what all have published and writes the report.
    """
    store.append(_PLACES, json.dumps([rank, error.place]) + "\n")  # type: ignore[attr-defined]  # in no stub
    if not _TIMEOUT.search(error.reason):
        # a rank that times out closes its connections; that rank writes the report
        try:
            store.wait([_TIMED_OUT], timedelta(seconds=_LOST))
        except dist.DistStoreError:
            return "No rank ran out of time, so another one has ended; its own error says why."
    elif store.add(_TIMED_OUT, 1) == 1:
        until = time.monotonic() + GRACE
        while len(places := _published_places(store)) < world and time.monotonic() < until:
            time.sleep(_POLL)
        store.set(_REPORT, report(places, world))
    store.wait([_REPORT], timedelta(seconds=GRACE * 2))
    return store.get(_REPORT).decode()


def _published_places(store: dist.Store) -> dict[int, str]:
    return dict(json.loads(line) for line in store.get(_PLACES).decode().splitlines())


def report(places: dict[int, str], world: int) -> str:
    """Say which of `world` ranks wait where, given `places` by rank, and which did not arrive."""
    waiting: dict[str, list[int]] = defaultdict(list)
    for rank, place in sorted(places.items()):
        waiting[place].append(rank)
    missing = sorted(set(range(world)) - set(places))
    text = "; ".join(f"{_ranks(ranks)} in {place}" for place, ranks in waiting.items())
    if not missing:
        return f"Waiting: {text}. All are waiting, at different places: their programs differ."
    return (
        f"Waiting: {text}. Did not arrive: {_ranks(missing)}, from which nothing was received: "
        "stopped, or busy with something else. Look at the stacks there (py-spy dump), at the "
        "data loader and the file system; if they are only slow, raise comm.train_timeout_seconds."
    )


def _describe(node: fx.Node, joint: JointGraph) -> str:
    source = node
    while not is_collective(source) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    for collective in collectives(joint):
        if collective.node is source:
            parameter = f", parameter '{collective.parameter}'" if collective.parameter else ""
            waiting = f", waited for in '{node.name}'" if is_wait(node) else ""
            return f"{collective.describe()}{parameter}, {collective.phase}{waiting}"
    return f"node '{node.name}'"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:32])) + (f" and {len(ranks) - 32} more" * (len(ranks) > 32))
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
