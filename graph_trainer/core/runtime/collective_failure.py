"""Name the collective that failed (gloo), and the ranks that did not reach it.

With gloo, a collective that times out or loses a connection raises in the rank that waits, at a
line of generated code that names a node of the graph. That rank publishes where it waits through
the store of the default process group, which needs no collective. A rank that publishes nothing did
not arrive. With NCCL no error reaches this module: NCCL's watchdog ends the process and names the
collective, and torch's `fr_trace` compares the dumps of `comm.trace_buf_size`.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections import defaultdict

import torch.distributed as dist

from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.ordering.agreement import is_collective_failure, reason_of
from graph_trainer.errors import CollectiveError

_ASSIGNED = re.compile(r"\s*(\w+)\s*(?::[^=]*)?=")
_PLACES = "graph_trainer/collective_failure/places"
# frames below the one that called a collective; typing_extensions wraps deprecated functions
_BELOW = ("/torch/", "/typing_extensions.py", "/graph_trainer/core/sharding/ordered_gloo.py")

GRACE = 10.0
"""Seconds by which the time-outs of the ranks may differ."""


def failed_collective(error: RuntimeError, joint: JointGraph | None) -> CollectiveError | None:
    """Name the collective that an error in a graph, or in the loop (None), is of; None if none."""
    if not is_collective_failure(error):
        return None
    issued = {collective.node: collective for collective in collectives(joint)} if joint else {}
    nodes = {node.name: node for node in joint.graph.nodes} if joint else {}
    place = "a collective"
    for frame in traceback.extract_tb(error.__traceback__):
        assigned = _ASSIGNED.match(frame.line or "")
        if assigned and assigned[1] in nodes and frame.filename.startswith("<eval_with_key>"):
            node = nodes[assigned[1]]
            while node not in issued and node.all_input_nodes:  # from a wait to its collective
                node = node.all_input_nodes[0]
            if collective := issued.get(node):
                parameter = f", parameter '{collective.parameter}'" if collective.parameter else ""
                place = f"{collective.describe()}{parameter}, {collective.phase}"
                break
        if not any(part in frame.filename for part in _BELOW):
            # the train loop, or the code of another backend, which has names of its own
            place = f"'{frame.line}' in {frame.name} ({frame.filename}:{frame.lineno})"
    return CollectiveError(place, reason_of(error))


def describe_missing_ranks(place: str, store: dist.Store, rank: int, world: int) -> str:
    """Publish where this rank waits, and return where all do and which ranks did not arrive in up
    to GRACE seconds."""
    places, until = {rank: place}, time.monotonic() + GRACE
    try:
        store.append(_PLACES, json.dumps([rank, place]) + "\n")  # type: ignore[attr-defined]  # in no stub
        while len(places) < world and time.monotonic() < until:
            time.sleep(0.2)
            places = dict(map(json.loads, store.get(_PLACES).decode().splitlines()))
    except dist.DistError:
        pass  # the store has ended with the launcher or with rank 0: say what is known
    waiting: dict[str, list[int]] = defaultdict(list)
    for waiter, where in sorted(places.items()):
        waiting[where].append(waiter)
    text = "; ".join(f"ranks {ranks} in {where}" for where, ranks in waiting.items())
    missing = sorted(set(range(world)) - set(places))
    if not missing:
        return f"Waiting: {text}."
    remedy = "their own output says why; if they are only slow, raise comm.train_timeout_seconds"
    return f"Waiting: {text}. Did not arrive: ranks {missing}: {remedy}."
