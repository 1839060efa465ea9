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
from graph_trainer.core.ordering.agreement import publish_failure, published_failure
from graph_trainer.core.runtime import collective_failure
from graph_trainer.core.runtime.collective_failure import (
    describe_missing_ranks,
    failed_collective,
)
from graph_trainer.core.sharding import ordered_gloo
from graph_trainer.errors import CollectiveError
from graph_trainer.testing import become
from tests.unit.fake_ranks import in_threads

TIMED_OUT = (
    "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5ms for recv "
    "operation to complete"
)


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
        exec(compile("raise RuntimeError(TIMED_OUT)", ordered_gloo.__file__, "exec"))

    with pytest.raises(RuntimeError) as caught:
        clip_the_gradients()
    failed = failed_collective(caught.value, None)
    assert failed is not None
    assert failed.place.startswith("'exec(compile(")
    assert "' in clip_the_gradients (" in failed.place and __file__ in failed.place
    assert failed_collective(RuntimeError("The size of tensor a must match"), None) is None


def ranks_ask(monkeypatch, *places, grace):
    """What each rank is told; None stands for a rank that does not come."""
    monkeypatch.setattr(collective_failure, "GRACE", grace)
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))

    def ask(rank):
        place = places[rank]
        if place is None:
            return None
        client = dist.TCPStore("localhost", store.port, is_master=False)
        return describe_missing_ranks(place, client, rank, len(places))

    return in_threads(len(places), ask)


def test_the_ranks_that_wait_all_hear_who_did_not_come(monkeypatch):
    first, silent, second, third = ranks_ask(
        monkeypatch, "the gather", None, "the gather", "the sum", grace=0.5
    )
    assert first == second == third and silent is None and first is not None
    assert first.startswith(
        "Waiting: ranks [0, 2] in the gather; ranks [3] in the sum. Did not arrive: ranks [1]: "
    )


def test_where_all_wait_nobody_is_waited_for(monkeypatch):
    start = time.monotonic()
    assert (
        ranks_ask(monkeypatch, "a", "b", grace=15)
        == ["Waiting: ranks [0] in a; ranks [1] in b."] * 2
    )
    assert time.monotonic() - start < 10


def test_the_rank_that_hosted_the_store_may_have_ended(monkeypatch):
    class Ended:
        def append(self, key, value):
            raise dist.DistNetworkError("Connection reset by peer")

    told = describe_missing_ranks("the gather", Ended(), 1, 2)
    assert told.startswith("Waiting: ranks [1] in the gather. Did not arrive: ranks [0]: ")


def test_a_failure_is_told_through_the_store():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert published_failure() == ""
    publish_failure("could not capture the step again, CaptureError: why")
    assert published_failure() == "rank 0 could not capture the step again, CaptureError: why"
