"""CPU collectives in rank order, each rank a thread of this process with connections of its own."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given
from hypothesis import strategies as st

from graph_trainer.core.sharding import ordered_gloo
from graph_trainer.core.sharding.ordered_gloo import (
    EXIT_SECONDS,
    OrderedGloo,
    _SecondRound,
    _wait_until_dropped,
)
from graph_trainer.errors import ConfigError
from tests.examples import examples

RANKS = (1, 2, 3, 5)
SIZES = (0, 1, 7, 300, 4099)
"""Elements: none, fewer than ranks, small, and those that travel in two rounds, unevenly."""
KINDS = ("sum", "gather")
_names = itertools.count()
_store = dist.HashStore()


def on_ranks(ranks: int, run: Callable[[Any, int], Any], groups: int = 1) -> list[Any]:
    """Run a function on every rank of a new group, or of several; what each returned."""
    stores = [dist.PrefixStore(str(next(_names)), _store) for _ in range(groups)]

    def one(rank: int) -> Any:
        made = [OrderedGloo(store, rank, ranks, timedelta(seconds=30)) for store in stores]
        return run(made[0] if groups == 1 else made, rank)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def values(ranks: int, size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Numbers of such different sizes that the order of a sum shows in its last bits."""
    generator = torch.Generator().manual_seed(size)
    return [
        (torch.randn(size, generator=generator) * 10.0**rank).to(dtype) for rank in range(ranks)
    ]


def in_rank_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def options(kind: type, op: Any = dist.ReduceOp.SUM) -> Any:
    found = kind()
    found.reduceOp = op
    return found


def all_reduce(group: OrderedGloo, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    return group.allreduce([tensor], options(dist.AllreduceOptions, op))


def reduce_scatter(group: OrderedGloo, output: torch.Tensor, tensor: torch.Tensor) -> Any:
    return group.reduce_scatter_single(output, tensor, options(dist.ReduceScatterOptions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_are_taken_in_the_order_of_the_ranks(ranks, dtype):
    for size in SIZES:
        tensors = values(ranks, size, dtype)
        wide = [tensor.repeat(ranks) for tensor in tensors]

        def run(group, rank, tensors=tensors, wide=wide):
            reduced, scattered = tensors[rank].clone(), torch.empty_like(tensors[rank])
            gathered = torch.empty_like(wide[rank])
            all_reduce(group, reduced).wait()
            reduce_scatter(group, scattered, wide[rank]).wait()
            group.all_gather_single(gathered, tensors[rank]).wait()
            return reduced, scattered, gathered

        expected = in_rank_order(tensors)
        for reduced, scattered, gathered in on_ranks(ranks, run):
            assert torch.equal(reduced, expected)
            assert torch.equal(scattered, expected)
            assert torch.equal(gathered, torch.cat(tensors))


@examples(25)
@given(
    st.integers(2, 4),
    st.lists(st.integers(1, 3000), min_size=2, max_size=5),
    st.randoms(use_true_random=False),
)
def test_a_sum_does_not_depend_on_its_bucket_or_on_when_it_is_waited_for(ranks, sizes, random):
    """The same numbers one by one, each rank waiting in an order of its own, and in one bucket."""
    tensors = [values(ranks, size) for size in sizes]
    orders = [random.sample(range(len(sizes)), len(sizes)) for _ in range(ranks)]

    def run(group, rank):
        single = [each[rank].clone() for each in tensors]
        works = [all_reduce(group, tensor) for tensor in single]
        for place in orders[rank]:
            works[place].wait()
        bucket = torch.cat([each[rank] for each in tensors])
        all_reduce(group, bucket).wait()
        return single, bucket.split(sizes)

    for single, bucket in on_ranks(ranks, run):
        for one, part, each in zip(single, bucket, tensors, strict=True):
            assert torch.equal(one, part)
            assert torch.equal(one, in_rank_order(each))


@examples(50, phases=[Phase.generate])  # to make a hang smaller takes hours
@given(st.integers(2, 4), st.randoms(use_true_random=False))
def test_ranks_may_wait_in_different_orders(ranks, random):
    """Sums and gathers of two groups, started in one order and waited for at any later moment."""
    issued = [(random.choice(KINDS), random.randrange(2), random.choice(SIZES)) for _ in range(8)]
    begins = [(place, "start", place) for place in range(len(issued))]
    programs = [
        sorted(begins + [(random.uniform(place, 9), "wait", place) for _, _, place in begins])
        for _ in range(ranks)
    ]

    def run(groups, rank):
        results, works = {}, {}
        for _, what, place in programs[rank]:
            kind, group, size = issued[place]
            mine = values(ranks, size)[rank]
            if what == "start":
                results[place] = mine.clone() if kind == "sum" else torch.empty(ranks * size)
                works[place] = (
                    all_reduce(groups[group], results[place])
                    if kind == "sum"
                    else groups[group].all_gather_single(results[place], mine)
                )
            else:
                works[place].wait()
        return results

    for results in on_ranks(ranks, run, groups=2):
        for place, (kind, _, size) in enumerate(issued):
            each = values(ranks, size)
            expected = in_rank_order(each) if kind == "sum" else torch.cat(each)
            assert torch.equal(results[place], expected)


def test_polling_and_futures_need_no_wait():
    tensors = values(2, 5000)

    def run(group, rank):
        polled, future = tensors[rank].clone(), tensors[rank].clone()
        work = all_reduce(group, polled)
        if rank:
            work.wait()
        while not work.is_completed():
            time.sleep(0.001)
        (result,) = all_reduce(group, future).get_future().wait()
        assert result is future
        group.barrier().wait()
        return polled, future

    for results in on_ranks(2, run):
        for result in results:
            assert torch.equal(result, in_rank_order(tensors))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.AVG, lambda rows: rows.sum(0) // len(rows)),
        (dist.ReduceOp.PRODUCT, lambda rows: rows.prod(0)),
        (dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
        (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
        (dist.ReduceOp.BAND, lambda rows: rows[0] & rows[1] & rows[2]),
        (dist.ReduceOp.BOR, lambda rows: rows[0] | rows[1] | rows[2]),
        (dist.ReduceOp.BXOR, lambda rows: rows[0] ^ rows[1] ^ rows[2]),
    ],
)
def test_every_reduction_is_torchs(op, expected):
    rows = torch.arange(9000).view(3, 3000) * torch.tensor([[1], [2], [3]])

    def run(group, rank):
        tensor = rows[rank].clone()
        all_reduce(group, tensor, op).wait()
        return tensor

    for found in on_ranks(3, run):
        assert torch.equal(found, expected(rows))


def test_other_layouts_and_dtypes_travel_as_they_are():
    def run(group, rank):
        transposed = torch.full((40, 30), rank + 1.0).t()
        all_reduce(group, transposed).wait()
        complex_sum = torch.full((600,), complex(rank, 1))
        all_reduce(group, complex_sum).wait()
        flags = torch.empty(4, dtype=torch.bool)
        group.all_gather_single(flags, torch.tensor([bool(rank), True])).wait()
        return transposed, complex_sum, flags

    for transposed, complex_sum, flags in on_ranks(2, run):
        assert torch.equal(transposed, torch.full((30, 40), 3.0))
        assert torch.equal(complex_sum, torch.full((600,), complex(1, 2)))
        assert flags.tolist() == [False, True, True, True]


LAYOUTS: dict[str, Callable[..., torch.Tensor]] = {
    "contiguous": torch.zeros,
    "every second": lambda rows, columns: torch.zeros(rows, 2 * columns)[:, ::2],
    "column": lambda rows, columns: torch.zeros(rows, columns, 3)[..., 1],
    "flat": lambda rows, columns: torch.zeros(2 * rows * columns)[::2].view(rows, columns),
    "transposed": lambda rows, columns: torch.zeros(columns, rows).t(),
}


def test_every_collective_takes_and_gives_tensors_of_any_layout():
    """Plain gloo, on contiguous tensors, gives the same. (On others its sums are wrong.)"""

    def of(kind: str, rows: int, rank: int, fill: bool = True) -> torch.Tensor:
        tensor = LAYOUTS[kind](rows, 3)
        return tensor.copy_(torch.arange(3.0 * rows).view(rows, 3) + 100 * rank) if fill else tensor

    def results(group: Any, rank: int, taken: str, given: str, rows: int) -> list[torch.Tensor]:
        reduced, sent = of(taken, rows, rank), of(taken, rows, rank)
        gathered, scattered = of(given, 3 * rows, rank, False), of(given, rows, rank, False)
        parts, part = [of(given, rows, rank, False) for _ in range(3)], of(given, rows, rank, False)
        sending = [of(taken, rows, rank + place) for place in range(3)]
        shared = of(taken, rows, rank)
        works = [
            all_reduce(group, reduced),
            group._allgather_base(gathered, sent),
            group._reduce_scatter_base(
                scattered, of(taken, 3 * rows, rank), options(dist.ReduceScatterOptions)
            ),
            group.allgather([parts], [sent]),
            group.reduce_scatter([part], [sending], options(dist.ReduceScatterOptions)),
            group.broadcast([shared], dist.BroadcastOptions()),
        ]
        for work in works:
            work.wait()
        return [reduced, gathered, scattered, *parts, part, shared]

    def run(group, rank):
        plain = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=30))
        for rows in (1, 300):
            wanted = results(plain, rank, "contiguous", "contiguous", rows)
            for taken, to in itertools.product(LAYOUTS, LAYOUTS):
                for pair in zip(results(group, rank, taken, to, rows), wanted, strict=True):
                    assert torch.equal(*pair), (taken, to, rows)
            with pytest.raises(ValueError, match="contiguous"):  # as plain gloo
                group.alltoall_base(
                    torch.zeros(6), torch.zeros(12)[::2], [], [], dist.AllToAllOptions()
                )

    store = dist.PrefixStore(str(next(_names)), _store)
    on_ranks(3, run)


def test_a_reduction_that_gloo_lacks_is_refused_by_name():
    def run(group, rank):
        with pytest.raises(ConfigError, match="SUM, AVG.*PREMUL_SUM"):
            all_reduce(group, torch.ones(2), dist._make_nccl_premul_sum(2.0))

    on_ranks(1, run)


def test_a_second_round_has_the_timeout_that_was_set_since_and_a_failed_wait_fails_again():
    failed = threading.Event()

    def run(group, rank):
        group._gloo._set_default_timeout(timedelta(seconds=1))
        if rank:  # without a second round, so that the other rank's has nobody to talk to
            group._second_rounds = SimpleNamespace(start=lambda start: _SecondRound())
        work = all_reduce(group, torch.ones(4099))
        if rank:
            assert failed.wait(25)
            return
        for _ in range(2):
            with pytest.raises(RuntimeError, match="[Tt]imed out"):
                work.wait()
        assert work.is_completed()  # as gloo's own
        failed.set()

    on_ranks(2, run)


def test_a_wait_may_have_a_timeout_of_its_own():
    asked = threading.Event()

    def run(group, rank):
        if rank:
            assert asked.wait(25)
        work = all_reduce(group, torch.ones(4099))
        if not rank:
            with pytest.raises(RuntimeError, match="longer than 0:00:00.2"):
                work.wait(timedelta(seconds=0.2))
            asked.set()
        work.wait()

    on_ranks(2, run)


def test_progress_needs_nobody_who_waits():
    """One rank waits for something else, in this thread or another, before it waits for a sum."""
    met = threading.Barrier(2, timeout=25)

    def run(group, rank):
        reduced = torch.ones(4099)
        work = all_reduce(group, reduced)
        if rank:
            work.wait()
        met.wait()
        message = torch.tensor([float(rank)])
        (group.send([message], 1, 0) if rank == 0 else group.recv([message], 0, 0)).wait()
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work.wait) for _ in range(2)]:
                assert done.result()
        return reduced, message

    for reduced, message in on_ranks(2, run):
        assert reduced.eq(2).all() and message.item() == 0


def test_sums_of_inference_tensors():
    def run(group, rank):
        with torch.inference_mode():
            tensor = torch.ones(4099)
            work = all_reduce(group, tensor)
        work.wait()
        return tensor

    for tensor in on_ranks(2, run):
        assert tensor.eq(2).all()


def test_an_interrupted_result_is_a_failure(monkeypatch):
    def interrupted(*scratch):
        raise KeyboardInterrupt

    def run(group, rank):
        work = group.all_gather_single(torch.empty(4), torch.ones(4))
        monkeypatch.setattr(ordered_gloo, "_free", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            monkeypatch.undo()

    on_ranks(1, run)


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent():
    def run(group, rank):
        with pytest.raises(ConfigError, match=r"reduce-scatter over 1 ranks: .*\(4,\).*\(5,\)"):
            reduce_scatter(group, torch.empty(5), torch.ones(4))
        with pytest.raises(ConfigError, match=r"all-gather .*float32 .*float64"):
            group.all_gather_single(torch.empty(4), torch.ones(4, dtype=torch.float64))

    on_ranks(1, run)


def test_at_exit_a_thread_that_still_holds_a_tensor_is_waited_for_but_not_for_ever():
    """It would free it when the interpreter has gone, which aborts the process."""

    def run(group, rank):
        tensor = torch.ones(4099)
        group.allreduce([tensor]).wait()
        _wait_until_dropped(group._in_use)
        rounds = [group._gloo, group._second_gloo]
        assert set(group._in_use) == {id(each) for each in rounds}
        assert all(each() is None for held in group._in_use.values() for each in held)

    on_ranks(2, run)
    held = [torch.ones(1)]
    refs = {0: [weakref.ref(held[0])]}
    timer = threading.Timer(0.2, held.clear)
    start = time.monotonic()
    timer.start()
    _wait_until_dropped(refs)
    assert not held and 0.2 <= time.monotonic() - start < EXIT_SECONDS
    held.append(torch.ones(1))
    start = time.monotonic()
    _wait_until_dropped({0: [weakref.ref(held[0])]})
    assert EXIT_SECONDS <= time.monotonic() - start < 2 * EXIT_SECONDS


def test_the_thread_of_second_rounds_ends_before_the_interpreter():
    code = """
import atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate()]))  # the last one
import torch, torch.distributed as dist
import graph_trainer as gt
dist.init_process_group(gt.cpu_backend(), store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4099))
group = dist.group.WORLD  # lives as long as the interpreter
assert len(threading.enumerate()) == 2
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['MainThread']\n", done.stderr
