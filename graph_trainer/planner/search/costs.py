"""What a run takes and needs at least, and about, by formulas alone."""

# The idea: thousands of runs can be compared in a second, if no graph is made. What no run can do
# without (products, bytes over links, sharded state) bounds it from below. The same
# terms, added up where they hardly overlap, put the runs in an order.

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graph_trainer.core.graph.collective_kinds import CollectiveKind, kind_named
from graph_trainer.core.simulation.collective_costs import Parts, collective_parts
from graph_trainer.core.simulation.hardware import Hardware, Link, OpKind
from graph_trainer.planner.fake_rank import FakeProcess
from graph_trainer.planner.search.space import Candidate
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.model_flops import FlopsPerToken

from torchtitan.config import TORCH_DTYPE_MAP  # isort: skip

_BESIDE_PRODUCTS = 1.2
"""An estimate: norms, activations, sums and casts, beside the products of a step."""
_AGAIN = {"none": 0.0, "selective": 0.12, "full": 1 / 3, "budget": 0.0}
"""By activation policy, an estimate of what is computed again, as a part of the step's products:
with "full" forward, a third of them. A budget may be that of no policy."""
_KEPT = {"none": 1.2, "selective": 0.8, "full": 0.0, "budget": 0.0}
"""By activation policy, an estimate of what a token keeps of a layer beside its input, in elements,
as a part of the layer's weights a row."""


class Needs(NamedTuple):
    """Seconds of a step and bytes of a device."""

    seconds: float
    needed_bytes: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What formulas know of a model."""

    parameters: int
    trained: int
    """Parameters that get a gradient."""
    of_experts: int
    """Parameters of routed experts."""
    layers: int
    width: int
    """Elements of a token between layers; 0 where the config does not say."""
    flops: FlopsPerToken

    @classmethod
    def of(cls, run: FakeProcess) -> ModelSize:
        """Count the model of a run."""
        parameters = list(run.whole_model.parameters())
        assert run.config.model_spec is not None
        model = run.config.model_spec.model
        return cls(
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            of_experts=sum(p.numel() for p in parameters if p.dim() == 3),
            layers=len(getattr(model, "layers", ())) or 1,
            width=getattr(model, "dim", 0),
            flops=run.flops_per_token,
        )

    @property
    def product_flops(self) -> int:
        """FLOPs of a token in products with weights, forward and backward."""
        return 2 * self.flops.causal - self.flops.torchtitan

    @property
    def attention_flops(self) -> int:
        """FLOPs of a token in attention with a causal mask, forward and backward."""
        return self.flops.causal - self.product_flops


@dataclass(frozen=True, slots=True)
class Costs:
    """Bounds and estimates of the runs of a model on some hardware."""

    config: GraphTrainerConfig
    size: ModelSize
    hardware: Hardware
    world_size: int
    allowed_bytes: int
    """What a step may need of a device."""

    def bound(self, run: Candidate) -> Needs:
        """Return less than a simulation finds.

        A step takes as long as its products at the best efficiency; or as the gathers and
        reductions of FSDP on one of the links; or as the sums of tensor parallelism; whichever is
        longest. It needs the sharded weights and optimizer states, and gradients
        or, where more, the inputs of the layers, which no policy but an offloading budget
        recomputes.
        """
        products = self._products(run, best=True)
        seconds = max(products, self._of_fsdp(run), self._of_tensor_parallel(run))
        beside = max(self._gradient_bytes(run), 0 if run.offload else self._input_bytes(run))
        return Needs(
            seconds * self.hardware.slowest_of(self.world_size),
            self._state_bytes(run) + beside + self.hardware.reserved_bytes,
        )

    def estimate(self, run: Candidate) -> Needs:
        """Return about what a simulation finds.

        Products, other ops and recomputation follow each other; tensor parallelism's sums wait for
        them and they for the sums; FSDP's collectives run beside all of this.
        """
        products = self._products(run, best=False)
        compute = products * (_BESIDE_PRODUCTS + _AGAIN[run.policy])
        compute = (compute + self._of_tensor_parallel(run)) * self._stretch(run)
        of_fsdp = self._of_fsdp(run) * (1 if run.keeps_parameters else 1.4)
        seconds = max(compute, of_fsdp) + 0.1 * of_fsdp
        weights_a_row = self.size.product_flops / 6 / self.size.layers / max(1, self.size.width)
        kept = self._kept_tokens(run) * weights_a_row * _KEPT[run.policy]
        unsharded = 0.0
        if run.keeps_parameters:  # and of a pipeline the sums of their gradients, in float32
            unsharded = sum(self._computed_with(run)) * (3 if run.pipeline > 1 else 1)
        bound = self.bound(run)
        return Needs(
            max(bound.seconds, seconds * self.hardware.slowest_of(self.world_size)),
            bound.needed_bytes + (kept / run.tensor + unsharded) * self._kept_itemsize,
        )

    # --- seconds ------------------------------------------------------------------------------

    def tokens(self, run: Candidate) -> int:
        """Return the tokens of a step on all ranks."""
        return run.rows * run.repeats * run.data_parallel * self.config.training.seq_len

    def _products(self, run: Candidate, *, best: bool) -> float:
        tokens = self.tokens(run) / self.world_size
        peak = self.hardware.flops(torch.bfloat16) * self.hardware.clock
        seconds = self.size.product_flops / self._efficiency(OpKind.MATMUL, best)
        seconds += self.size.attention_flops / self._efficiency(OpKind.ATTENTION, best)
        return tokens * seconds / peak

    def _efficiency(self, kind: OpKind, best: bool) -> float:
        scalar = self.hardware.scalar_efficiency(kind)
        measured = [e.efficiency for e in self.hardware.efficiencies if e.kind == kind]
        return max([scalar, *measured]) if best else scalar

    def _stretch(self, run: Candidate) -> float:
        """Return by what the bubble of a schedule makes its compute longer."""
        if "Zero" in run.schedule or "Dual" in run.schedule:
            return 1.0
        stages = 2 if run.is_interleaved else 1
        return 1 + (run.pipeline - 1) / (stages * run.rows)

    def _of_fsdp(self, run: Candidate) -> float:
        """Return how long gathers in forward, and reductions, keep the busiest link busy."""
        training = self.config.training
        gathered, reduced = (
            TORCH_DTYPE_MAP[name].itemsize
            for name in (training.mixed_precision_param, training.mixed_precision_reduce)
        )
        trained = self.size.trained / self.size.parameters
        dense, experts = self._computed_with(run)
        busy: dict[Link, float] = defaultdict(float)
        for elements, ranks, stride in (
            (dense, run.shard * run.context, run.tensor),
            (experts, self._ranks_of_experts(run), max(run.tensor, run.expert)),
        ):
            sent = reduced * trained * elements
            for kind, num_bytes, count, step in (
                (_GATHER, gathered * elements, ranks, stride),
                (_SCATTER, sent, ranks, stride),
                (_REDUCE, sent / ranks, run.replicate, ranks * stride),
            ):
                parts = self._parts(kind, num_bytes, count, step)
                busy[parts.link] += parts.transfer_seconds
        seconds = max(busy.values())
        if run.pipeline == 1:
            return seconds * run.repeats
        return seconds if run.keeps_parameters else seconds * run.rows

    def _computed_with(self, run: Candidate) -> tuple[float, float]:
        """Return the parameters that a rank computes with: dense ones, and those of experts."""
        dense = (self.size.parameters - self.size.of_experts) / (run.tensor * run.pipeline)
        inside = run.expert if run.expert > 1 else run.tensor
        return dense, self.size.of_experts / (inside * run.pipeline)

    def _ranks_of_experts(self, run: Candidate) -> int:
        """Return how many ranks shard the same experts."""
        inside = run.expert if run.expert > 1 else run.tensor
        return max(1, run.shard * run.context * run.tensor // inside)

    def _of_tensor_parallel(self, run: Candidate) -> float:
        """Return how long the sums of tensor parallelism keep a link busy in a step: a gather and a
        reduction of attention, and of what follows it but experts, in forward and in backward."""
        if run.tensor == 1 or not self.size.width:
            return 0.0
        tokens = run.rows * run.repeats * self.config.training.seq_len / run.context
        one = tokens * self.size.width * self._kept_itemsize
        both = self._parts(_GATHER, one, run.tensor, 1).transfer_seconds
        both += self._parts(_SCATTER, one, run.tensor, 1).transfer_seconds
        blocks = 1 if self.size.of_experts else 2
        return 2 * blocks * both * self.size.layers / run.pipeline

    def _parts(self, kind: CollectiveKind, num_bytes: float, ranks: int, stride: int) -> Parts:
        """Return which link a collective of so many bytes in all keeps busy, and for how long.

        Args:
            stride: from one rank of the group to the next.
        """
        group = tuple(range(0, ranks * stride, stride))
        return collective_parts(_Message(group, kind, int(num_bytes)), self.hardware)

    # --- bytes --------------------------------------------------------------------------------

    @property
    def _itemsize(self) -> int:
        return TORCH_DTYPE_MAP[self.config.training.dtype].itemsize

    @property
    def _kept_itemsize(self) -> int:
        return TORCH_DTYPE_MAP[self.config.training.mixed_precision_param].itemsize

    def _state_bytes(self, run: Candidate) -> float:
        """Return the bytes of weights and optimizer states, which Adam has two of."""
        names = {group.optimizer_name for group in self.config.optimizer.param_groups}
        states = 2 if names <= {"Adam", "AdamW"} else 1
        elements = self.size.parameters + states * self.size.trained
        return elements * self._itemsize * run.replicate / self.world_size

    def _gradient_bytes(self, run: Candidate) -> float:
        return self.size.trained * self._itemsize * run.replicate / self.world_size

    def _input_bytes(self, run: Candidate) -> float:
        return self._kept_tokens(run) * self.size.width * self._kept_itemsize / run.tensor

    def _kept_tokens(self, run: Candidate) -> float:
        """Return tokens times layers of which a rank keeps something between forward and
        backward: of the first stage's microbatches in flight."""
        rows = min(run.rows, run.pipeline) if run.pipeline > 1 else run.rows
        tokens = rows * self.config.training.seq_len / run.context
        return tokens * max(1, self.size.layers // run.pipeline)


_GATHER = kind_named("all_gather_into_tensor")
_SCATTER = kind_named("reduce_scatter_tensor")
_REDUCE = kind_named("all_reduce")


class _Message(NamedTuple):
    """A collective by its size alone."""

    ranks: tuple[int, ...]
    row: CollectiveKind
    num_bytes: int

    @property
    def input_bytes(self) -> int:
        parts = len(self.ranks) if self.row is _GATHER else 1
        return self.num_bytes // parts

    @property
    def output_bytes(self) -> int:
        parts = len(self.ranks) if self.row is _SCATTER else 1
        return self.num_bytes // parts

    @property
    def largest_split_bytes(self) -> int:
        return self.num_bytes // len(self.ranks)
