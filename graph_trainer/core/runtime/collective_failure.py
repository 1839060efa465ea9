"""When a collective fails: which one, where in the model, and who did not come.

Nothing here runs in a step that goes well. With gloo a collective that times out, or loses a
connection, raises a RuntimeError in the rank that waits. The line of generated code that raised
is the node of the graph, and the node knows its module and its parameter. Then the ranks
that wait tell each other where they do, through the store by which they met: it needs no
collective, and under torchrun it outlives every rank (but with MAX_RESTARTS rank 0 holds it, and
what is said ends with rank 0). Who says nothing did not come.

NCCL never gets here: its collectives return at once, and its watchdog thread ends the process at
the time-out, with the kind, number and sizes of the collective and, with
`comm.trace_buf_size`, a dump of the flight recorder for each rank. `fr_trace` of torch compares
those dumps.
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

from graph_trainer.core.analysis.collective_kinds import FUNCTIONAL_NAMESPACES
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.ops import is_collective, is_wait
from graph_trainer.core.torch_private import default_store
from graph_trainer.errors import CollectiveError, TrainingError

_GLOO = re.compile(r"gloo/(transport|rendezvous)|Application timeout caused pair closure")
_TIMEOUT = re.compile(r"[Tt]imed out|[Tt]imeout")
_ASSIGNED = re.compile(r"\s*(\w+)\s*(?::[^=]*)?=")
_LIBRARIES = ("/torch/", "/typing_extensions.py")  # torch wraps what it deprecates with the latter
_PLACES, _TIMED_OUT, _REPORT = (f"graph_trainer/stall/{k}" for k in ("places", "first", "report"))
_FAILURE = "graph_trainer/stall/failure"

GRACE = 10.0
"""Seconds that the ranks' time-outs may lie apart."""
_LOST = 2.0
_POLL = 0.1


def failed_collective(error: RuntimeError, joint: JointGraph) -> CollectiveError | None:
    """What to raise for an error in a graph's code; None if no collective failed."""
    if not is_collective_failure(error):
        return None
    nodes = {node.name: node for node in joint.graph.nodes}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        assigned = _ASSIGNED.match(frame.line or "")
        node = nodes.get(assigned[1]) if assigned else None
        if frame.filename.startswith("<eval_with_key>") and node is not None:
            return CollectiveError(_describe(node, joint), _reason(error))
        if any(
            each in (frame.line or "") for each in FUNCTIONAL_NAMESPACES
        ):  # Inductor's code has names of its own
            return CollectiveError(f"the compiled graph, at '{frame.line}'", _reason(error))
    return CollectiveError("the compiled graph", _reason(error))


def outside_the_graph(error: RuntimeError) -> CollectiveError | None:
    """What to raise for an error in the loop around the graph; None if no collective failed."""
    if not is_collective_failure(error):
        return None
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(library in frame.filename for library in _LIBRARIES)
    ]
    where = f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "torch"
    return CollectiveError(f"a collective outside the graph, in {where}", _reason(error))


def is_collective_failure(error: RuntimeError) -> bool:
    """Whether an error says that a collective could not be completed."""
    return isinstance(error, dist.DistError) or bool(_GLOO.search(str(error)))


def publish_failure(text: str) -> None:
    """Leave word for the other ranks, which will find this one missing."""
    if dist.is_initialized() and dist.get_backend() != "fake":
        default_store().set(_FAILURE, f"rank {dist.get_rank()} {text}")


def published_failure() -> str:
    """What a rank that left has said with `publish_failure`; "" if none has."""
    try:
        store = default_store()
        return store.get(_FAILURE).decode() if store.check([_FAILURE]) else ""
    except dist.DistError:  # the rank that left was the store's host; its own error stands
        return ""


def with_the_others(error: CollectiveError, step: int) -> TrainingError:
    """The same error with the step, and with where the other ranks are.

    Waits up to GRACE seconds for them, if a time-out was what happened.
    """
    what = f"step {step}: {error.place} failed: {error.reason}"
    try:
        failure = published_failure()
        found = failure or ask_around(
            error, default_store(), dist.get_rank(), dist.get_world_size()
        )
    except Exception as lost:  # the store is gone, with the launcher or with rank 0
        found = f"The other ranks could not be asked: {type(lost).__name__}: {lost}"
    return TrainingError(f"{what}. {found}")


def ask_around(error: CollectiveError, store: dist.Store, rank: int, world: int) -> str:
    """Post where this rank waits. The first one whose time ran out reads what all posted, and
    tells them."""
    store.append(_PLACES, json.dumps([rank, error.place]) + "\n")  # type: ignore[attr-defined]  # in no stub
    if not _TIMEOUT.search(error.reason):
        # a rank that times out closes its connections; it tells
        try:
            store.wait([_TIMED_OUT], timedelta(seconds=_LOST))
        except dist.DistStoreError:
            return "No rank ran out of time, so another one has ended; its own error says why."
    elif store.add(_TIMED_OUT, 1) == 1:
        until = time.monotonic() + GRACE
        while len(posts := _posts(store)) < world and time.monotonic() < until:
            time.sleep(_POLL)
        store.set(_REPORT, report(posts, world))
    store.wait([_REPORT], timedelta(seconds=GRACE * 2))
    return store.get(_REPORT).decode()


def _posts(store: dist.Store) -> dict[int, str]:
    return dict(json.loads(line) for line in store.get(_PLACES).decode().splitlines())


def report(posts: dict[int, str], world: int) -> str:
    """Who waits where. Arguments: what each rank posted, and how many ranks there are."""
    at: dict[str, list[int]] = defaultdict(list)
    for rank, place in sorted(posts.items()):
        at[place].append(rank)
    silent = sorted(set(range(world)) - set(posts))
    lines = [f"{_ranks(ranks)} in {place}" for place, ranks in at.items()]
    said = f"Waiting: {'; '.join(lines)}. "
    if silent:
        said += (
            f"Did not arrive: {_ranks(silent)}, of which nothing is heard: stopped, or busy with "
            "something else. Look at the stacks there (py-spy dump), at the data loader and the "
            "file system; if they are only slow, raise comm.train_timeout_seconds."
        )
    else:
        said += "All are waiting, at different places: their programs have gone apart."
    return said


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


def _reason(error: RuntimeError) -> str:
    return " ".join(str(error).split())[:500]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:32])) + (f" and {len(ranks) - 32} more" * (len(ranks) > 32))
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
