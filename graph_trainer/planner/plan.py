"""From a config to a plan: capture on a fake rank, passes, simulation."""

from __future__ import annotations

import copy
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch

from graph_trainer.core.graph.annotations import layer_of
from graph_trainer.core.graph.joint_graph import JointGraph
from graph_trainer.core.graph.signature import InputKind
from graph_trainer.core.ordering.agreement import Agreement
from graph_trainer.core.passes.bucketing.bucket_collectives import bucket_collectives
from graph_trainer.core.passes.context import ActivationPolicy
from graph_trainer.core.passes.memory_limit import host_memory_of
from graph_trainer.core.passes.overlap.overlap_fsdp import OverlapFsdpOptions, overlap_fsdp
from graph_trainer.core.passes.overlap.schedule_overlap import schedule_overlap
from graph_trainer.core.passes.pipeline import PassConfig, run_passes, with_policy
from graph_trainer.core.passes.plan_memory.plan_memory import plan_memory
from graph_trainer.core.passes.plan_memory.table import MemoryTable
from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.core.simulation.runtimes import GRAPH_TRAINER, TORCHTITAN, Runtime, mark_saved
from graph_trainer.core.simulation.simulate import Need, Simulation, simulate
from graph_trainer.core.units import GIB
from graph_trainer.planner.console import OnProgress
from graph_trainer.planner.fake_rank import FakeRank
from graph_trainer.planner.ledger import LedgerRow, ledger, row_of
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.training_state_memory import microbatches, trained_bytes

LoadConfig = Callable[[Sequence[str]], GraphTrainerConfig]
"""Loads the checked config of a command line with more flags after it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change and its estimated effect."""

    flags: tuple[str, ...]
    """The change as on the command line."""
    needed_bytes: int
    tokens_per_second_per_gpu: float
    fits: bool


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The run under a fixed policy, or within a memory limit."""

    policy: ActivationPolicy
    limit_bytes: int | None
    """None for a fixed policy."""
    peak_bytes: int
    """The most bytes alive at once."""
    needed_bytes: int
    """The bytes that a device must have, which the limit bounds."""
    step_seconds: float
    """Of a whole train step, clipping and optimizer included."""


@dataclass(frozen=True, slots=True)
class Plan:
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
    flops_per_token: int
    """Model FLOPs, as torchtitan counts them."""
    outside_seconds: float
    """Clipping and optimizer, after the graph."""
    need: Need
    """What this rank needs of its device."""
    rows: list[LedgerRow]
    """The first is the graph as captured, the last the graph that runs."""
    simulation: Simulation
    """Of the graph that runs."""
    advice: tuple[Advice, ...] = ()
    """Changes for a run that does not fit, the most helpful first; empty where it fits."""
    memory_curve: tuple[CurvePoint, ...] = ()
    """The run under other policies and limits, where that was asked for."""

    @property
    def headline(self) -> str:
        """What was planned, in one line."""
        spec = self.config.model_spec
        model = f"{spec.name} {spec.flavor}" if spec is not None else "model"
        return (
            f"{model}, {self.num_parameters / 1e9:.2f} B parameters, rank {self.rank} of "
            f"{self.world_size} on {self.hardware.name}, run by {self.simulation.runtime.name}"
        )

    @property
    def memory_table(self) -> MemoryTable | None:
        """What backward keeps, by block and op; None where no budget or file decides that."""
        table: MemoryTable | None = self.simulation.joint.decisions.get(plan_memory.name)
        return table if table is not None and table.rows else None

    @property
    def step_seconds(self) -> float:
        """A whole train step: all microbatches, clipping and optimizer."""
        return self.microbatches * self.simulation.timeline.step_seconds + self.outside_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """As torchtitan logs it."""
        return self.tokens_per_step / self.ranks_per_batch / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs per second as a part of the hardware's bfloat16 peak, as torchtitan
        counts them."""
        peak = self.hardware.flops(torch.bfloat16)
        return self.flops_per_token * self.tokens_per_second_per_gpu / peak

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once on this rank."""
        return self.simulation.memory.peak_bytes

    @property
    def limit_bytes(self) -> int | None:
        """compile.memory_limit_gib; None where no limit is given."""
        limit = self.config.compile.memory_limit_gib
        return int(limit * GIB) if limit else None

    @property
    def allowed_bytes(self) -> int:
        """What a step may need: the device's memory, or the limit where that is less."""
        return min(self.hardware.memory_bytes, self.limit_bytes or self.hardware.memory_bytes)

    @property
    def headroom_bytes(self) -> int:
        """What the step leaves of what it may need; negative where it does not fit."""
        return self.allowed_bytes - self.need.total

    @property
    def fits(self) -> bool:
        """Whether the step fits on the hardware and within the limit."""
        return self.headroom_bytes >= 0


def make_plan(
    config: GraphTrainerConfig,
    world_size: int,
    hardware: Hardware,
    *,
    rank: int = 0,
    runtime: Runtime = GRAPH_TRAINER,
    every_pass: bool = True,
    agreement: Agreement | None = None,
    on_progress: OnProgress = lambda line: None,
) -> Plan:
    """Plan one rank of a run.

    Args:
        config: a checked config whose degrees multiply to `world_size`.
        world_size: the number of ranks.
        hardware: what the step is simulated on.
        rank: the global rank to plan.
        runtime: the program that runs the config.
        every_pass: simulate after each pass, for the ledger; otherwise only the graph that runs,
            which is then the only row.
        agreement: the ranks that decide together; None for this one alone.
        on_progress: called with a line before each part of the work.

    Raises:
        CaptureError: the step cannot be captured.
        PassError, VerificationError: as `run_passes`.
    """
    on_progress("building the model on meta")
    traced = _with_wrappers(config) if runtime is TORCHTITAN else config
    run = FakeRank(traced, world_size, rank, hardware.device)
    on_progress("capturing the train step")
    joint = run.capture()
    mark_saved(joint)
    configured = run.pass_config(hardware=hardware, host_memory=host_memory_of(hardware))
    passes = as_run_by(runtime, configured, joint)
    other = passes.other_memory(joint)
    training = config.training
    repeats = microbatches(config, run.data_parallel_degree)
    look = partial(simulate, hardware=hardware, other=other, runtime=runtime)
    on_progress(f"simulating {len(joint.graph.nodes):,} nodes")
    if every_pass:
        simulated = list(ledger(joint, passes, look, on_pass=on_progress, agreement=agreement))
    else:
        last = run_passes(joint, passes, agreement=agreement, on_pass=on_progress).last
        only = look(joint)
        simulated = [(row_of(only, last.name, last.seconds), only)]
    simulation = simulated[-1][1]
    return Plan(
        config=config,
        hardware=hardware,
        world_size=world_size,
        rank=rank,
        num_parameters=run.num_parameters,
        microbatches=repeats,
        tokens_per_step=repeats * training.local_batch_size * training.seq_len,
        ranks_per_batch=world_size // run.data_parallel_degree,
        flops_per_token=run.flops_per_token,
        outside_seconds=outside_seconds(trained_bytes(joint), other.optimizer_bytes, hardware),
        need=simulation.need(),
        rows=[row for row, _ in simulated],
        simulation=simulation,
    )


def as_run_by(runtime: Runtime, passes: PassConfig, joint: JointGraph) -> PassConfig:
    """Choose the passes that make the graph what this runtime does.

    FSDP2, which torchtitan uses, gathers the next layer's parameters while one layer computes.
    """
    if runtime is not TORCHTITAN:
        return passes
    layers = Counter(
        layer
        for spec, _ in joint.inputs_of(InputKind.PARAMETER)
        if (layer := layer_of(spec.name)) is not None
    )
    options = OverlapFsdpOptions(in_flight=max(layers.values(), default=1))
    return with_policy(
        passes,
        "none",  # what its checkpoint wrappers recompute was traced
        passes=("default", overlap_fsdp.name),
        disable_passes=(bucket_collectives.name, schedule_overlap.name),
        options={overlap_fsdp.name: options},
    )


def _with_wrappers(config: GraphTrainerConfig) -> GraphTrainerConfig:
    """Return the config for a model whose modules are wrapped for checkpointing by torchtitan."""
    wrapped = copy.copy(config)
    wrapped.compile = copy.copy(config.compile)
    wrapped.compile.mode = "eager"
    return wrapped


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make a plan."""
    packages = ("graph_trainer", "torch", "torchtitan")
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in packages}


def outside_seconds(gradient_bytes: int, state_bytes: int, hardware: Hardware) -> float:
    """Predict the seconds of clipping and optimizer, after the graph.

    Clipping reads every gradient for the norm and scales it; a fused optimizer reads
    parameters, gradients and states and writes parameters and states.
    """
    moved = 3 * gradient_bytes + 3 * gradient_bytes + 2 * state_bytes
    return moved / (hardware.memory_bytes_per_second * hardware.memory_efficiency)
