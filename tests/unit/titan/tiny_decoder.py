"""A decoder of one layer and its inputs, for the tests of the chunked cross-entropy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from graph_trainer.titan.chunked_loss import ChunkedCrossEntropyLoss

from torchtitan.components.loss import IGNORE_INDEX  # isort: skip

BATCH, SEQUENCE, DIM, VOCABULARY = 2, 13, 16, 50
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}


class TinyDecoder(nn.Module):
    """The parts of a torchtitan decoder that the loss uses."""

    _skip_lm_head = False

    def __init__(self, dim: int = DIM, vocabulary: int = VOCABULARY, *, bias: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.lm_head = nn.Linear(dim, vocabulary, bias=bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.tok_embeddings(tokens))
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def attached(model: nn.Module, **options: Any) -> ChunkedCrossEntropyLoss:
    loss = ChunkedCrossEntropyLoss.Config(**options).build()
    loss.attach(model)
    return loss


def inputs(
    dtype: torch.dtype = torch.float32,
    batch: int = BATCH,
    sequence: int = SEQUENCE,
    dim: int = DIM,
    vocabulary: int = VOCABULARY,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make hidden states, weight and labels: logits about standard normal, some labels ignored."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, sequence, dim, generator=g)
    weight = torch.randn(vocabulary, dim, generator=g) / math.sqrt(dim)
    labels = torch.randint(0, vocabulary, (batch, sequence), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.2] = IGNORE_INDEX
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels
