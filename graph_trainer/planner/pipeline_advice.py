"""What would help a run in a pipeline: schedules, microbatches, layers in other stages, memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from graph_trainer.core.pipeline.schedule import IN_A_V, ONE_STAGE, SCHEDULES
from graph_trainer.core.pipeline.simulate_schedule import StageSeconds
from graph_trainer.core.torch_private_pipelining import (
    actions_of,
    most_in_flight,
    ranks_of_stages,
)
from graph_trainer.errors import ConfigError, GraphTrainerError
from graph_trainer.planner.changes import POLICY, RESHARD, Change, flags_of
from graph_trainer.planner.fake_stages import automatic_split
from graph_trainer.planner.pipeline_plan import (
    PipelinePlan,
    StagePlan,
    make_pipeline_plan,
    timeline_of,
)
from graph_trainer.planner.plan import LoadConfig, Outcome
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.titan.config.check_pipeline import schedule_of
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.training_state_memory import microbatches

SCHEDULE = "parallelism.pipeline_parallel_schedule"
_BATCH = "training.local_batch_size"
_LESS = tuple(f"parallelism.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
_LARGE_BUBBLE = 0.05
"""The part of a schedule from which on more stages a rank are worth a plan."""
_LEAST = 0.01
"""The smallest gain that is worth a mention, as a part of speed or memory."""
_MOST_LESS = 4
"""The most layers that the first or the last stage has less."""


def advise_pipeline(plan: PipelinePlan, load: LoadConfig, on_progress: OnProgress) -> list[Outcome]:
    """Plan the run again with one setting changed at a time.

    Other schedules and numbers of microbatches of the same stages are simulated again, and capture
    nothing. Two stages a rank are planned where one leaves a large bubble. Layers are moved between
    stages by an estimate, and planned where that promises a faster step. Where the run does not
    fit, what saves memory is planned too.

    Returns:
        the changes that make a run that fits faster, or one that does not fit need less; first
        those with which it fits, and of them the fastest.
    """
    outcomes = []
    same_stages = list(_same_stages(plan))
    for change in (
        *same_stages,
        *_more_stages(plan),
        *balanced(plan),
        *_less_memory(plan),
    ):
        try:
            config = load(flags_of(change))
            if change in same_stages:
                changed = rescheduled(plan, config)
            else:
                on_progress(", ".join(f"{key} = {value}" for key, value in change.items()))
                changed = make_pipeline_plan(
                    config, plan.world_size, plan.hardware, on_progress=on_progress
                )
        except ConfigError:  # the schedule cannot run it
            continue
        except GraphTrainerError as error:
            on_progress(f"cannot be planned: {error}")
            continue
        outcomes.append(outcome_of_pipeline(change, changed))
    helpful = [outcome for outcome in outcomes if _helps(plan, outcome)]
    return sorted(helpful, key=lambda o: (not o.fits, -o.tokens_per_second_per_gpu))


def _helps(plan: PipelinePlan, outcome: Outcome) -> bool:
    if plan.fits:
        faster = (1 + _LEAST) * plan.tokens_per_second_per_gpu
        return outcome.fits and outcome.tokens_per_second_per_gpu > faster
    return outcome.fits or outcome.needed_bytes < (1 - _LEAST) * plan.need.total


def outcome_of_pipeline(change: Change, plan: PipelinePlan) -> Outcome:
    """Sum up the plan of a changed run in a pipeline."""
    return Outcome(
        config=change,
        fits=plan.fits,
        needed_bytes=plan.need.total,
        peak_bytes=plan.need.alive,
        step_seconds=plan.step_seconds,
        tokens_per_second_per_gpu=plan.tokens_per_second_per_gpu,
    )


def rescheduled(plan: PipelinePlan, config: GraphTrainerConfig) -> PipelinePlan:
    """Return the plan of the same stages under another schedule or with other microbatches.

    Args:
        config: one that differs in the schedule and the local batch alone, with several
            microbatches as before.
    """
    changed = replace(plan, config=config)
    count = changed.num_microbatches
    actions = actions_of(schedule_of(config), len(plan.stages), plan.num_ranks, count)
    rank_of = ranks_of_stages(actions)
    stages = []
    for stage in plan.stages:
        rank = rank_of[stage.index]
        in_flight = most_in_flight(actions[rank], stage.index)
        stages.append(replace(stage.with_in_flight(in_flight), rank=rank))
    return replace(
        changed,
        stages=tuple(stages),
        actions=actions,
        timeline=timeline_of(stages, actions, plan.world_size, plan.hardware),
        repeats=microbatches(config, plan.data_parallel_degree) // count,
    )


def _same_stages(plan: PipelinePlan) -> Iterator[Change]:
    """Yield schedules and numbers of microbatches that keep the stages of each rank."""
    parallelism, batch = plan.config.parallelism, plan.config.training.local_batch_size
    is_single = parallelism.pipeline_parallel_schedule in ONE_STAGE
    if plan.config.compile.memory_limit_gib:  # passes look at the microbatches in flight
        return
    # a stage on other ranks is the same where these stand alike on their nodes
    fills_nodes = plan.world_size // plan.num_ranks % plan.hardware.devices_per_node == 0
    is_v = parallelism.pipeline_parallel_schedule in IN_A_V
    for schedule in () if parallelism.pipeline_parallel_schedule_csv else SCHEDULES:
        if (schedule in IN_A_V) is not is_v and not fills_nodes:
            continue
        same_kind = (schedule in ONE_STAGE) is is_single
        if same_kind and schedule != parallelism.pipeline_parallel_schedule:
            yield {SCHEDULE: schedule}
    # the same global batch, in half as many runs of the schedule
    if plan.fits and plan.repeats % 2 == 0 and plan.num_microbatches > 1:
        yield {_BATCH: str(2 * batch)}
    elif not plan.fits and plan.num_microbatches >= 4 and plan.num_microbatches % 2 == 0:
        yield {_BATCH: str(batch // 2)}


def _more_stages(plan: PipelinePlan) -> Iterator[Change]:
    """Yield the schedule with two stages a rank, whose bubble is smaller."""
    is_single = plan.config.parallelism.pipeline_parallel_schedule in ONE_STAGE
    by_count = plan.config.parallelism.pipeline_parallel_layers_per_stage is None
    if plan.fits and is_single and by_count and plan.timeline.bubble > _LARGE_BUBBLE:
        yield {SCHEDULE: "Interleaved1F1B"}


def _less_memory(plan: PipelinePlan) -> Iterator[Change]:
    """Yield what may make a run need less, where it does not fit."""
    if plan.fits:
        return
    parallelism, training = plan.config.parallelism, plan.config.training
    if parallelism.fsdp_reshard_after_forward != "always":
        yield {RESHARD: "always"}
    checkpointing = plan.config.activation_checkpoint
    if checkpointing is None or "Full" not in type(checkpointing).__qualname__:
        yield {POLICY: "full"}
    yield {"training.seq_len": str(training.seq_len // 2)}


def balanced(plan: PipelinePlan) -> Iterator[Change]:
    """Yield the split of the layers that makes the schedule shortest by an estimate, if it is
    shorter than that of the plan."""
    parallelism = plan.config.parallelism
    layers = sum(_layers(stage) for stage in plan.stages)
    if parallelism.module_fqns_per_model_part is not None or not plan.fits:
        return
    per_layer = _seconds_of_a_layer(plan)
    if per_layer is None:
        return
    best, change = plan.timeline.seconds * (1 - _LEAST), Change()
    for less in itertools.product(range(_MOST_LESS + 1), repeat=2):
        try:
            split = automatic_split(len(plan.stages), layers, *less)
        except ValueError:  # a stage would have none
            continue
        stages = [
            _resized(stage, per_layer, sum(name.startswith("layers.") for name in names))
            for stage, names in zip(plan.stages, split, strict=True)
        ]
        seconds = timeline_of(stages, plan.actions, plan.world_size, plan.hardware).seconds
        if seconds < best:
            best, change = seconds, dict(zip(_LESS, map(str, less), strict=True))
    if change:
        yield change


def _layers(stage: StagePlan) -> int:
    return sum(name.startswith("layers.") for name in stage.modules)


def _seconds_of_a_layer(plan: PipelinePlan) -> StageSeconds | None:
    """Return the time of a layer of the second stage; None where no stage between the first and the
    last has layers, or these differ."""
    inner = [stage for stage in plan.stages[1:-1] if _layers(stage)]
    means = [_scaled(stage.seconds, 1 / _layers(stage)) for stage in inner]
    if not means or any(not math.isclose(m.forward, means[0].forward, rel_tol=0.1) for m in means):
        return None
    return means[0]


def _resized(stage: StagePlan, per_layer: StageSeconds, layers: int) -> StagePlan:
    """Return a stage with another number of layers, which take as long each."""
    more = _scaled(per_layer, layers - _layers(stage))
    pairs = zip(stage.seconds, more, strict=True)
    return replace(stage, seconds=StageSeconds(*(max(0.0, a + b) for a, b in pairs)))


def _scaled(seconds: StageSeconds, factor: float) -> StageSeconds:
    return StageSeconds(*(factor * value for value in seconds))
