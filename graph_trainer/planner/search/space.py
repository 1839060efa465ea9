"""The runs that a search chooses from: meshes, policies and batches."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graph_trainer.core.pipeline.schedule import ONE_STAGE, SCHEDULES
from graph_trainer.errors import ConfigError
from graph_trainer.planner.changes import POLICY, RESHARD, Change
from graph_trainer.titan.config.core_settings import LIMIT_KEY
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.routing import mixtures_of

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
TENSOR = "parallelism.tensor_parallel_degree"
CONTEXT = "parallelism.context_parallel_degree"
EXPERT = "parallelism.expert_parallel_degree"
PIPELINE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
ROWS = "training.local_batch_size"
GLOBAL_ROWS = "training.global_batch_size"
OFFLOAD = "compile.allow_offload"

VARIED = (
    *(REPLICATE, SHARD, TENSOR, CONTEXT, EXPERT, PIPELINE, SCHEDULE),
    *(RESHARD, POLICY, ROWS, OFFLOAD),
)
"""The keys that a search varies, and `--fix` may fix."""

POLICIES = ("none", "selective", "full", "budget")
"""Of activations."""
_WORDS: dict[str, tuple[str, ...]] = {
    SCHEDULE: SCHEDULES,
    RESHARD: ("default", "always", "never"),
    POLICY: POLICIES,
    OFFLOAD: ("false", "true"),
}
"""The values of the keys that are no numbers."""

MOST_ROWS = 16
"""Sequences of a local batch at most, but for pipelines, whose batch is a microbatch a row."""

_MOST_STAGES = 16
_LEAST_TOKENS = 8192
"""Tokens of a sequence that a rank of context parallelism has at least: with fewer, one without
it needs less communication and has memory enough."""
_MICROBATCHES = (2, 4, 8)
"""Microbatches of a pipeline without a global batch, in times of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a config."""

    replicate: int
    shard: int
    tensor: int
    context: int
    expert: int
    pipeline: int
    schedule: str
    """Of a pipeline; empty without one."""
    rows: int
    """Sequences of a local batch; of a pipeline its microbatches, of one sequence each."""
    repeats: int
    """Local batches that a rank runs in a step."""
    reshard: str
    policy: str
    """Of activations."""
    offload: bool
    """Whether a budget may keep activations in host memory."""

    @property
    def data_parallel(self) -> int:
        """Different batches in a step."""
        return self.replicate * self.shard

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters stay unsharded from forward to backward: of a pipeline from the first
        microbatch to the last."""
        return self.reshard == "never" or (self.pipeline > 1 and self.reshard == "default")

    @property
    def is_interleaved(self) -> bool:
        """Whether a rank of the pipeline has two stages."""
        return bool(self.schedule) and self.schedule not in ONE_STAGE

    def change(self, limit_gib: float) -> Change:
        """Return the keys that make a config this run.

        Args:
            limit_gib: what a memory budget may fill.
        """
        change = {
            REPLICATE: self.replicate,
            SHARD: self.shard,
            TENSOR: self.tensor,
            CONTEXT: self.context,
            EXPERT: self.expert,
            PIPELINE: self.pipeline,
            RESHARD: self.reshard,
            POLICY: self.policy,
            ROWS: self.rows,
            # without accumulation a step has the local batches of all ranks, whatever they are
            GLOBAL_ROWS: self.rows * self.repeats * self.data_parallel if self.repeats > 1 else -1,
        }
        if self.schedule:
            change[SCHEDULE] = self.schedule
        if self.policy == "budget":
            change[LIMIT_KEY] = f"{limit_gib:g}"
            change[OFFLOAD] = str(self.offload).lower()
        return {key: str(value) for key, value in change.items()}


def fixed_values(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse what `--fix` gives: key=value or key=value,value.

    Raises:
        ConfigError: no such text, a key that the search does not vary, or one twice; a value that
            the key cannot have.
    """
    values: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals or not value.strip():
            raise ConfigError(f"--fix {text}: write key=value, such as {TENSOR}=8")
        if key not in VARIED:
            raise ConfigError(
                f"--fix {key}: the search does not vary it: give --{key} {value} instead. It "
                f"varies {', '.join(VARIED)}"
            )
        if key in values:
            raise ConfigError(f"--fix {key} is given twice: write all its values in one")
        entries = tuple(dict.fromkeys(entry.strip().strip('"') for entry in value.split(",")))
        for entry in entries:
            if key in _WORDS and entry not in _WORDS[key]:
                raise ConfigError(f"--fix {key}={entry}: write {', '.join(_WORDS[key])}")
            if key not in _WORDS and not re.fullmatch("[1-9][0-9]{0,6}", entry):
                raise ConfigError(f"--fix {key}={entry}: write whole numbers, such as {key}=1,2")
        values[key] = entries
    return values


@dataclass(frozen=True, slots=True)
class Space:
    """What there is to choose from on some ranks."""

    config: GraphTrainerConfig
    """The config of the command line."""
    world_size: int
    devices_per_node: int
    global_rows: int | None
    """Sequences of a step, which are kept exactly; None for as many as a local batch has."""
    fixed: Mapping[str, Sequence[str]]

    def candidates(self) -> Iterator[Candidate]:
        """Yield all ways to run the config whose degrees multiply to the number of ranks."""
        spec = self.config.model_spec
        assert spec is not None
        layers = len(spec.model.layers) if hasattr(spec.model, "layers") else 1
        has_experts = bool(mixtures_of(spec.model))
        inside_a_node = math.gcd(self.devices_per_node, self.world_size)
        tensor = self._numbers(TENSOR, divisors(inside_a_node))
        longest = max(1, self.config.training.seq_len // _LEAST_TOKENS)
        context = self._numbers(CONTEXT, [d for d in divisors(self.world_size) if d <= longest])
        most = min(layers, _MOST_STAGES)
        pipeline = self._numbers(PIPELINE, [d for d in divisors(self.world_size) if d <= most])
        for tp, cp, pp in itertools.product(tensor, context, pipeline):
            data = self.world_size // (tp * cp * pp)
            if tp * cp * pp * data != self.world_size:
                continue
            for replicate in self._numbers(REPLICATE, divisors(data)):
                if data % replicate:
                    continue
                shard = data // replicate
                if shard not in self._numbers(SHARD, [shard]):
                    continue
                experts = divisors(shard * cp * tp) if has_experts else [1]
                for expert in self._numbers(EXPERT, experts):
                    mesh = {"replicate": replicate, "shard": shard, "tensor": tp, "context": cp}
                    yield from self._on_mesh(mesh | {"expert": expert, "pipeline": pp})

    def _on_mesh(self, mesh: dict[str, int]) -> Iterator[Candidate]:
        schedules: Sequence[str] = [""]
        if mesh["pipeline"] > 1:
            schedules = self._values(SCHEDULE, ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
        # the default of a pipeline is to keep parameters
        other = "always" if mesh["pipeline"] > 1 else "never"
        is_sharded = mesh["shard"] * mesh["context"] > 1
        reshards = self._values(RESHARD, ["default", other] if is_sharded else ["default"])
        policies = self._values(POLICY, POLICIES)
        for schedule, reshard, policy in itertools.product(schedules, reshards, policies):
            if policy == "budget" and schedule and schedule not in ONE_STAGE:
                continue  # stages of one rank would have to share its memory
            offloads = [value == "true" for value in self._values(OFFLOAD, ["false"])]
            for rows, repeats in self._batches(mesh):
                for offload in offloads if policy == "budget" else [False]:
                    yield Candidate(
                        **mesh,
                        schedule=schedule,
                        rows=rows,
                        repeats=repeats,
                        reshard=reshard,
                        policy=policy,
                        offload=offload,
                    )

    def _batches(self, mesh: dict[str, int]) -> Iterator[tuple[int, int]]:
        """Yield rows of a local batch, and local batches in a step."""
        ranks, pipeline = mesh["replicate"] * mesh["shard"], mesh["pipeline"]
        if self.global_rows is not None:
            if self.global_rows % ranks:
                return
            of_rank = self.global_rows // ranks
            rows = [d for d in divisors(of_rank) if pipeline > 1 or d <= MOST_ROWS]
            # a pipeline runs all microbatches in one schedule, whose bubble is the smallest
            rows = [of_rank] if pipeline > 1 else rows
            for number in self._numbers(ROWS, rows):
                if of_rank % number == 0:
                    yield number, of_rank // number
        elif pipeline > 1:
            for number in self._numbers(ROWS, [pipeline * times for times in _MICROBATCHES]):
                yield number, 1
        else:
            for number in self._numbers(ROWS, [1, 2, 4, 8, MOST_ROWS]):
                yield number, 1

    def _values(self, key: str, others: Sequence[str]) -> Sequence[str]:
        return self.fixed.get(key, others)

    def _numbers(self, key: str, others: Sequence[int]) -> Sequence[int]:
        return [int(value) for value in self.fixed[key]] if key in self.fixed else others


def divisors(number: int) -> list[int]:
    """List the divisors of a number, in order."""
    return [d for d in range(1, number + 1) if number % d == 0]
