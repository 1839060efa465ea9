"""A collective that fails is named by its node, and the ranks that wait find out who does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

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
from graph_trainer.core.runtime.step import Step
from graph_trainer.errors import CollectiveError
from tests.unit.fake_ranks import become

TIMED_OUT = (
    "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5ms for recv "
    "operation to complete"
)
LOST = "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


class Fails(TorchDispatchMode):
    """The n-th call of an op raises what gloo does."""

    def __init__(self, op: str, nth: int, message: str) -> None:
        super().__init__()
        self.op, self.left, self.message = op, nth, message

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.name() == f"_c10d_functional::{self.op}":
            self.left -= 1
            if self.left == 0:
                raise RuntimeError(self.message)
        return func(*args, **(kwargs or {}))


def a_step() -> tuple[Step, nn.Module, torch.Tensor]:
    become(0, 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = gt.simple_fsdp(model, init_device_mesh("cpu", (2,)))
    x = torch.ones(2, 4)
    joint = gt.capture(model, lambda m, x: m(x).square().mean(), (x,))
    gt.run_passes(joint, gt.PassConfig(reshard_after_forward="always"))
    return gt.compile(joint), model, x


@pytest.mark.parametrize("op", ["wait_tensor", "all_gather_into_tensor"])
def test_every_collective_is_named_where_it_fails(op: str) -> None:
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


def test_a_collective_of_the_loop_is_named_by_the_function_that_called_it() -> None:
    def clip_the_gradients() -> None:
        raise RuntimeError(TIMED_OUT)

    with pytest.raises(RuntimeError) as caught:
        clip_the_gradients()
    failed = failed_outside_graph(caught.value)
    assert failed is not None
    assert failed.place.startswith("a collective outside the graph, in clip_the_gradients (")
    assert failed_outside_graph(RuntimeError("The size of tensor a must match")) is None


def ranks_ask(
    monkeypatch: pytest.MonkeyPatch, *failures: tuple[str, str] | None, grace: float = 0.5
) -> list[str | None]:
    """What each rank hears; None stands for a rank that does not come."""
    monkeypatch.setattr(collective_failure, "GRACE", grace)
    monkeypatch.setattr(collective_failure, "_LOST", 0.3)
    store: Any = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))
    heard: list[str | None] = [None] * len(failures)

    def ask(rank: int, place: str, reason: str) -> None:
        own = dist.TCPStore("localhost", store.port, is_master=False)
        heard[rank] = find_missing_ranks(CollectiveError(place, reason), own, rank, len(failures))

    threads = [
        threading.Thread(target=ask, args=(rank, *failure))
        for rank, failure in enumerate(failures)
        if failure is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return heard


def test_the_ranks_that_wait_all_hear_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 stalls; rank 2 loses its connection to rank 0, which ran out of time first."""
    here = ("the gather of w", TIMED_OUT)
    first, silent, second, third = ranks_ask(
        monkeypatch, here, None, ("the gather of w", LOST), ("the sum of b", TIMED_OUT)
    )
    assert first == second == third and silent is None and first is not None
    assert first.startswith(
        "Waiting: ranks 0, 2 in the gather of w; rank 3 in the sum of b. Did not arrive: rank 1, "
    )


def test_where_all_wait_their_programs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    heard = ranks_ask(monkeypatch, ("a", TIMED_OUT), ("b", TIMED_OUT), grace=15)
    assert heard[0] == heard[1] == report({0: "a", 1: "b"}, 2)
    assert "Waiting: rank 0 in a; rank 1 in b. All are waiting" in heard[0]
    assert time.monotonic() - start < 10, "nobody is missing, so nobody is waited for"


def test_without_a_time_out_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (heard, _) = ranks_ask(monkeypatch, ("a", LOST), None)
    assert heard is not None and "another one has ended" in heard


@pytest.mark.parametrize(("count", "expected"), [(33, "and 1 more"), (32, "31, from which")])
def test_many_missing_ranks_are_counted(count: int, expected: str) -> None:
    assert expected in report({}, count)


def test_a_failure_is_told_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Callable[[], Any] = dist.HashStore
    dist.init_process_group("gloo", store=store(), rank=0, world_size=1)
    assert published_failure() == ""
    publish_failure("could not capture the step again, CaptureError: why")
    assert published_failure() == "rank 0 could not capture the step again, CaptureError: why"
