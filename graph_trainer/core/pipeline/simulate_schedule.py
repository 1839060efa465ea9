"""Simulate the schedule of a pipeline: when each rank computes, waits and sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graph_trainer.core.torch_private_pipelining import (
    Action,
    ActionKind,
    leaves_of,
    microbatch_of,
    ranks_of_stages,
    splits_backward,
)
from graph_trainer.errors import VerificationError


class StageSeconds(NamedTuple):
    """How long the programs of a stage run."""

    forward: float
    """Of one microbatch."""
    backward: float
    """Of one microbatch, in a schedule that runs no backward in two actions."""
    unshard: float = 0.0
    """The gathers that all microbatches share."""
    backward_input: float = 0.0
    """The gradient of what the stage received, of one microbatch."""
    backward_weight: float = 0.0
    """The gradients of its parameters, after that."""
    reduce_grad: float = 0.0
    """The reductions of gradients that all microbatches share."""


class Span(NamedTuple):
    """A time in which a rank runs a program of one of its stages."""

    rank: int
    """Of the pipeline."""
    stage: int
    kind: ActionKind
    """FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, UNSHARD or REDUCE_GRAD."""
    microbatch: int | None
    """None of UNSHARD and REDUCE_GRAD."""
    start: float
    """Seconds after the beginning of the schedule."""
    seconds: float
    exposed_seconds: float
    """How long the rank was idle before, while the tensor that the program takes was sent."""

    @property
    def end(self) -> float:
        """Seconds after the beginning of the schedule."""
        return self.start + self.seconds


class Transfer(NamedTuple):
    """A tensor that one rank sends to another."""

    sender: int
    receiver: int
    stage: int
    """The stage that sends it."""
    forward: bool
    """Whether it is what forward passes on; else its gradient."""
    microbatch: int
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ScheduleTimeline:
    """The simulated schedule of all ranks of a pipeline."""

    spans: dict[int, list[Span]]
    """By rank, in the order of time."""
    transfers: list[Transfer]

    @property
    def seconds(self) -> float:
        """Until the last rank ends."""
        return max((spans[-1].end for spans in self.spans.values() if spans), default=0.0)

    def busy_seconds(self, rank: int) -> float:
        """Return for how long a rank computes."""
        return sum(span.seconds for span in self.spans[rank])

    def exposed_seconds(self, rank: int) -> float:
        """Return for how long a rank is idle while a tensor that it waits for is sent."""
        return sum(span.exposed_seconds for span in self.spans[rank])

    def bubble_seconds(self, rank: int) -> float:
        """Return for how long a rank is idle since no tensor for it has been computed."""
        return self.seconds - self.busy_seconds(rank) - self.exposed_seconds(rank)

    @property
    def bubble(self) -> float:
        """The bubble as a part of the schedule, on the mean over ranks; 0 for no time at all."""
        total = self.seconds * len(self.spans)
        return sum(map(self.bubble_seconds, self.spans)) / total if total else 0.0


_IS_FORWARD = {
    ActionKind.FORWARD: True,
    ActionKind.SEND_F: True,
    ActionKind.RECV_F: True,
    ActionKind.FULL_BACKWARD: False,
    ActionKind.BACKWARD_INPUT: False,
    ActionKind.SEND_B: False,
    ActionKind.RECV_B: False,
}

_Tensor = tuple[int, bool, int]
"""The stage that computes a tensor, whether in forward, and the microbatch."""


def simulate_schedule(
    actions: Mapping[int, Sequence[Action]],
    seconds: Mapping[int, StageSeconds],
    send_seconds: Callable[[int, int], float] = lambda sender, receiver: 0.0,
) -> ScheduleTimeline:
    """Simulate the actions of all ranks. Linear in actions.

    A rank runs its actions in order, as torch's runtime does. A program starts when the rank is
    free and the tensor that it takes has been received. Sends and receives occupy no rank: a
    transfer starts when both of its ranks have reached it, and when the one before it between these
    ranks in this direction is complete. A forward that a schedule overlaps with a backward runs
    before it, as `PipelineStep` runs them. Other actions take no time.

    Args:
        actions: by rank, with sends and receives: of `actions_of`.
        seconds: by stage.
        send_seconds: of a tensor, by the ranks of sender and receiver.

    Raises:
        VerificationError: ranks would wait for each other without end.
    """
    simulation = _Simulation(
        ranks_of_stages(actions), seconds, send_seconds, splits_backward(actions)
    )
    left: dict[int, Iterator[None]] = {r: simulation.run(r, order) for r, order in actions.items()}
    while left:
        moved = simulation.done
        for rank, running in list(left.items()):
            if next(running, _ENDED) is _ENDED:
                del left[rank]
        if left and simulation.done == moved:
            waits = ", ".join(f"rank {rank}" for rank in left)
            raise VerificationError(f"the schedule never ends: {waits} wait for each other")
    transfers = sorted(simulation.transfers, key=lambda transfer: transfer.start)
    return ScheduleTimeline(simulation.spans, transfers)


_ENDED = object()


class _Simulation:
    """What the ranks have done so far."""

    def __init__(
        self,
        rank_of: dict[int, int],
        seconds: Mapping[int, StageSeconds],
        send_seconds: Callable[[int, int], float],
        splits: bool,
    ) -> None:
        self._rank_of = rank_of
        self._splits = splits
        self._seconds = seconds
        self._send_seconds = send_seconds
        self.spans: dict[int, list[Span]] = {}
        self.transfers: list[Transfer] = []
        self.done = 0
        """The number of actions that ranks have run."""
        self._posted: dict[tuple[_Tensor, str], float] = {}
        self._arrived: dict[_Tensor, tuple[float, float]] = {}  # when sent and when received
        self._link_free: dict[tuple[int, int], float] = defaultdict(float)

    def run(self, rank: int, order: Sequence[Action]) -> Iterator[None]:
        """Run the actions of a rank; yield whenever one has to wait for another rank."""
        spans = self.spans[rank] = []
        now = 0.0
        for action in leaves_of(order):
            kind, stage = action.computation_type, action.stage_index
            if kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                self._post((stage, _IS_FORWARD[kind], microbatch_of(action)), "send", now)
            elif kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                source = self._source(action)
                assert source is not None
                self._post(source, "receive", now)
            elif kind in (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD):
                of_stage = self._seconds[stage]
                is_unshard = kind is ActionKind.UNSHARD
                duration = of_stage.unshard if is_unshard else of_stage.reduce_grad
                if duration:
                    spans.append(Span(rank, stage, kind, None, now, duration, 0.0))
                now += duration
            elif action.is_compute_op:
                sent = received = now
                source = self._source(action)
                if source is not None and self._rank_of.get(source[0], rank) != rank:
                    while source not in self._arrived:
                        yield
                    sent, received = self._arrived[source]
                start = max(now, received)
                exposed = max(0.0, start - max(now, sent))
                duration, microbatch = self._duration(stage, kind), microbatch_of(action)
                spans.append(Span(rank, stage, kind, microbatch, start, duration, exposed))
                now = start + duration
            self.done += 1

    def _duration(self, stage: int, kind: ActionKind) -> float:
        of_stage = self._seconds[stage]
        if kind is ActionKind.FORWARD:
            return of_stage.forward
        if kind is ActionKind.BACKWARD_INPUT:
            return of_stage.backward_input
        if kind is ActionKind.BACKWARD_WEIGHT:
            return of_stage.backward_weight
        # a stage whose backward is split runs both parts
        if self._splits:
            return of_stage.backward_input + of_stage.backward_weight
        return of_stage.backward

    def _source(self, action: Action) -> _Tensor | None:
        """Return the tensor that an action takes, of a stage that may not exist; None for one that
        takes nothing of another stage."""
        forward = _IS_FORWARD.get(action.computation_type)
        if forward is None:
            return None
        stage = action.stage_index - 1 if forward else action.stage_index + 1
        return stage, forward, microbatch_of(action)

    def _post(self, tensor: _Tensor, what: str, now: float) -> None:
        """Note that one of the ranks of a transfer has reached it, and let it start with both."""
        self._posted[tensor, what] = now
        if (tensor, "send") not in self._posted or (tensor, "receive") not in self._posted:
            return
        stage, forward, microbatch = tensor
        sender = self._rank_of[stage]
        receiver = self._rank_of[stage + 1 if forward else stage - 1]
        sent = self._posted[tensor, "send"]
        ready = max(sent, self._posted[tensor, "receive"])
        start = max(ready, self._link_free[sender, receiver])
        duration = self._send_seconds(sender, receiver)
        self._link_free[sender, receiver] = start + duration
        self._arrived[tensor] = sent, start + duration
        self.transfers.append(
            Transfer(sender, receiver, stage, forward, microbatch, start, duration)
        )
