"""The process group of CPU ranks: gloo's all-to-all moves the data, and sums add in rank order.

gloo's reduce-scatter is an all-reduce inside, the order in which its ring adds a number depends on
the number's place in the tensor, and several of its all-gathers at a time corrupt the heap (torch
2.13). Here gathers, reduce-scatters and all-reduces are all-to-alls on one gloo thread. A sum adds
the ranks' numbers in the order of the ranks, in any bucket.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from graph_trainer.core.torch_private import FakeTensor
from graph_trainer.core.torch_private_groups import gloo_with_one_thread, take_timeout
from graph_trainer.errors import ConfigError

BACKEND = "ordered_gloo"
"""The name of the backend once `cpu_backend` has registered it."""

_SMALL_BYTES = 1024
"""Up to this size an all-reduce sends everything to each rank: one round of messages, not two."""

EXIT_SECONDS = 1.0
"""How long a process that ends waits for a thread of a group. A thread that frees a tensor or a
`dist.Work` needs the interpreter's lock, and aborts the process if the interpreter has ended
before. A thread that waits for an ended rank may wait for long.
"""


class Started(NamedTuple):
    """A collective that has started."""

    work: Any
    """A `dist.Work` to wait for."""
    finish: Callable[[], None]
    """Puts the result in place after the wait."""


_REDUCTIONS: tuple[tuple[Any, Callable[..., torch.Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
)


def cpu_backend() -> str:
    """Register the process group of CPU ranks with torch.distributed and return its name.

    Groups that `new_group` and device meshes make beside it are of the same kind. Calling it again
    changes nothing. Example, on every rank::

        dist.init_process_group(gt.cpu_backend())
    """
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, OrderedGloo, devices=["cpu"])
    return BACKEND


if TYPE_CHECKING:
    # torch's stubs lack the constructor (rank, size), and differ from what torch calls
    _Base: Any
else:
    _Base = dist.ProcessGroup


class OrderedGloo(_Base):
    """A process group of CPU ranks. Methods that are not overridden here are those of gloo.

    Until its wait, a collective keeps its inputs and scratch memory: an all-gather as many bytes as
    its output, a reduce-scatter as its input, an all-reduce as its tensor. A small all-reduce keeps
    twice the bytes of its tensor for each rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # Ranks start the second round of an all-reduce at different times. Second rounds have
        # separate connections, so that they match each other and not another collective.
        first_store = dist.PrefixStore("first", store)
        second_store = dist.PrefixStore("second", store)
        self._gloo = gloo_with_one_thread(first_store, rank, size, timeout)
        self._second_gloo = gloo_with_one_thread(second_store, rank, size, timeout)
        self._second_rounds: SecondRounds | None = None
        self._in_use: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """By id of a gloo group, the tensors of its last collective."""
        weakref.finalize(self, _wait_until_dropped, self._in_use)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)

    # C++ calls the coalesced collectives, Python the others, and torch's implementation runs for
    # fake tensors. Each method has one name in torch 2.11 and another in later versions.

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        if isinstance(tensor, FakeTensor):
            return super()._allgather_base(output, tensor, *(() if opts is None else (opts,)))
        return self.allgather_into_tensor_coalesced([output], [tensor])

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if isinstance(tensor, FakeTensor):
            return super()._reduce_scatter_base(output, tensor, opts)
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        if isinstance(tensors[0], FakeTensor):
            return super().allreduce(tensors, opts)
        return self.allreduce_coalesced(tensors, opts)

    def reduce_scatter(self, outputs: list[torch.Tensor], tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if isinstance(outputs[0], FakeTensor):
            return super().reduce_scatter(outputs, tensors, opts)
        # gloo's reduce_scatter writes past an output that is not contiguous
        inputs = [torch.stack(parts) for parts in tensors]
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> Any:
        pairs = zip(outputs, tensors, strict=True)
        started = (self._gather(output, tensor) for output, tensor in pairs)
        return _start("all_gather", tensors, outputs, started)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any
    ) -> Any:
        pairs = zip(outputs, tensors, strict=True)
        started = (self._scatter(output, tensor, opts.reduceOp) for output, tensor in pairs)
        return _start("reduce_scatter", tensors, outputs, started)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        started = (self._all_reduce(tensor, opts.reduceOp) for tensor in tensors)
        return _start("all_reduce", tensors, tensors, started)

    # The methods below call gloo by name: torch's class for process groups in Python would call it
    # with the interpreter's lock held, and gloo's thread waits for that lock while it holds its
    # own.

    def allgather(self, outputs: Any, tensors: list[torch.Tensor], *opts: Any) -> Any:
        if isinstance(tensors[0], FakeTensor):
            return super().allgather(outputs, tensors, *opts)
        return self._gloo.allgather(outputs, tensors, *opts)

    def alltoall_base(self, output: torch.Tensor, tensor: torch.Tensor, *more: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            return super().alltoall_base(output, tensor, *more)
        return self._gloo.alltoall_base(output, tensor, *more)

    def broadcast(self, tensors: list[torch.Tensor], *opts: Any) -> Any:
        if isinstance(tensors[0], FakeTensor):
            return super().broadcast(tensors, *opts)
        if all(tensor.is_contiguous() for tensor in tensors):
            return self._gloo.broadcast(tensors, *opts)
        # gloo's broadcast assumes that the memory is contiguous
        rows = [_row_of(tensor) for tensor in tensors]

        def finish() -> None:
            for row, tensor in zip(rows, tensors, strict=True):
                _put_back(row, tensor)

        started = Started(self._gloo.broadcast(rows, *opts), finish)
        return _start("broadcast", rows, tensors, [started])

    def send(self, tensors: list[torch.Tensor], *more: Any) -> Any:
        return self._gloo.send(tensors, *more)

    def recv(self, tensors: list[torch.Tensor], *more: Any) -> Any:
        return self._gloo.recv(tensors, *more)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(*(() if opts is None else (opts,)))

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Started:
        _check("all-gather", full=output, part=tensor, ranks=self.size())
        sent = tensor.reshape(1, -1).repeat(self.size(), 1)
        received = _row_of(output)

        def finish() -> None:
            _put_back(received, output)
            _free(sent)

        return Started(self._exchange(self._gloo, received, sent), finish)

    def _scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: Any) -> Started:
        _check("reduce-scatter", full=tensor, part=output, ranks=self.size())
        reduce = _reduction(op, self.size())
        received = tensor.new_empty(tensor.shape)

        def finish() -> None:
            reduced = _row_of(output)
            reduce(received.view(self.size(), -1), reduced)
            _put_back(reduced, output)
            _free(received)

        return Started(self._exchange(self._gloo, received, tensor.contiguous()), finish)

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> Started:
        size = self.size()
        reduce = _reduction(op, size)
        flat = _row_of(tensor)

        def put_back(*scratch: torch.Tensor) -> None:
            _put_back(flat, tensor)
            _free(*scratch)

        if flat.nbytes <= _SMALL_BYTES:
            sent = flat.repeat(size, 1)
            received = torch.empty_like(sent)

            def finish() -> None:
                reduce(received, flat)
                put_back(sent, received)

            return Started(self._exchange(self._gloo, received, sent), finish)

        # Each rank reduces one part of the tensor, and then all ranks gather the parts.
        parts = flat.tensor_split(size)
        local_part = parts[self.rank()]
        sizes = [len(part) for part in parts]
        local_sizes = [len(local_part)] * size
        gathered = flat.new_empty(size, len(local_part))
        first = self._exchange(self._gloo, gathered, flat, local_sizes, sizes)

        def start_second() -> dist.Work:
            first.wait()
            reduce(gathered, local_part)
            gathered.copy_(local_part.expand_as(gathered))
            take_timeout(self._second_gloo, self._gloo)
            return self._exchange(self._second_gloo, flat, gathered, sizes, local_sizes)

        if self._second_rounds is None:
            self._second_rounds = SecondRounds()
        return Started(self._second_rounds.start(start_second), lambda: put_back(gathered))

    def _exchange(
        self,
        gloo: Any,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
    ) -> dist.Work:
        """Start an all-to-all of bytes, of equal parts unless the elements of each part are passed.

        As bytes, because gloo has fewer dtypes than torch.
        """
        width = sent.itemsize
        equal_sizes = [sent.numel() // gloo.size()] * gloo.size()
        received_bytes = received.view(-1).view(torch.uint8)
        sent_bytes = sent.view(-1).view(torch.uint8)
        work = gloo.alltoall_base(
            received_bytes,
            sent_bytes,
            [width * size for size in received_sizes or equal_sizes],
            [width * size for size in sent_sizes or equal_sizes],
            dist.AllToAllOptions(),
        )
        # gloo's thread has dropped the tensors of earlier collectives
        self._in_use[id(gloo)] = [weakref.ref(received_bytes), weakref.ref(sent_bytes)]
        return work


def _wait_until_dropped(in_use: dict[int, list[weakref.ref[torch.Tensor]]]) -> None:
    """Wait at exit until gloo's threads have dropped the tensors of their last collectives."""
    tensors = list(chain(*in_use.values()))
    end = time.monotonic() + EXIT_SECONDS
    while any(tensor() is not None for tensor in tensors) and time.monotonic() < end:
        time.sleep(0.001)


class _Work(dist.Work):
    """Collectives that have started. The results are in place after the wait."""

    def __init__(
        self, started: list[Started], sent: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._lock = threading.Lock()  # two threads may wait
        self._unfinished = started
        self._failure: BaseException | None = None
        # kept until the wait: gloo drops them earlier, at a moment that cannot be predicted
        self._sent = sent
        self._results = results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for started in list(self._unfinished):
            started.work.wait(timeout)
        with self._lock, torch.inference_mode():
            if self._failure is not None:
                raise self._failure
            try:
                while self._unfinished:
                    self._unfinished.pop(0).finish()
            except BaseException as error:  # an interrupt leaves half a result, too
                self._failure = error
                raise
        self._sent = []
        return True

    def is_completed(self) -> bool:
        if not all(started.work.is_completed() for started in list(self._unfinished)):
            return False
        with contextlib.suppress(Exception):  # the caller's `wait` raises it
            self.wait()  # puts the results in place
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait for the results, and return a completed future with them as its value."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future


def _start(
    name: str, sent: list[torch.Tensor], results: list[torch.Tensor], started: Iterable[Started]
) -> _Work:
    """Start the collectives by consuming the iterable, inside one profiler range."""
    with torch.no_grad(), record_function(f"{BACKEND}:{name}"):
        return _Work(list(started), sent, results)


def _check(name: str, *, full: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    """Refuse, before anything is sent, a tensor that does not have the size of `ranks` parts."""
    if full.numel() != ranks * part.numel() or full.dtype != part.dtype:
        raise ConfigError(
            f"{name} over {ranks} ranks: {full.dtype} {tuple(full.shape)} is not {ranks} times "
            f"{part.dtype} {tuple(part.shape)}: pass tensors of matching sizes and one dtype"
        )


def _row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one contiguous row: a view of the tensor if possible, else a copy."""
    return tensor.contiguous().view(-1)


def _put_back(row: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write a row of `_row_of` into its tensor, if the row is a copy."""
    if not tensor.is_contiguous():
        tensor.copy_(row.view(tensor.shape))


def _free(*scratch: torch.Tensor) -> None:
    """Free scratch memory now: gloo's thread may keep a tensor a little longer."""
    for tensor in scratch:
        tensor.untyped_storage().resize_(0)


def _reduction(op: Any, ranks: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that reduces [ranks, n] into [n], one rank after the other.

    Raises:
        ConfigError: an op that CPU ranks do not have.
    """
    # ops are compared one by one, because dist.ReduceOp is not hashable
    function = next((function for known_op, function in _REDUCTIONS if op == known_op), None)
    if function is None:
        names = ", ".join(known_op.name for known_op, _ in _REDUCTIONS)
        raise ConfigError(
            f"CPU ranks cannot reduce by this op: use one of {names}. PREMUL_SUM, which FSDP2 "
            "requests, runs on NCCL only"
        )

    def reduce(rows: torch.Tensor, out: torch.Tensor) -> None:
        result = rows[0]
        for row in rows[1:]:
            result = function(result, row, out=out)
        if ranks == 1:
            out.copy_(result)
        if op == dist.ReduceOp.AVG:
            is_integer = not (out.is_floating_point() or out.is_complex())
            out.div_(ranks, rounding_mode="trunc" if is_integer else None)

    return reduce


class SecondRounds:
    """The thread that starts the second rounds of a group, in the order of the first ones.

    It does not depend on the order of waits: ranks may wait for their collectives in different
    orders, in several threads, or for something else.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Start | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_start_rounds, args=(self._waiting,), daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, self._waiting)

    def start(self, start: Callable[[], dist.Work]) -> _SecondRound:
        second_round = _SecondRound()
        self._waiting.put(_Start(start, second_round.work))
        return second_round


class _Start(NamedTuple):
    """How to start a second round, and where to put its `dist.Work`."""

    start: Callable[[], dist.Work]
    work: Future[dist.Work]


def _start_rounds(waiting: queue.SimpleQueue[_Start | None]) -> None:
    while True:
        item = waiting.get()
        if item is None:
            return
        try:
            with torch.inference_mode():
                item.work.set_result(item.start())
        except BaseException as error:
            item.work.set_exception(error)
        del item  # or it would be alive until the next collective


class _SecondRound:
    """The second round of an all-reduce, which starts after the first one ends."""

    def __init__(self) -> None:
        self.work: Future[dist.Work] = Future()

    def wait(self, timeout: timedelta) -> None:
        start = time.monotonic()
        try:
            work = self.work.result(timeout.total_seconds() or None)
        except TimeoutError:
            raise RuntimeError(f"Timed out: an all-reduce took longer than {timeout}") from None
        if timeout:
            remaining = timeout - timedelta(seconds=time.monotonic() - start)
            timeout = max(remaining, timedelta(milliseconds=1))
        work.wait(timeout)

    def is_completed(self) -> bool:
        if not self.work.done():
            return False
        return self.work.exception() is not None or self.work.result().is_completed()


def _end(thread: threading.Thread, waiting: queue.SimpleQueue[Any]) -> None:
    waiting.put(None)
    if thread is not threading.current_thread():  # this thread itself may free the group
        thread.join(EXIT_SECONDS)
