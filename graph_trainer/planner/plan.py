"""From a config to a plan: capture on a fake rank, passes, simulation."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from graph_trainer.core.analysis.collectives import Collective
from graph_trainer.core.analysis.mesh_groups import dtensors_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.passes.memory_limit import DeviceMemoryOf, host_memory_of, unknown
from graph_trainer.core.passes.memory_table import MemoryTable
from graph_trainer.core.passes.pass_list import PassConfig
from graph_trainer.core.passes.pipeline import pass_by_pass
from graph_trainer.core.passes.plan_memory.plan_memory import plan_memory
from graph_trainer.core.simulation.collective_costs import collective_seconds
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.host import Checkpoints, Dispatch
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, Runtime, mark_saved
from graph_trainer.core.simulation.simulate import Need, Simulation, simulate
from graph_trainer.core.units import GIB
from graph_trainer.planner.bands import Band, band_of
from graph_trainer.planner.captures import Captures
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.figures import Figures
from graph_trainer.planner.ledger import LedgerRow, ledger, row_of
from graph_trainer.planner.like_torchtitan import config_of_torchtitan, passes_of_torchtitan
from graph_trainer.planner.simulated_agreement import AsFarAsKnown
from graph_trainer.planner.terminal import OnProgress
from graph_trainer.titan.config.core_settings import config_keys_in_errors
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.model_flops import FlopsPerToken
from graph_trainer.titan.training_state_memory import microbatches, trained_bytes

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # isort: skip


class LoadConfig(Protocol):
    """Loads the checked config of a command line with more flags after it, for so many ranks."""

    def __call__(self, more: Sequence[str], ranks: int | None = None) -> GraphTrainerConfig: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run needs and takes with some config keys changed, or why it cannot be run."""

    config: dict[str, str]
    """The changed keys and their values, as on the command line."""
    fits: bool = False
    needed_bytes: int = 0
    """The bytes that a device must have, which a memory limit bounds."""
    peak_bytes: int = 0
    """The most bytes alive at once."""
    step_seconds: float = 0.0
    """Of a whole train step, clipping and optimizer included."""
    exposed_seconds: float = 0.0
    tokens_per_second_per_gpu: float = 0.0
    mfu: float = 0.0
    """As torchtitan counts."""
    mfu_causal: float = 0.0
    """With the causal mask of attention."""
    band: Band | None = None
    """As `Plan.band`; the ranges too are None where it is."""
    tokens_per_second_per_gpu_range: tuple[float, float] | None = None
    step_seconds_range: tuple[float, float] | None = None
    mfu_range: tuple[float, float] | None = None
    error: str | None = None
    """Why it cannot be run; None where it can."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much longer a step takes with a tenth less of something."""

    what: str
    """As "memory bandwidth"."""
    change: str
    """The change, as "10% less memory bandwidth"."""
    longer: float
    """Part of the step by which it takes longer."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What a step needs and takes where a rank's experts receive so many tokens."""

    what: str
    imbalance: float
    """What the rank receives in a layer, in times of an even share; the greatest of all layers."""
    peak_bytes: int
    """Of the rank that needs most."""
    needed_bytes: int
    """Of that rank too."""
    step_seconds: float
    """Of a whole train step, at the pace of the slowest rank of experts."""
    fits: bool
    fits_device: bool
    """Whether it fits the device, whatever the memory limit."""


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """A step under several spreads of tokens over the ranks of experts."""

    degree: int
    """Of expert parallelism: the imbalance of a rank that receives all tokens."""
    rows: tuple[ExpertLoad, ...]
    """The last one is of a rank that receives all tokens."""
    greatest_that_fits: float | None
    """The greatest imbalance with which the step fits the memory limit, or the device where that is
    less; None where even shares do not."""
    greatest_on_device: float | None
    """The same for the device alone."""
    layers: dict[str, float]
    """By layer, the greatest imbalance of a routing that happened; empty where none was given."""


@dataclass(frozen=True, slots=True)
class Plan(Figures):
    """What one rank of a run will need, issue and take in time."""

    config: GraphTrainerConfig
    hardware: Hardware
    world_size: int
    rank: int
    num_parameters: int
    """Of the whole model."""
    microbatches: int
    """How often the graph runs in a step."""
    tokens_per_step: int
    """Tokens of a step on this rank's share of the batch."""
    ranks_per_batch: int
    """Ranks that compute on the same tokens."""
    flops_per_token: FlopsPerToken
    """Of the whole model."""
    outside_seconds: float
    """Clipping and optimizer, after the graph."""
    limit_bytes: int | None
    """compile.memory_limit_gib; None where no limit is given."""
    need: Need
    """What this rank needs of its device."""
    rows: list[LedgerRow]
    """The first is the graph as captured, the last the graph that runs."""
    simulation: Simulation
    """Of the graph that runs."""
    advice: tuple[Outcome, ...] = ()
    """Changes for a run that does not fit, the most helpful first; empty where it fits."""
    memory_curve: tuple[Outcome, ...] = ()
    """The run under other policies and limits, where that was asked for."""
    expert_loads: ExpertLoads | None = None
    """The run under other spreads of tokens over experts, where that was asked for."""
    limits: tuple[Limit, ...] = ()
    """What the step is limited by, the first most, where that was asked for."""
    captures: Captures = field(default_factory=Captures, repr=False, compare=False)
    """What was captured for it, for plans of changed configs."""
    decided_on: tuple[int, ...] = ()
    """The numbers that ranks would have agreed on, as this rank has them."""

    @property
    def headline(self) -> str:
        """What was planned, in one line."""
        return (
            f"{self.model}, rank {self.rank} of {self.world_size} on {self.hardware.name}, run by "
            f"{self.simulation.runtime.name}"
        )

    @property
    def memory_table(self) -> MemoryTable | None:
        """What backward keeps, by block and op; None where no budget or file decides that."""
        table: MemoryTable | None = self.simulation.joint.decisions.get(plan_memory.name)
        return table if table is not None and table.rows else None

    @property
    def expert_imbalance(self) -> float:
        """What a rank's experts receive, in times of an even share, where memory is counted."""
        return self.simulation.other.expert_imbalance

    @property
    def step_seconds(self) -> float:
        """A whole train step: all microbatches, clipping and optimizer, at the pace of the slowest
        device, for which all others wait."""
        graphs = self.microbatches * self.simulation.timeline.step_seconds
        return (graphs + self.outside_seconds) * self.slowest_device

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """As torchtitan logs it."""
        return self.tokens_per_step / self.ranks_per_batch / self.step_seconds

    def on(self, hardware: Hardware) -> Plan:
        """Return the plan of the same graph on other hardware, without rows and limits of its
        own."""
        before = self.simulation
        simulation = simulate(before.joint, hardware, before.other, before.runtime, before.dispatch)
        return replace(self._timed(simulation), need=simulation.need())

    def retimed(self, hardware: Hardware) -> Plan:
        """Return the same on hardware with other speeds, whose memory is not simulated again."""
        return self._timed(self.simulation.retimed(hardware))

    def _timed(self, simulation: Simulation) -> Plan:
        outside = outside_seconds(simulation, simulation.other.optimizer_bytes)
        return replace(
            self, hardware=simulation.hardware, simulation=simulation, outside_seconds=outside
        )

    @property
    def band(self) -> Band | None:
        """The range of its throughput, as factors; None where no measured run is like it."""
        return band_of(self.config, self.hardware)

    @property
    def needed_bytes(self) -> int:
        """What this rank needs of its device."""
        return self.need.total

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once on this rank."""
        return self.simulation.memory.peak_bytes


@config_keys_in_errors()
def make_plan(
    config: GraphTrainerConfig,
    world_size: int,
    hardware: Hardware,
    *,
    rank: int = 0,
    runtime: Runtime = GRAPH_TRAINER,
    every_pass: bool = True,
    agreement: AsFarAsKnown | None = None,
    captures: Captures | None = None,
    device_memory: DeviceMemoryOf | None = None,
    host_memory: DeviceMemoryOf | None = None,
    on_progress: OnProgress = lambda line: None,
) -> Plan:
    """Plan one rank of a run.

    Args:
        config: a checked config whose degrees multiply to `world_size`.
        hardware: what the step is simulated on.
        runtime: the program that runs the config.
        every_pass: simulate after each pass, for the ledger; otherwise only the graph that runs,
            which is then the only row.
        agreement: the ranks that decide together; None for this one alone.
        captures: of earlier plans, for one that differs in what acts on the graph alone.
        device_memory: of a rank; a step is then refused as in training, beyond this or the limit.
        host_memory: of a rank, for offloaded activations; None for its part of the hardware's.
        on_progress: called with a line before each part of the work.

    Raises:
        CaptureError: the step cannot be captured.
        MemoryLimitError: with `device_memory`; or for want of host memory.
        PassError, VerificationError: as `run_passes`.
    """
    on_progress("building the model on meta")
    traced = config
    if runtime.is_torchtitan:
        traced = config_of_torchtitan(config)
    run = FakeRank(traced, world_size, rank, hardware.device, runtime.fuses_norms)
    captures, agreement = captures or Captures(), agreement or AsFarAsKnown(())
    joint = captures.of(run, on_progress)
    mark_saved(joint)
    passes = run.pass_config(
        hardware=hardware,
        device_memory=device_memory or unknown,
        host_memory=host_memory or host_memory_of(hardware),
    )
    if runtime.is_torchtitan:
        passes = passes_of_torchtitan(passes, compiles=passes.other_memory(joint).fused)
    on_progress(f"simulating {len(joint.graph.nodes):,} nodes")
    look = partial(
        simulate,
        hardware=hardware,
        other=passes.other_memory(joint),
        runtime=runtime,
        dispatch=_dispatch(config),
    )
    if every_pass:
        rows, simulation = ledger(joint, passes, look, on_pass=on_progress, agreement=agreement)
    else:
        refuses = device_memory is not None
        *_, last = pass_by_pass(
            joint, passes, agreement=agreement, on_pass=on_progress, refuses=refuses
        )
        simulation = look(joint)
        rows = [row_of(simulation, last)]
    plan = plan_of(config, run, passes, rows, simulation)
    return replace(plan, captures=captures, decided_on=tuple(agreement.numbers))


def _dispatch(config: GraphTrainerConfig) -> Dispatch:
    """Return what the ops of torchtitan's program pass on the host."""
    checkpoints = Checkpoints.NONE
    if isinstance(config.activation_checkpoint, SelectiveAC.Config):
        checkpoints = Checkpoints.SELECTIVE
    elif isinstance(config.activation_checkpoint, FullAC.Config):
        checkpoints = Checkpoints.FULL
    return Dispatch(config.parallelism.tensor_parallel_degree > 1, checkpoints)


def plan_of(
    config: GraphTrainerConfig,
    run: FakeRank,
    passes: PassConfig,
    rows: list[LedgerRow],
    simulation: Simulation,
) -> Plan:
    """Make the plan of a rank from its simulated graph after `passes`.

    Args:
        config: of the run.
        rows: the graph after each pass; the last is the graph that was simulated.
    """
    joint, hardware, training = simulation.joint, simulation.hardware, config.training
    repeats = microbatches(config, run.data_parallel_degree)
    limit = passes.memory_limit_gib
    return Plan(
        config=config,
        hardware=hardware,
        world_size=run.world_size,
        rank=run.rank,
        num_parameters=run.num_parameters,
        microbatches=repeats,
        tokens_per_step=repeats * training.local_batch_size * training.seq_len,
        ranks_per_batch=run.world_size // run.data_parallel_degree,
        flops_per_token=run.flops_per_token,
        outside_seconds=outside_seconds(simulation, passes.other_memory(joint).optimizer_bytes),
        limit_bytes=int(limit * GIB) if limit else None,
        need=simulation.need(),
        rows=rows,
        simulation=simulation,
    )


def outside_seconds(simulation: Simulation, optimizer_bytes: int) -> float:
    """Return the seconds of clipping and optimizer, from the end of the graph.

    Clipping reads every gradient for the norm, then reads and writes it to scale it. A fused
    optimizer reads parameters and gradients and writes parameters: 6 times the bytes of the
    parameters in all. It also reads and writes its states: 2. In between, ranks sum the norm. The
    host issues this while the device still computes, if it is ahead.
    """
    joint, hardware = simulation.joint, simulation.hardware
    moved = 6 * trained_bytes(joint) + 2 * optimizer_bytes
    sums = sums_of_norm(joint, hardware)
    device = sum(sums) + moved / (hardware.memory_bytes_per_second * hardware.memory_efficiency)
    count = sum(1 for _ in joint.gradients())
    host = count * (hardware.host.clip_seconds + hardware.host.optimizer_seconds)
    host += len(sums) * hardware.host.start_collective_seconds
    return max(device, host - simulation.timeline.host_lead_seconds)


def sums_of_norm(joint: JointGraph, hardware: Hardware) -> list[float]:
    """Return the seconds of each all-reduce by which ranks sum the norm of all gradients.

    Parameters of each mesh have a norm, a DTensor, which is summed over one dimension of the mesh
    after another (torchtitan 0.3.0, distributed/utils.py, clip_grad_norm_). Not over dimensions
    over which all of them are copies.
    """
    sharded: dict[DeviceMesh, set[int]] = defaultdict(set)
    for spec, tensor in dtensors_of(joint):
        if spec.kind is InputKind.PARAMETER and spec.requires_grad:
            dims = enumerate(tensor.placements)
            sharded[tensor.device_mesh].update(d for d, place in dims if not place.is_replicate())
    sums = []
    for mesh, dims_of_mesh in sharded.items():
        for dim in sorted(dims_of_mesh):
            ranks = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))[0].tolist()
            norm = Collective(
                node=joint.output_node(),
                kind="all_reduce",
                ranks=tuple(ranks),
                inputs=(("float32", 1),),
                input_bytes=torch.float32.itemsize,
                output_bytes=torch.float32.itemsize,
                reduction="sum",
                role=None,
                phase=None,
                module=None,
                parameter=None,
            )
            if len(ranks) > 1:
                sums.append(collective_seconds(norm, hardware))
    return sums


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make a plan."""
    installed = {"python": platform.python_version()}
    for package in ("graph_trainer", "torch", "torchtitan"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "of a checkout"
    return installed
