"""The simulated schedule of a pipeline: bubbles by the formulas, sends, ranks that never end."""

from __future__ import annotations

import itertools

import pytest

from graph_trainer.core.pipeline.simulate_schedule import StageSeconds, simulate_schedule
from graph_trainer.core.torch_private_pipelining import (
    Action,
    ActionKind,
    actions_of,
    most_in_flight,
)
from graph_trainer.errors import VerificationError


def equal_stages(number: int) -> dict[int, StageSeconds]:
    return dict.fromkeys(range(number), StageSeconds(forward=1.0, backward=2.0))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"])
def test_the_bubble_is_that_of_the_formula_and_shrinks(schedule: str) -> None:
    for ranks in (2, 4):
        per_rank = 1 if schedule in ("GPipe", "1F1B") else 2
        bubbles = []
        for microbatches in (4, 8, 16):
            stages = ranks * per_rank
            actions = actions_of(schedule, stages, ranks, microbatches)
            timeline = simulate_schedule(actions, equal_stages(stages))
            bubble = (ranks - 1) / (per_rank * microbatches + ranks - 1)
            assert timeline.bubble == pytest.approx(bubble, abs=1e-12)
            assert timeline.seconds == pytest.approx(3 * (per_rank * microbatches + ranks - 1))
            bubbles.append(timeline.bubble)
        assert bubbles == sorted(bubbles, reverse=True)


def test_backwards_in_two_parts_make_the_bubble_smaller() -> None:
    """With the same work; the paper of ZBV (arxiv.org/abs/2401.10241) has it as long as the ramp up
    and down where forward and both parts take as long."""
    ranks, microbatches = 4, 16
    seconds = StageSeconds(1.0, 2.0, backward_input=1.0, backward_weight=1.0)
    timelines = {
        schedule: simulate_schedule(
            actions_of(schedule, 2 * ranks, ranks, microbatches),
            dict.fromkeys(range(2 * ranks), seconds),
        )
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    }
    for timeline in timelines.values():
        for rank in range(ranks):
            assert timeline.busy_seconds(rank) == 2 * microbatches * 3.0
    whole = timelines.pop("Interleaved1F1B")
    assert all(timeline.seconds < whole.seconds for timeline in timelines.values())
    # the last rank begins after as many forwards as there are ranks before it
    zbv = timelines["ZBVZeroBubble"]
    assert zbv.seconds == 2 * microbatches * 3.0 + ranks - 1


def test_a_step_is_as_long_as_its_busiest_rank_and_a_bubble_at_least() -> None:
    seconds = {
        0: StageSeconds(1.0, 2.0, unshard=0.5),
        1: StageSeconds(2.0, 4.0),
        2: StageSeconds(1.0, 1.0),
        3: StageSeconds(0.5, 0.25),
    }
    ranks = 2
    for schedule in ("Interleaved1F1B", "LoopedBFS"):
        timeline = simulate_schedule(actions_of(schedule, 4, ranks, 4), seconds)
        busy = [timeline.busy_seconds(rank) for rank in range(ranks)]
        assert busy == pytest.approx([4 * 5.0 + 0.5, 4 * 6.75])
        assert timeline.seconds >= max(busy)
        # programs of a rank do not overlap, and nothing starts before the stage before it ends
        for spans in timeline.spans.values():
            assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
        ends = {
            (span.stage, span.kind, span.microbatch): span.end
            for spans in timeline.spans.values()
            for span in spans
        }
        for span in itertools.chain(*timeline.spans.values()):
            forward = span.kind is ActionKind.FORWARD
            before = span.stage - 1 if forward else span.stage + 1
            assert span.start >= ends.get((before, span.kind, span.microbatch), 0.0)
        assert timeline.bubble_seconds(0) > 0 == timeline.exposed_seconds(0)


def test_sends_delay_what_waits_for_them_and_take_turns() -> None:
    actions, seconds = actions_of("1F1B", 2, 2, 4), equal_stages(2)
    plain = simulate_schedule(actions, seconds)
    sent = simulate_schedule(actions, seconds, lambda sender, receiver: 0.25)
    # the first microbatch passes to the last stage and back: the rest is hidden or not
    assert sent.seconds >= plain.seconds + 2 * 0.25
    assert len(sent.transfers) == 8
    assert sent.exposed_seconds(1) >= 0.25
    for rank in (0, 1):
        idle = sent.seconds - sent.busy_seconds(rank)
        both = sent.bubble_seconds(rank) + sent.exposed_seconds(rank)
        assert idle == pytest.approx(both)
    # a rank that receives ahead of its programs has one transfer at a time
    kinds = ActionKind.FORWARD, ActionKind.SEND_F, ActionKind.RECV_F
    forward, send, receive = ([Action(0, kind, m) for m in range(3)] for kind in kinds)
    sends = [action for pair in zip(forward, send, strict=True) for action in pair]
    ahead = [a._replace(stage_index=1) for a in receive + forward]
    slow = simulate_schedule({0: sends, 1: ahead}, seconds, lambda sender, receiver: 5.0)
    assert [transfer.start for transfer in slow.transfers] == [1.0, 6.0, 11.0]
    assert slow.seconds == 17.0


def test_microbatches_in_flight_are_those_of_the_schedule() -> None:
    assert [most_in_flight(actions_of("GPipe", 4, 4, 8)[rank], rank) for rank in range(4)] == [
        8
    ] * 4
    of_1f1b = actions_of("1F1B", 4, 4, 8)
    assert [most_in_flight(of_1f1b[rank], rank) for rank in range(4)] == [4, 3, 2, 1]


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    actions = actions_of("1F1B", 2, 2, 2)
    actions[0] = [a for a in actions[0] if a.computation_type is not ActionKind.SEND_F]
    with pytest.raises(VerificationError, match="rank 0, rank 1"):
        simulate_schedule(actions, equal_stages(2))
