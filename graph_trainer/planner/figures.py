"""What follows from the figures of a plan, of one stage or of several."""

from __future__ import annotations

from abc import abstractmethod

import torch

from graph_trainer.core.simulation.hardware import Hardware
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.model_flops import FlopsPerToken


class Figures:
    """Speed and memory of a planned run, from the fields that a plan has."""

    __slots__ = ()

    config: GraphTrainerConfig
    hardware: Hardware
    world_size: int
    num_parameters: int
    """Of the whole model."""
    flops_per_token: FlopsPerToken
    """Of the whole model."""
    limit_bytes: int | None
    """compile.memory_limit_gib; None where no limit is given."""

    @property
    @abstractmethod
    def needed_bytes(self) -> int:
        """What the rank that needs most needs of its device."""

    @property
    @abstractmethod
    def tokens_per_second_per_gpu(self) -> float:
        """As torchtitan logs it."""

    @property
    def model(self) -> str:
        """The model and its size."""
        unit, size = ("B", 1e9) if self.num_parameters >= 1e7 else ("M", 1e6)
        return f"{model_name(self.config)}, {self.num_parameters / size:.2f} {unit} parameters"

    @property
    def slowest_device(self) -> float:
        """How many times longer than on average the slowest device of the run takes."""
        return self.hardware.slowest_of(self.world_size)

    @property
    def mfu(self) -> float:
        """Model FLOPs per second as a part of the hardware's bfloat16 peak, as torchtitan
        counts them."""
        return self._part_of_peak(self.flops_per_token.torchtitan)

    @property
    def mfu_causal(self) -> float:
        """As `mfu`, without the attention that the causal mask excludes."""
        return self._part_of_peak(self.flops_per_token.causal)

    def _part_of_peak(self, flops_per_token: int) -> float:
        peak = self.hardware.flops(torch.bfloat16)
        return flops_per_token * self.tokens_per_second_per_gpu / peak

    @property
    def allowed_bytes(self) -> int:
        """What a step may need: the device's memory, or the limit where that is less."""
        return min(self.hardware.memory_bytes, self.limit_bytes or self.hardware.memory_bytes)

    @property
    def headroom_bytes(self) -> int:
        """What the step leaves of what it may need; negative where it does not fit."""
        return self.allowed_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether the step fits on the hardware and within the limit."""
        return self.headroom_bytes >= 0


def model_name(config: GraphTrainerConfig) -> str:
    """Format the name and flavor of the model that a config trains."""
    spec = config.model_spec
    return f"{spec.name} {spec.flavor}" if spec is not None else "model"
