"""A collective that fails is named by its node, and the ranks that wait find out who does not."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import graph_trainer as gt
from graph_trainer.core.analysis.collectives import collectives
from graph_trainer.core.runtime import collective_failure
from graph_trainer.core.runtime.collective_failure import (
    failed_outside_graph,
    find_missing_ranks,
    publish_failure,
    published_failure,
    report,
)
from graph_trainer.errors import CollectiveError
from graph_trainer.testing import become
from tests.unit.fake_ranks import in_threads

TIMED_OUT = (
    "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5ms for recv "
    "operation to complete"
)
LOST = "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


class Fails(TorchDispatchMode):
    """The n-th call of an op raises what gloo does."""

    def __init__(self, op, nth, message):
        super().__init__()
        self.op, self.left, self.message = op, nth, message

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == f"_c10d_functional::{self.op}":
            self.left -= 1
            if self.left == 0:
                raise RuntimeError(self.message)
        return func(*args, **(kwargs or {}))


def a_step():
    become(0, 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = gt.simple_fsdp(model, init_device_mesh("cpu", (2,)))
    x = torch.ones(2, 4)
    joint = gt.capture(model, lambda m, x: m(x).square().mean(), (x,))
    off = ["bucket_collectives"]
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always", disable_passes=off))
    return gt.compile(joint), model, x


@pytest.mark.parametrize("op", ["wait_tensor", "all_gather_into_tensor"])
def test_every_collective_is_named_where_it_fails(op):
    step, model, x = a_step()
    issued = collectives(step.joint)
    if op != "wait_tensor":
        issued = [c for c in issued if c.kind == op]
    assert len(issued) > 4
    for number, collective in enumerate(issued, start=1):
        with pytest.raises(CollectiveError) as caught, Fails(op, number, TIMED_OUT):
            step(model, x)
        place = caught.value.place
        assert place.startswith(collective.describe()) and str(collective.phase) in place
        assert f"parameter '{collective.parameter}'" in place
        assert caught.value.reason == TIMED_OUT
    with pytest.raises(RuntimeError, match="of another kind"), Fails(op, 1, "of another kind"):
        step(model, x)


def test_a_collective_of_the_loop_is_named_by_the_function_that_called_it():
    def clip_the_gradients():
        raise RuntimeError(TIMED_OUT)

    with pytest.raises(RuntimeError) as caught:
        clip_the_gradients()
    failed = failed_outside_graph(caught.value)
    assert failed is not None
    assert failed.place.startswith("a collective outside the graph, in clip_the_gradients (")
    assert failed_outside_graph(RuntimeError("The size of tensor a must match")) is None


def ranks_ask(monkeypatch, *failures, grace=0.5):
    """What each rank hears; None stands for a rank that does not come."""
    monkeypatch.setattr(collective_failure, "GRACE", grace)
    monkeypatch.setattr(collective_failure, "_LOST", 0.3)
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))

    def ask(rank):
        if failures[rank] is None:
            return None
        client = dist.TCPStore("localhost", store.port, is_master=False)
        return find_missing_ranks(CollectiveError(*failures[rank]), client, rank, len(failures))

    return in_threads(len(failures), ask)


def test_the_ranks_that_wait_all_hear_who_did_not_come(monkeypatch):
    """Rank 1 stalls; rank 2 loses its connection to rank 0, which ran out of time first."""
    here = ("the gather of w", TIMED_OUT)
    first, silent, second, third = ranks_ask(
        monkeypatch, here, None, ("the gather of w", LOST), ("the sum of b", TIMED_OUT)
    )
    assert first == second == third and silent is None and first is not None
    assert first.startswith(
        "Waiting: ranks 0, 2 in the gather of w; rank 3 in the sum of b. Did not arrive: rank 1, "
    )


def test_where_all_wait_their_programs_differ(monkeypatch):
    start = time.monotonic()
    heard = ranks_ask(monkeypatch, ("a", TIMED_OUT), ("b", TIMED_OUT), grace=15)
    assert heard[0] == heard[1] == report({0: "a", 1: "b"}, 2)
    assert "Waiting: rank 0 in a; rank 1 in b. All are waiting" in heard[0]
    assert time.monotonic() - start < 10, "nobody is missing, so nobody is waited for"


def test_without_a_time_out_nobody_is_waited_for(monkeypatch):
    (heard, _) = ranks_ask(monkeypatch, ("a", LOST), None)
    assert heard is not None and "another one has ended" in heard


@pytest.mark.parametrize(("count", "expected"), [(33, "and 1 more"), (32, "31, from which")])
def test_many_missing_ranks_are_counted(count, expected):
    assert expected in report({}, count)


def test_a_failure_is_told_through_the_store(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert published_failure() == ""
    publish_failure("could not capture the step again, CaptureError: why")
    assert published_failure() == "rank 0 could not capture the step again, CaptureError: why"
