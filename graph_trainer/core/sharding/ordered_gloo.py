"""The process group of CPU ranks: data moves by gloo's all-to-all, sums are taken in rank order.

gloo's reduce-scatter is an all-reduce inside, the order in which its ring adds depends on where in
a tensor a number stands, and several of its all-gathers in flight corrupt the heap (torch 2.13).
Here gathers, reduce-scatters and all-reduces are all-to-alls on one gloo thread. A sum adds the
ranks' numbers in the order of the ranks, whichever bucket they travel in.
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
from typing import TYPE_CHECKING, Any

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
"""How long a process that ends waits for a thread of a group. One that frees a tensor or a
`dist.Work` needs the interpreter's lock, and aborts the process if the interpreter has ended by
then; one that waits for a rank that has gone may wait for long.
"""

Started = tuple[Any, Callable[[], None]]
"""A collective under way: what to wait for, a `dist.Work`, and what then puts its result in place.
"""

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
    """A process group of CPU ranks. What is not overridden here is gloo's own.

    A collective keeps what it reads until it is waited for, and scratch memory: an all-gather as
    many bytes as its output, a reduce-scatter as its input, an all-reduce as its tensor, or for
    each rank twice as many as a small one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # When a second round starts depends on the rank. On connections of their own, second
        # rounds meet each other, whatever else a rank has started by then.
        self._gloo, self._second_gloo = (
            gloo_with_one_thread(dist.PrefixStore(name, store), rank, size, timeout)
            for name in ("first", "second")
        )
        self._second_rounds: SecondRounds | None = None
        self._held: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        weakref.finalize(self, _wait_until_dropped, self._held)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)

    # C++ calls the coalesced collectives, Python the others, and fake tensors take torch's own
    # way. Each has a name in torch 2.11 and another in later ones.

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
        # gloo's own writes past an output that is not contiguous
        whole = [torch.stack(parts) for parts in tensors]
        return self.reduce_scatter_tensor_coalesced(outputs, whole, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> Any:
        pairs = zip(outputs, tensors, strict=True)
        return _start("all_gather", tensors, outputs, (self._gather(*p) for p in pairs))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any
    ) -> Any:
        pairs = zip(outputs, tensors, strict=True)
        started = (self._scatter(*pair, opts.reduceOp) for pair in pairs)
        return _start("reduce_scatter", tensors, outputs, started)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        started = (self._all_reduce(each, opts.reduceOp) for each in tensors)
        return _start("all_reduce", tensors, tensors, started)

    # What gloo itself does is called by name: torch's class for process groups in Python would call
    # it with the interpreter's lock held, and gloo's thread waits for that lock while it holds
    # its own.

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
        if all(each.is_contiguous() for each in tensors):
            return self._gloo.broadcast(tensors, *opts)
        # gloo's own takes the memory for contiguous
        rows = [_row_of(each) for each in tensors]

        def finish() -> None:
            for row, tensor in zip(rows, tensors, strict=True):
                _put_back(row, tensor)

        return _start("broadcast", rows, tensors, [(self._gloo.broadcast(rows, *opts), finish)])

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
        _check("all-gather", whole=output, part=tensor, ranks=self.size())
        sent, received = tensor.reshape(1, -1).repeat(self.size(), 1), _row_of(output)

        def finish() -> None:
            _put_back(received, output)
            _free(sent)

        return self._exchange(self._gloo, received, sent), finish

    def _scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: Any) -> Started:
        _check("reduce-scatter", whole=tensor, part=output, ranks=self.size())
        reduce = _reduction(op, self.size())
        received = tensor.new_empty(tensor.shape)

        def finish() -> None:
            reduced = _row_of(output)
            reduce(received.view(self.size(), -1), reduced)
            _put_back(reduced, output)
            _free(received)

        return self._exchange(self._gloo, received, tensor.contiguous()), finish

    def _all_reduce(self, tensor: torch.Tensor, op: Any) -> Started:
        reduce, size, flat = _reduction(op, self.size()), self.size(), _row_of(tensor)

        def put_back(*scratch: torch.Tensor) -> None:
            _put_back(flat, tensor)
            _free(*scratch)

        if flat.nbytes <= _SMALL_BYTES:
            sent = flat.repeat(size, 1)
            received = torch.empty_like(sent)

            def finish() -> None:
                reduce(received, flat)
                put_back(sent, received)

            return self._exchange(self._gloo, received, sent), finish

        # Each rank reduces one part of the tensor, and then all gather the parts.
        parts = flat.tensor_split(size)
        mine = parts[self.rank()]
        sizes, sizes_of_mine = [len(part) for part in parts], [len(mine)] * size
        gathered = flat.new_empty(size, len(mine))
        first = self._exchange(self._gloo, gathered, flat, sizes_of_mine, sizes)

        def start_second() -> dist.Work:
            first.wait()
            reduce(gathered, mine)
            gathered.copy_(mine.expand_as(gathered))
            take_timeout(self._second_gloo, self._gloo)
            return self._exchange(self._second_gloo, flat, gathered, sizes, sizes_of_mine)

        if self._second_rounds is None:
            self._second_rounds = SecondRounds()
        return self._second_rounds.start(start_second), lambda: put_back(gathered)

    def _exchange(
        self,
        gloo: Any,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
    ) -> dist.Work:
        """Start an all-to-all of bytes, equal parts unless the elements of each are given.

        gloo moves bytes of every dtype alike, and knows fewer dtypes than torch.
        """
        width = sent.itemsize
        equal = [sent.numel() // gloo.size()] * gloo.size()
        views = [each.view(-1).view(torch.uint8) for each in (received, sent)]
        work = gloo.alltoall_base(
            *views,
            [width * n for n in received_sizes or equal],
            [width * n for n in sent_sizes or equal],
            dist.AllToAllOptions(),
        )
        # its thread has dropped what came before
        self._held[id(gloo)] = [weakref.ref(each) for each in views]
        return work


def _wait_until_dropped(held: dict[int, list[weakref.ref[torch.Tensor]]]) -> None:
    """Wait at exit until gloo's threads have freed what they were given."""
    end = time.monotonic() + EXIT_SECONDS
    while any(each() is not None for each in chain(*held.values())) and time.monotonic() < end:
        time.sleep(0.001)


class _Work(dist.Work):
    """Collectives under way. The results are in place once they were waited for."""

    def __init__(
        self, started: list[Started], sent: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._lock = threading.Lock()  # two threads may wait
        self._left = started
        self._failure: BaseException | None = None
        self._sent = sent  # gloo may drop them sooner, at a moment that cannot be predicted
        self._results = results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work, _ in list(self._left):
            work.wait(timeout)
        with self._lock, torch.inference_mode():
            if self._failure is not None:
                raise self._failure
            try:
                while self._left:
                    _, finish = self._left.pop(0)
                    finish()
            except BaseException as error:  # an interrupt, too, leaves half a result
                self._failure = error
                raise
        self._sent = []
        return True

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work, _ in list(self._left)):
            return False
        with contextlib.suppress(Exception):  # `wait` raises it
            self.wait()  # puts the results in place
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done, with the results as its value. Waits for them."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future


def _start(
    name: str, sent: list[torch.Tensor], results: list[torch.Tensor], collectives: Iterable[Started]
) -> _Work:
    """Start the collectives by consuming the iterable, inside one profiler range."""
    with torch.no_grad(), record_function(f"{BACKEND}:{name}"):
        return _Work(list(collectives), sent, results)


def _check(name: str, *, whole: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    """Before anything is sent, refuse a whole that is not `ranks` times the part."""
    if whole.numel() != ranks * part.numel() or whole.dtype != part.dtype:
        raise ConfigError(
            f"{name} over {ranks} ranks: {whole.dtype} {tuple(whole.shape)} is not {ranks} times "
            f"{part.dtype} {tuple(part.shape)}"
        )


def _row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one contiguous row: the tensor's own memory, or a copy."""
    return tensor.contiguous().view(-1)


def _put_back(row: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write a row of `_row_of` into its tensor, where it is a copy."""
    if not tensor.is_contiguous():
        tensor.copy_(row.view(tensor.shape))


def _free(*scratch: torch.Tensor) -> None:
    """Free scratch memory here and now: gloo's thread may hold a tensor a little longer."""
    for tensor in scratch:
        tensor.untyped_storage().resize_(0)


def _reduction(op: Any, ranks: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that reduces [ranks, n] into [n], one rank after the other.

    Raises:
        ConfigError: an op that CPU ranks do not have.
    """
    function = next((function for known, function in _REDUCTIONS if op == known), None)
    if function is None:
        names = ", ".join(known.name for known, _ in _REDUCTIONS)
        raise ConfigError(
            f"CPU ranks cannot reduce by what was asked; they have {names}. PREMUL_SUM, which "
            "FSDP2 requests, runs on NCCL only"
        )

    def reduce(rows: torch.Tensor, out: torch.Tensor) -> None:
        result = rows[0]
        for row in rows[1:]:
            result = function(result, row, out=out)
        if ranks == 1:
            out.copy_(result)
        if op == dist.ReduceOp.AVG:
            whole = not (out.is_floating_point() or out.is_complex())
            out.div_(ranks, rounding_mode="trunc" if whole else None)

    return reduce


class SecondRounds:
    """The thread that starts the second rounds of a group, in the order of the first ones.

    It does not depend on who waits for what: ranks may wait for their collectives in different
    orders, in several threads, or for something else altogether.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], dist.Work], Future[Any]] | None]
        self._waiting = queue.SimpleQueue()
        thread = threading.Thread(target=_start_each, args=(self._waiting,), daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, self._waiting)

    def start(self, start: Callable[[], dist.Work]) -> _SecondRound:
        second = _SecondRound()
        self._waiting.put((start, second.started))
        return second


def _start_each(
    waiting: queue.SimpleQueue[tuple[Callable[[], dist.Work], Future[Any]] | None],
) -> None:
    while (item := waiting.get()) is not None:
        start, started = item
        try:
            with torch.inference_mode():
                started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
        del item, start, started  # or they would live until the next collective


class _SecondRound:
    """The second round of an all-reduce, which starts once the first one is over."""

    def __init__(self) -> None:
        self.started: Future[dist.Work] = Future()

    def wait(self, timeout: timedelta) -> None:
        start = time.monotonic()
        try:
            work = self.started.result(timeout.total_seconds() or None)
        except TimeoutError:
            raise RuntimeError(f"Timed out: an all-reduce took longer than {timeout}") from None
        rest = timeout - timedelta(seconds=time.monotonic() - start)
        work.wait(max(rest, timedelta(milliseconds=1)) if timeout else timeout)

    def is_completed(self) -> bool:
        if not self.started.done():
            return False
        return self.started.exception() is not None or self.started.result().is_completed()


def _end(thread: threading.Thread, waiting: queue.SimpleQueue[Any]) -> None:
    waiting.put(None)
    if thread is not threading.current_thread():  # which may free the group
        thread.join(EXIT_SECONDS)
