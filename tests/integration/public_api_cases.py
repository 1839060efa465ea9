"""The models of the public API's cases, how each is sharded and what it is fed.

public_api_runs.py runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import graph_trainer as gt

POLICIES = ("always", "never")  # "default" is "always" but for the last bucket
DEVICE = "cuda" if torch.accelerator.is_available() else "cpu"

Batch = tuple[torch.Tensor, ...]


@dataclass(kw_only=True)
class Case:
    """One model, how it is sharded and what it is fed."""

    build: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    batch: Callable[[torch.Generator], Batch]
    shard: Callable[[nn.Module], nn.Module] | None = None
    """Default: fully_shard over all ranks."""
    ranks: int = 3
    """How many ranks run it; those with `shard` for a mesh of 2 x 2 need four, others any."""
    policies: tuple[str, ...] = POLICIES
    activation: str = "none"
    """The activation policy of the captured steps."""
    in_regions: bool = False
    """Whether captured steps run as the regional backend cuts them, ops one by one."""
    global_batch: bool = False
    """Whether to compare with one rank on the global batch too."""
    batch_ranks: int | None = None
    """How many different batches there are; ranks that share tensors share a batch too."""


def fully_sharded(model: nn.Module, **options: Any) -> nn.Module:
    return gt.simple_fsdp(model, init_device_mesh(DEVICE, (dist.get_world_size(),)), **options)


def tokens(vocabulary: int, length: int = 7) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        return (torch.randint(vocabulary, (2, length), generator=generator),)

    return make


def language_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def masked_tokens(vocabulary: int) -> Callable[[torch.Generator], Batch]:
    """With the causal mask written out. Without one transformers looks into the positions of
    real tensors and drops its mask, and keeps it where tensors are fake: another kernel."""

    def make(generator: torch.Generator) -> Batch:
        (ids,) = tokens(vocabulary)(generator)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        return ids, mask.expand(ids.shape[0], 1, -1, -1)

    return make


def masked_language_loss(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    # sizes that three ranks do not divide
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2(dropout: float) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=50,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=4,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
        )
        model = GPT2LMHeadModel(config)
        assert model.lm_head.weight is model.transformer.wte.weight
        return model.train()

    return build


class Cnn(nn.Module):
    """Convolutions with batch norm, whose running statistics forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 4, 3)
        )
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)).mean((2, 3)))


def images(generator: torch.Generator) -> Batch:
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def classification(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


class Odd(nn.Module):
    """Every awkward parameter at once: rows that do not divide, fewer rows than ranks, one
    row, a scalar, tied, frozen, unused; and a buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 10)
        self.second = nn.Linear(10, 3)
        self.third = nn.Linear(3, 1)
        self.tied = nn.Linear(4, 10)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(10), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5, 2))
        self.register_buffer("average", torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) + self.tied(x) * self.frozen
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return self.third(torch.tanh(self.second(hidden - self.average))) * self.scale


def vectors(generator: torch.Generator) -> Batch:
    return torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float, recompute: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(dropout)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Blocks(nn.Module):
    def __init__(self, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4, dropout, recompute) for _ in range(3)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Shared(nn.Module):
    """One block after a norm, an op of several results, which runs `repeats` times."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), Block(8, 0.0, False))])
        self.head = nn.Linear(8, 20)
        self.repeats = repeats

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for _ in range(self.repeats):
            x = self.layers[0](x)
        return self.head(x)


def preference(model: nn.Module, chosen: torch.Tensor, *rejected: torch.Tensor) -> torch.Tensor:
    """Two forwards or more in one loss: the first text above all others."""
    score = model(chosen).log_softmax(-1)[..., 0].sum()
    margins = [score - model(other).log_softmax(-1)[..., 0].sum() for other in rejected]
    return -F.logsigmoid(torch.stack(margins)).sum()


def texts(count: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        return tuple(torch.randint(20, (2, 5), generator=generator) for _ in range(count))

    return make


def generation(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Two tokens one after the other, each chosen by a forward of all before it."""
    loss = ids.new_zeros((), dtype=torch.float32)
    for _ in range(2):
        logits = model(ids)[:, -1]
        token = logits.argmax(-1, keepdim=True)
        loss = loss - logits.log_softmax(-1).gather(-1, token).sum()
        ids = torch.cat([ids, token], 1)
    return loss


def tensor_parallel(model: nn.Module) -> nn.Module:
    """2 x 2: tensor parallelism over sizes it does not divide, then FSDP."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {}
    for i in range(3):
        # from a plain tensor torch would infer twice this rank's part, not 9
        plan[f"layers.{i}.up"] = ColwiseParallel(use_local_output=False)
        plan[f"layers.{i}.down"] = RowwiseParallel()
    parallelize_module(model, mesh["tp"], plan)
    return gt.simple_fsdp(model, mesh["dp"])


def hybrid(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    return gt.simple_fsdp(model, mesh, "hybrid_shard")


CASES = {
    "llama": Case(
        build=llama, loss=masked_language_loss, batch=masked_tokens(50), global_batch=True
    ),
    "gpt2_tied": Case(build=gpt2(0.0), loss=language_loss, batch=tokens(50), global_batch=True),
    "gpt2_dropout": Case(
        build=gpt2(0.3), loss=language_loss, batch=tokens(50), policies=("always",)
    ),
    "cnn": Case(build=Cnn, loss=classification, batch=images, policies=("never",)),
    "odd": Case(build=Odd, loss=squares, batch=vectors),
    "checkpointed_dropout": Case(
        build=lambda: Blocks(dropout=0.4, recompute=True), loss=squares, batch=vectors
    ),
    "tensor_parallel": Case(
        build=Blocks,
        loss=squares,
        batch=vectors,
        shard=tensor_parallel,
        ranks=4,
        global_batch=True,
        batch_ranks=2,
    ),
    "two_forwards": Case(
        build=lambda: Shared(2),
        loss=preference,
        batch=texts(2),
        policies=("never",),
        activation="selective",
        in_regions=True,
    ),
    "three_forwards": Case(
        build=lambda: Shared(1),
        loss=preference,
        batch=texts(3),
        policies=("always",),
        activation="full",
    ),
    "generation": Case(
        build=lambda: Shared(1),
        loss=generation,
        batch=texts(1),
        shard=hybrid,
        ranks=4,
        policies=("never",),
        activation="full",
        in_regions=True,
    ),
    "hybrid_odd": Case(
        build=Odd, loss=squares, batch=vectors, shard=hybrid, ranks=4, policies=("always",)
    ),
}
