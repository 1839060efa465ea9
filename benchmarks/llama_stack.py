"""A Llama-like stack of plain torch modules: what the benchmarks run without torchtitan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Size:
    """Shape of a stack."""

    layers: int
    dim: int
    heads: int
    hidden: int
    vocabulary: int

    def flops_per_token(self, sequence: int) -> float:
        """Floating point operations of forward and backward for one token.

        Six for every weight that a matrix product reads (Kaplan et al. 2020, arXiv 2001.08361),
        and 12 x layers x dim x sequence for attention, halved because it is causal.
        """
        block = 4 * self.dim**2 + 3 * self.dim * self.hidden
        weights = self.layers * block + self.dim * self.vocabulary
        return 6 * weights + 6 * self.layers * self.dim * sequence


SIZES = {
    "tiny": Size(layers=2, dim=64, heads=4, hidden=128, vocabulary=256),
    "8b": Size(layers=8, dim=4096, heads=32, hidden=14336, vocabulary=128256),
    "1b": Size(layers=16, dim=2048, heads=32, hidden=8192, vocabulary=32000),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.wqkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.wo = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, dim] -> the same."""
        batch, sequence, dim = x.shape
        q, k, v = self.wqkv(x).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, sequence, dim))


class Block(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim)
        self.attention = Attention(size)
        self.ffn_norm = nn.RMSNorm(size.dim)
        self.w1 = nn.Linear(size.dim, size.hidden, bias=False)
        self.w3 = nn.Linear(size.dim, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, dim] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class LlamaStack(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, sequence] int64 -> logits [batch, sequence, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
