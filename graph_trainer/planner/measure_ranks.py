"""Time ops, launches, collectives and the host on ranks of this machine, at once as in a run."""

from __future__ import annotations

import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graph_trainer.errors import GraphTrainerError
from graph_trainer.planner.calibration import CollectiveSample, OverlapSample, Samples
from graph_trainer.planner.measured_calls import (
    CollectiveCall,
    OpCall,
    op_named,
    real_arguments,
)
from graph_trainer.planner.terminal import OnProgress

_ROUNDS = 5
"""Turns of each measurement, of which the median counts."""
_OP_SECONDS = 0.02
"""Of a turn of an op: several slices of a scheduler that shares cores among ranks."""
_COLLECTIVE_SECONDS = 0.03
_FEWEST = 3
"""Calls of a turn, unless one takes as long as the turn."""
_WORKING_SET = 16 * 2**20
"""Bytes of copies of an op's arguments that take turns, for what is new in a step is in no first
or second cache."""
_MOST_COPIES = 6
_PARAMETERS = 100
"""Of which clipping and optimizer are timed."""


@dataclass(frozen=True, slots=True)
class Job:
    """What ranks measure."""

    ops: Sequence[OpCall]
    collectives: Sequence[CollectiveCall]
    device: str
    """ "cuda" or "cpu"."""
    ranks: int
    seconds: float
    """After which no further op or collective is begun."""


@dataclass(slots=True)
class Measured:
    """The seconds that one rank measured, in the order of the job."""

    ops: list[float | None] = field(default_factory=list)
    """None for an op that failed, or for which there was no time."""
    collectives: list[float | None] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    overlaps: list[OverlapSample] = field(default_factory=list)
    host: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def measure(job: Job, on_progress: OnProgress = lambda line: None) -> tuple[Samples, list[str]]:
    """Start the ranks, and return the means of what they measured.

    All ranks run the same op at the same time, because in a run they share cores and memory.

    Returns:
        The samples, and a line for each op that could not be run.

    Raises:
        GraphTrainerError: a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = []
        for rank in range(job.ranks):
            process = context.Process(target=_rank, args=(rank, store, job, results), daemon=True)
            process.start()
            processes.append(process)
        on_progress(f"starting {job.ranks} ranks")
        measured: dict[int, Measured] = {}
        try:
            while len(measured) < job.ranks:
                try:
                    rank, news = results.get(timeout=0.5)
                except queue.Empty:
                    ended = [n for n, p in enumerate(processes) if p.exitcode not in (None, 0)]
                    if ended:
                        raise GraphTrainerError(
                            f"calibrate --measure: rank {ended[0]} of {job.ranks} ended with exit "
                            f"code {processes[ended[0]].exitcode}; its error is above"
                        ) from None
                    continue
                if isinstance(news, str):
                    on_progress(news)
                else:
                    measured[rank] = news
        finally:
            for process in processes:
                process.join(timeout=10 if len(measured) == job.ranks else 0)
                if process.is_alive():
                    process.terminate()
    ranks = [measured[rank] for rank in range(job.ranks)]
    return _samples(job, ranks), list(dict.fromkeys(line for m in ranks for line in m.failed))


def _samples(job: Job, ranks: list[Measured]) -> Samples:
    """Return the means over ranks, for a step is as fast as all of them."""
    samples = Samples()
    for call, *seconds in zip(job.ops, *(m.ops for m in ranks), strict=True):
        times = [s for s in seconds if s is not None]
        if len(times) == len(ranks):
            samples.ops.append(replace(call.sample, seconds=statistics.fmean(times)))
    for issued, *seconds in zip(job.collectives, *(m.collectives for m in ranks), strict=True):
        times = [s for s in seconds if s is not None]
        if len(times) == len(ranks):
            timed: CollectiveSample = replace(issued.sample, seconds=statistics.fmean(times))
            samples.collectives.append(timed)
    samples.launches = [value for m in ranks for value in m.launches]
    samples.overlaps = [overlap for m in ranks for overlap in m.overlaps]
    for key in ranks[0].host:
        samples.host[key] = [m.host[key] for m in ranks]
    return samples


def _rank(rank: int, store: str, job: Job, results: Any) -> None:
    """Measure as one rank, and put the result into a queue."""
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    elif "OMP_NUM_THREADS" not in os.environ and job.ranks > 1:
        torch.set_num_threads(1)  # as torchrun does
    backend = "nccl"
    if job.device == "cpu":
        from graph_trainer.core.sharding.ordered_gloo import cpu_backend

        backend = cpu_backend()
    dist.init_process_group(
        backend, store=dist.FileStore(store, job.ranks), rank=rank, world_size=job.ranks
    )
    report = results.put if rank == 0 else lambda news: None
    bench = Bench(rank, job, lambda line: report((rank, line)))
    results.put((rank, bench.run()))
    results.close()
    results.join_thread()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends


class Bench:
    """The measurements of one rank."""

    def __init__(self, rank: int, job: Job, say: OnProgress) -> None:
        self._rank, self._job, self._say = rank, job, say
        self._device = (
            torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
        )
        self._deadline = time.perf_counter() + job.seconds
        self._result = Measured()

    def run(self) -> Measured:
        """Measure all there is time for."""
        self._host()
        self._collectives()
        self._ops()
        return self._result

    def _sync(self) -> None:
        if self._job.device == "cuda":
            torch.cuda.synchronize()

    def _agreed(self, value: float) -> float:
        """Return the greatest value of all ranks, at a point that all have reached."""
        tensor = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def _in_time(self) -> bool:
        return self._agreed(time.perf_counter() - self._deadline) < 0

    def _turns(self, call: Callable[[int], object], seconds: float, count: int = 0) -> float:
        """Return the time of a call: the median of turns of about `seconds`, or of `count` calls.

        All ranks do the same number of calls.
        """
        if not count:
            start = time.perf_counter()
            call(0)
            self._sync()
            once = self._agreed(time.perf_counter() - start)
            count = max(_FEWEST if once < seconds else 1, min(2000, round(seconds / once)))
        times = []
        for _ in range(_ROUNDS):
            self._agreed(0.0)
            start = time.perf_counter()
            for place in range(count):
                call(place)
            self._sync()
            times.append((time.perf_counter() - start) / count)
        return statistics.median(times)

    def _ops(self) -> None:
        calls = self._job.ops
        for place, call in enumerate(calls):
            if place % 20 == 0:
                self._say(f"op {place + 1} of {len(calls)}: {call.sample.op}")
            in_time = self._in_time()
            self._result.ops.append(self._op(call) if in_time else None)

    def _op(self, call: OpCall) -> float | None:
        op = op_named(call.target)
        problem, copies = "", []
        try:
            with torch.no_grad():
                first = real_arguments(call, self._device)
                size = sum(t.numel() * t.element_size() for t in _tensors(first))
                number = max(1, min(_MOST_COPIES, _WORKING_SET // max(1, size)))
                copies = [first, *(real_arguments(call, self._device) for _ in range(number - 1))]
                op(*first[0], **first[1])
                self._sync()
        except Exception as error:  # whatever an op raises on numbers that are not the run's
            problem = str(error).partition("\n")[0]
        if self._agreed(float(bool(problem))):
            if problem:
                self._result.failed.append(f"{call.target}: {problem}")
            return None

        def run(place: int) -> None:
            args, kwargs = copies[place % len(copies)]
            op(*args, **kwargs)

        with torch.no_grad():
            return self._turns(run, _OP_SECONDS)

    def _collectives(self) -> None:
        groups = {ranks: self._groups(ranks) for ranks in _distinct_groups(self._job)}
        calls = self._job.collectives
        for place, call in enumerate(calls):
            if place % 10 == 0:
                self._say(f"collective {place + 1} of {len(calls)}: {call.sample.kind}")
            if not self._in_time():
                self._result.collectives.append(None)
                continue
            issue = self._issued(call, groups[call.sample.ranks])

            def run(place: int, issue: Callable[[], Any] = issue) -> None:
                _wait(issue())

            run(0)
            seconds = self._turns(run, _COLLECTIVE_SECONDS)
            self._result.collectives.append(seconds)
            if place < 2:
                self._overlap(issue, seconds)

    def _overlap(self, issue: Callable[[], Any], collective: float) -> None:
        """Time kernels while a collective runs, about half as long again as it."""
        products = [c for c in self._job.ops if c.target == "aten.mm.default"]
        if not products:
            return
        call = min(products, key=lambda c: c.sample.model_seconds)
        args, _ = real_arguments(call, self._device)
        op = op_named(call.target)
        once = self._agreed(self._turns(lambda place: op(*args), 0.01))
        repeats = max(1, round(1.5 * self._agreed(collective) / once))
        if repeats > 10_000:
            return

        def compute(place: int) -> None:
            for _ in range(repeats):
                op(*args)

        def together(place: int) -> None:
            work = issue()
            compute(place)
            _wait(work)

        count = max(_FEWEST, round(_COLLECTIVE_SECONDS / (repeats * once)))
        alone = self._turns(compute, 0.0, count)
        both = self._turns(together, 0.0, count)
        self._result.overlaps.append(OverlapSample(alone, collective, both))

    def _groups(self, ranks: tuple[int, ...]) -> str:
        """Return the name of this rank's group among groups that are placed as `ranks`."""
        name = ""
        for members in placed_alike(ranks, self._job.ranks):
            group = dist.new_group(list(members))
            if self._rank in members:
                name = group.group_name
        return name

    def _issued(self, call: CollectiveCall, group: str) -> Callable[[], Any]:
        """Return a function that starts a collective on this rank's group."""
        if not group:  # a rank without a group of this shape
            return lambda: None
        op = op_named(call.target)
        args, kwargs = real_arguments(call, self._device)
        kwargs = {key: group if key == "group_name" else kwargs[key] for key in kwargs}
        args = tuple(
            group if isinstance(value, str) and value == call.group_name else value
            for value in args
        )
        return lambda: op(*args, **kwargs)

    def _host(self) -> None:
        """Time launches, and what the host takes for views, clipping and the optimizer."""
        self._say("launches and the host")
        plain = torch.randn(8, device=self._device)
        one = torch.ops.aten.mul.Tensor
        view = torch.ops.aten.view.default
        self._result.launches.append(self._turns(lambda place: one(plain, plain), 0.02))
        host = self._result.host
        host["view_seconds"] = self._turns(lambda place: view(plain, [2, 4]), 0.02)
        if self._job.device == "cuda":
            self._issue_on_gpu(plain)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh(self._job.device, (self._job.ranks,))
        parameters = []
        for _ in range(_PARAMETERS):
            parameter = torch.nn.Parameter(DTensor.from_local(plain.clone(), mesh, [Shard(0)]))
            parameter.grad = DTensor.from_local(plain.clone(), mesh, [Shard(0)])
            parameters.append(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        optimizer = torch.optim.AdamW(parameters, fused=True)

        def clip(place: int) -> None:
            norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
            torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)

        clip(0)
        optimizer.step()
        host["clip_seconds"] = self._turns(clip, 0.0, 3) / _PARAMETERS
        host["optimizer_seconds"] = self._turns(lambda n: optimizer.step(), 0.0, 3) / _PARAMETERS

    def _issue_on_gpu(self, plain: torch.Tensor) -> None:
        """Time how long the host takes to issue ops that the device runs later."""

        def issued(call: Callable[[], object]) -> float:
            self._sync()
            start = time.perf_counter()
            for _ in range(200):  # fewer than a queue of launches holds
                call()
            return (time.perf_counter() - start) / 200

        recorded = plain.clone().requires_grad_()
        host = self._result.host
        issued(lambda: torch.mul(plain, plain))
        host["op_seconds"] = issued(lambda: torch.mul(plain, plain))
        recording = issued(lambda: torch.mul(recorded, plain))
        host["autograd_seconds"] = max(0.0, recording - host["op_seconds"])
        host["read_seconds"] = self._turns(lambda place: plain[0].item(), 0.0, 100)


def _distinct_groups(job: Job) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(call.sample.ranks for call in job.collectives))


def placed_alike(ranks: tuple[int, ...], world_size: int) -> list[tuple[int, ...]]:
    """Divide all ranks into groups that are placed as `ranks`, the group of rank 0 of a mesh.

    A run's other ranks communicate in groups of their own at the same time. A rank that no such
    group contains is left out.
    """
    free = dict.fromkeys(range(world_size))
    groups = []
    for first in range(world_size):
        members = tuple(first + rank - ranks[0] for rank in ranks)
        if all(member in free for member in members):
            groups.append(members)
            for member in members:
                del free[member]
    return groups


def _wait(work: Any) -> None:
    wait = op_named("_c10d_functional.wait_tensor.default")
    for tensor in _tensors(work):
        wait(tensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
