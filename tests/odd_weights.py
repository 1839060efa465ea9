"""A model whose weights are not all matrices of floats, for tests of exports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.state_dict_adapter import StateDictAdapter


class OddModel(BaseModel):
    """A scalar, buffers of integers and booleans, and a head that is tied to the embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """Of a model of one size."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Take nothing."""

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            return 1, 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 5)
        self.gate = nn.Linear(5, 3)  # four ranks: one has no part of its bias
        self.bias = nn.Parameter(torch.rand(3))  # nor of this one
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.tensor(2**40 + 1))
        self.register_buffer("seen", torch.tensor([True, False, True]))
        self.register_buffer("turn", torch.tensor([1 + 2j, -3j]))

    def forward(self, tokens: torch.Tensor, **positions: Any) -> torch.Tensor:
        return self.head(self.emb(tokens) * self.scale)

    def init_states(self, *, buffer_device: Any = None) -> None:
        """Leave everything as it is."""


class OddAdapter(StateDictAdapter):
    """Names begin with "model.", and one weight is transposed, as in GPT-2."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        theirs = {f"model.{name}": value for name, value in state_dict.items()}
        return theirs | {"model.gate.weight": theirs["model.gate.weight"].t()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        ours = {name.removeprefix("model."): value for name, value in hf_state_dict.items()}
        return ours | {"gate.weight": ours["gate.weight"].t()}


def expected(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What an export of an OddModel's whole weights is to hold."""
    whole = OddAdapter(OddModel.Config(), None).to_hf(state)
    del whole["model.head.weight"]
    return {n: v.to(dtype) if v.is_floating_point() else v for n, v in whole.items()}


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one of them has, and those of other shapes, dtypes or values."""
    both = found.keys() & wanted.keys()
    unlike = {
        name
        for name in both
        if found[name].dtype != wanted[name].dtype or not torch.equal(found[name], wanted[name])
    }
    return sorted((found.keys() ^ wanted.keys()) | unlike)
