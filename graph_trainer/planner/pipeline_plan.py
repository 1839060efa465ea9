"""From a config with a pipeline to a plan: each stage captured and simulated, then the schedule."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graph_trainer.core.analysis.memory import Category, Memory, given_bytes
from graph_trainer.core.graph.annotations import is_backward
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.graph.snapshot import copy_graph
from graph_trainer.core.passes.memory_limit import host_memory_of
from graph_trainer.core.passes.pipeline import pass_by_pass
from graph_trainer.core.pipeline.reduce_once import reduce_once, reduces_once
from graph_trainer.core.pipeline.simulate_schedule import (
    ScheduleTimeline,
    StageSeconds,
    simulate_schedule,
)
from graph_trainer.core.pipeline.split_backward import split_backward
from graph_trainer.core.pipeline.stage_graphs import stage_graphs
from graph_trainer.core.simulation.collective_costs import send_seconds
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.simulate import (
    Need,
    Simulation,
    predicted_memory,
    simulate,
)
from graph_trainer.core.torch_private_pipelining import (
    Action,
    ActionKind,
    actions_of,
    leaves_of,
    most_in_flight,
    ranks_of_stages,
    splits_backward,
)
from graph_trainer.core.units import GIB
from graph_trainer.planner.fake_stages import FakeStages, modules_of_stages
from graph_trainer.planner.figures import Figures
from graph_trainer.planner.plan import Outcome, outside_seconds
from graph_trainer.planner.simulated_agreement import AsFarAsKnown
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.titan.captured_stages import (
    PassedOn,
    check_passed_on,
    passed_on_by,
    with_in_flight,
)
from graph_trainer.titan.config.check_pipeline import schedule_of
from graph_trainer.titan.config.core_settings import config_keys_in_errors
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.model_flops import FlopsPerToken
from graph_trainer.titan.training_state_memory import microbatches


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a rank needs and takes for one of its stages."""

    index: int
    rank: int
    """Of the pipeline."""
    modules: tuple[str, ...]
    """FQNs of the parts of the model."""
    in_flight: int
    """The most microbatches whose forward has run and whose backward has not."""
    simulation: Simulation
    """Of the graph that runs, with its memory at that many microbatches in flight. Its timeline is
    that of forward and backward one after the other."""
    need: Need
    """What a device needs for this stage alone."""
    seconds: StageSeconds
    outside_seconds: float
    """Clipping and optimizer of its parameters."""
    sent_bytes: int
    """Of the tensor that it passes on, and of the gradient that it gets; 0 of the last stage."""
    always_bytes: int
    """Parameters, buffers, optimizer state and gradients, which are alive at all times; also the
    sums of gradients that are reduced once."""
    microbatch_bytes: int
    """What is alive of a microbatch between its forward and its backward."""
    split_bytes: int
    """What lives between the two parts of a backward, in schedules that run them apart."""
    unsharded_bytes: int
    """Gathered parameters that all microbatches share, from UNSHARD to RESHARD."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once for this stage."""
        return self.simulation.memory.peak_bytes

    def with_in_flight(self, in_flight: int) -> StagePlan:
        """Return the same stage with other microbatches in flight, on which its graph does not
        depend."""
        simulation = self.simulation
        other = simulation.other._replace(earlier_microbatches=in_flight - 1)
        memory = predicted_memory(
            *(simulation.joint, simulation.hardware, other), fusion=simulation.fusion
        )
        simulation = replace(simulation, memory=memory, other=other)
        need = simulation.need()
        return replace(self, in_flight=in_flight, simulation=simulation, need=need)


@dataclass(frozen=True, slots=True)
class PipelinePlan(Figures):
    """What the stages of a pipeline need, and how their schedule runs."""

    config: GraphTrainerConfig
    hardware: Hardware
    world_size: int
    num_parameters: int
    """Of the whole model."""
    flops_per_token: FlopsPerToken
    """Of the whole model."""
    data_parallel_degree: int
    stages: tuple[StagePlan, ...]
    """In the order of the model."""
    actions: Mapping[int, list[Action]] = field(repr=False)
    """By rank of the pipeline."""
    timeline: ScheduleTimeline = field(repr=False)
    """Of the schedule of the microbatches of one local batch."""
    repeats: int
    """How often the schedule runs in a step."""
    limit_bytes: int | None
    """compile.memory_limit_gib; None where no limit is given."""
    advice: tuple[Outcome, ...] = ()
    """Changes with which a run that fits is faster, or one that does not fit needs less."""

    @property
    def headline(self) -> str:
        """What was planned, in one line."""
        return (
            f"{self.model}, "
            f"{len(self.stages)} stages on {self.world_size:,} ranks of {self.hardware.name}"
        )

    @property
    def num_ranks(self) -> int:
        """The ranks of the pipeline."""
        return len(self.actions)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule runs backwards in two parts."""
        return splits_backward(self.actions)

    @property
    def num_microbatches(self) -> int:
        """Of one run of the schedule."""
        training, parallelism = self.config.training, self.config.parallelism
        return training.local_batch_size // parallelism.pipeline_parallel_microbatch_size

    def stages_of(self, rank: int) -> list[StagePlan]:
        """List the stages of a rank of the pipeline."""
        return [stage for stage in self.stages if stage.rank == rank]

    @property
    def step_seconds(self) -> float:
        """A whole train step: schedules, clipping and optimizer, at the pace of the slowest device,
        for which all others wait."""
        schedules = self.repeats * self.timeline.seconds
        return (schedules + self.outside_seconds) * self.slowest_device

    @property
    def outside_seconds(self) -> float:
        """Clipping and optimizer, on the rank that takes longest."""
        return max(sum(s.outside_seconds for s in self.stages_of(rank)) for rank in self.actions)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """As torchtitan logs it."""
        training = self.config.training
        tokens = self.repeats * training.local_batch_size * training.seq_len
        return tokens * self.data_parallel_degree / self.world_size / self.step_seconds

    def need_of(self, rank: int) -> Need:
        """Return the memory that a rank of the pipeline needs at most.

        While a stage runs it counts with its peak, less what it has not in flight at that time, and
        the other stages of the rank with what they keep. A stage's forward counts as much as its
        backward, and a part of a backward as much as the whole, so that this is a bound where a
        rank has several stages or runs backwards in two parts. What is received counts from the
        action that starts to receive it until it has been read, and what was sent counts to
        the end of the schedule, as torch's runtime waits for sends there.
        """
        stages = {stage.index: stage for stage in self.stages_of(rank)}
        most = Need(0, 0, 0)
        sent = self.stages[0].sent_bytes
        for running, other_bytes in moments(self.actions[rank], stages, len(self.stages), sent):
            need = stages[running].need
            alive, allocated, total = (num + other_bytes for num in need)
            most = max(most, Need(alive, allocated, total), key=lambda need: need.total)
        return most

    @property
    def need(self) -> Need:
        """What the rank that needs most needs of its device."""
        return max(map(self.need_of, self.actions), key=lambda need: need.total)

    @property
    def needed_bytes(self) -> int:
        """What the rank that needs most needs of its device."""
        return self.need.total


def moments(
    actions: list[Action], stages: Mapping[int, StagePlan], num_stages: int, tensor_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield for each program that a rank runs its stage, and the bytes that the rank needs at this
    time beside the need of that stage; negative where fewer microbatches are in flight.

    Args:
        stages: those of the rank.
        num_stages: of all ranks.
        tensor_bytes: of what a stage passes on, and of its gradient.
    """
    tensors = 0  # sent, or received and not read yet
    in_flight: dict[int, int] = dict.fromkeys(stages, 0)
    halfway: dict[int, int] = dict.fromkeys(stages, 0)  # between the two parts of a backward
    unsharded: set[int] = set()
    for action in leaves_of(actions):
        kind, running = action.computation_type, action.stage_index
        if kind is ActionKind.UNSHARD:
            unsharded.add(running)
        elif kind is ActionKind.RESHARD:
            unsharded.discard(running)
        tensors += kind in _OF_TENSORS
        if not action.is_compute_op:
            continue
        is_forward = kind is ActionKind.FORWARD
        is_second_part = kind is ActionKind.BACKWARD_WEIGHT
        in_flight[running] += is_forward
        halfway[running] += kind is ActionKind.BACKWARD_INPUT
        # a microbatch in flight counts what its forward has received
        tensors -= is_forward and running > 0
        stage = stages[running]
        beside = tensors * tensor_bytes
        beside += (in_flight[running] - stage.in_flight) * stage.microbatch_bytes
        for other in stages.values():
            beside += halfway[other.index] * other.split_bytes
            if other is not stage:
                beside += other.always_bytes + in_flight[other.index] * other.microbatch_bytes
                beside += other.unsharded_bytes * (other.index in unsharded)
        yield running, beside
        in_flight[running] -= kind in (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT)
        halfway[running] -= is_second_part
        if not is_second_part:
            tensors -= not is_forward and running < num_stages - 1
            # what the next stage or the one before reads on the same rank is not sent
            tensors += (running + 1 if is_forward else running - 1) in stages


_OF_TENSORS = (ActionKind.SEND_F, ActionKind.SEND_B, ActionKind.RECV_F, ActionKind.RECV_B)


@config_keys_in_errors()
def make_pipeline_plan(
    config: GraphTrainerConfig,
    world_size: int,
    hardware: Hardware,
    *,
    on_progress: OnProgress = lambda line: None,
) -> PipelinePlan:
    """Plan one rank of each stage of a run, the first of the stage's ranks.

    Stages of the same layers are captured once, where their ranks stand alike on their nodes.

    Args:
        config: a checked config with a pipeline, whose degrees multiply to `world_size`.
        hardware: what the stages are simulated on.
        on_progress: called with a line before each part of the work.

    Raises:
        CaptureError: a stage cannot be captured.
        PassError, VerificationError: as `run_passes`.
    """
    parallelism, training = config.parallelism, config.training
    on_progress("building the model on meta")
    first = FakeStages(config, world_size, 0, hardware.device)
    ranks, num_stages = parallelism.pipeline_parallel_degree, first.num_stages
    modules = modules_of_stages(config, first)
    num_microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    actions = actions_of(schedule_of(config), num_stages, ranks, num_microbatches)
    rank_of = ranks_of_stages(actions)
    alike: dict[object, list[int]] = defaultdict(list)
    for index, names in enumerate(modules):
        place = rank_of[index] * (world_size // ranks) % hardware.devices_per_node
        alike[*what_is_captured_of(config, names), place].append(index)
    run = first
    received: PassedOn | None = None
    stages: list[StagePlan] = []
    for indices in alike.values():
        index = indices[0]
        rank = rank_of[index] * (world_size // ranks)
        if run.rank != rank:
            run = FakeStages(config, world_size, rank, hardware.device)
        on_progress(f"capturing stage {index} of {num_stages}{_for_others(indices)}")
        joint = run.capture(index, received)
        if received is None:
            received = passed_on_by(joint)
        if index < num_stages - 1:
            check_passed_on(index, joint, received)
        captured = _CapturedStage(run, joint, hardware, on_progress)
        for index in indices:
            in_flight = most_in_flight(actions[rank_of[index]], index)
            of_stage = captured.plan(index, rank_of[index], tuple(modules[index]), in_flight)
            stages.append(of_stage)
    stages.sort(key=lambda stage: stage.index)
    on_progress("simulating the schedule")
    limit = config.compile.memory_limit_gib
    return PipelinePlan(
        config=config,
        hardware=hardware,
        world_size=world_size,
        num_parameters=first.num_parameters,
        flops_per_token=first.flops_per_token,
        data_parallel_degree=first.data_parallel_degree,
        stages=tuple(stages),
        actions=actions,
        timeline=timeline_of(stages, actions, world_size, hardware),
        repeats=microbatches(config, first.data_parallel_degree) // num_microbatches,
        limit_bytes=int(limit * GIB) if limit else None,
    )


def timeline_of(
    stages: Sequence[StagePlan],
    actions: Mapping[int, list[Action]],
    world_size: int,
    hardware: Hardware,
) -> ScheduleTimeline:
    """Simulate a schedule on the first rank of each stage."""
    stride, sent = world_size // len(actions), stages[0].sent_bytes
    return simulate_schedule(
        actions,
        {stage.index: stage.seconds for stage in stages},
        lambda sender, receiver: send_seconds(sender * stride, receiver * stride, sent, hardware),
    )


def what_is_captured_of(config: GraphTrainerConfig, names: list[str]) -> tuple[str, ...]:
    """Return what tells the captured graph of a stage from that of another, but for its names.

    That is the config of its layers without their initial values. What settings decide by the names
    of layers is the stage's own.
    """
    assert config.model_spec is not None
    layers = config.model_spec.model.layers
    by_name = any(re.search(r"\d", g.pattern) for g in config.optimizer.param_groups)
    if by_name or getattr(config.activation_checkpoint, "path", None):
        return tuple(names)
    parts = []
    for name in names:
        _, _, number = name.partition("layers.")
        text = repr(layers[int(number)]) if number.isdecimal() else name
        # functions of equal names: each layer has its own, of initial values
        text = re.sub(r"param_init=\{[^}]*\}", "", text)
        parts.append(re.sub(r" at 0x[0-9a-f]+", "", text))
    return tuple(parts)


def _for_others(indices: list[int]) -> str:
    others = len(indices) - 1
    return f", for {others} more with such layers" if others else ""


class _CapturedStage:
    """The captured graph of some stages with the same layers.

    Args:
        run: the rank that `joint` was captured on.
    """

    def __init__(
        self, run: FakeStages, joint: JointGraph, hardware: Hardware, on_progress: OnProgress
    ) -> None:
        self._run = run
        self._captured = joint
        self._hardware = hardware
        self._on_progress = on_progress
        self._latest: StagePlan | None = None

    def plan(self, index: int, rank: int, modules: tuple[str, ...], in_flight: int) -> StagePlan:
        """Plan a stage. Without a memory limit no pass depends on the microbatches in flight, and
        only the memory differs from stage to stage."""
        if self._latest is None or self._run.config.compile.memory_limit_gib:
            self._latest = self._simulated(index, in_flight)
        stage = self._latest.with_in_flight(in_flight)
        return replace(stage, index=index, rank=rank, modules=modules)

    def _simulated(self, index: int, in_flight: int) -> StagePlan:
        joint, hardware = copy_graph(self._captured), self._hardware
        passes = self._run.pass_config(hardware=hardware, host_memory=host_memory_of(hardware))
        passes = with_in_flight(passes, in_flight)
        for _ in pass_by_pass(joint, passes, agreement=AsFarAsKnown(()), refuses=False):
            pass
        self._on_progress(f"simulating {len(joint.graph.nodes):,} nodes of stage {index}")
        other = passes.other_memory(joint)
        simulation = simulate(joint, hardware, other)
        state = given_bytes(joint, InputKind.PARAMETER, InputKind.BUFFER)
        graphs = stage_graphs(joint)
        reduction = reduce_once(graphs.backward) if reduces_once(passes) else None
        backward = reduction.backward if reduction is not None else graphs.backward
        split = split_backward(backward)

        def seconds(graph: JointGraph) -> float:
            return simulate(graph, hardware, other).timeline.step_seconds

        return StagePlan(
            index=index,
            rank=0,
            modules=(),
            in_flight=in_flight,
            simulation=simulation,
            need=simulation.need(),
            seconds=StageSeconds(
                forward=seconds(graphs.forward),
                backward=seconds(backward),
                unshard=seconds(graphs.unshard) if graphs.unshard_reads else 0.0,
                backward_input=seconds(split.of_input),
                backward_weight=seconds(split.of_weights),
                reduce_grad=seconds(reduction.reduce_grad) if reduction is not None else 0.0,
            ),
            outside_seconds=outside_seconds(simulation, other.optimizer_bytes),
            sent_bytes=given_bytes(joint, InputKind.OUTPUT_GRADIENT),
            always_bytes=state + other.optimizer_bytes + other.accumulated_bytes,
            microbatch_bytes=_microbatch_bytes(joint, simulation.memory),
            split_bytes=split.kept_bytes(),
            unsharded_bytes=_unsharded_bytes(joint, simulation.memory),
        )


def _microbatch_bytes(joint: JointGraph, memory: Memory) -> int:
    """Return what `memory_of` adds for each microbatch in flight."""
    activations = sum(s.bytes for s in memory.storages if s.category is Category.ACTIVATIONS)
    return activations + given_bytes(joint, InputKind.BATCH)


def _unsharded_bytes(joint: JointGraph, memory: Memory) -> int:
    """Return the bytes of the gathered parameters that are kept from forward to backward."""
    places = (place for place, node in enumerate(joint.graph.nodes) if is_backward(node))
    backward = next(places, 0)
    return sum(
        s.bytes
        for s in memory.storages
        if s.category is Category.UNSHARDED and s.born < backward <= s.last
    )
