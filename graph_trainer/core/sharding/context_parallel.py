"""A sequence that the ranks of a group share: collectives with autograd, its order and its mask.

The sequence is cut into twice as many chunks as the group has ranks. Rank r has chunk r and the
r-th chunk from the end, its head and its tail, so that causal attention costs every rank the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.traceback import annotate

from graph_trainer.core.graph.annotations import annotation
from graph_trainer.core.sharding.collectives import all_gather, all_to_all, reduce_scatter

Collective = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


class _Sent(torch.autograd.Function):
    """Send by one collective; backward sends the gradient by another."""

    @staticmethod
    def forward(
        ctx: Any, sent: torch.Tensor, group: dist.ProcessGroup, there: Collective, back: Collective
    ) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        with annotate(annotation(context_parallel=True)):
            return there(sent.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        with annotate(annotation(context_parallel=True)):
            return ctx.back(grad.contiguous(), ctx.group), None, None, None


def gather_keys(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of the whole sequence in one all-gather.

    Args:
        key, value: [batch, local sequence, heads, head size]; the head sizes may differ.

    Returns:
        the same of the whole sequence, the chunks in the order of the ranks that have them.
    """
    # The sequence comes first, so that what is gathered needs no other layout.
    both = torch.cat([key.transpose(0, 1), value.transpose(0, 1)], dim=-1)
    whole = _Sent.apply(both, group, all_gather, reduce_scatter).transpose(0, 1)
    keys, values = whole.split([key.shape[-1], value.shape[-1]], dim=-1)
    return keys, values


def heads_to_ranks(
    tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Exchange a part of the sequence with all heads for the whole with a part of the heads.

    Args:
        tensors: each [batch, local sequence, heads, head size], with heads that the group divides.

    Returns:
        each [batch, sequence, heads / group size, head size], in the order of the sequence.
    """
    ranks = group.size()
    parts = [t.unflatten(2, (ranks, -1)) for t in tensors]
    blocks = torch.cat([part.flatten(3) for part in parts], dim=-1).movedim(2, 0)
    whole = _in_order(_Sent.apply(blocks, group, all_to_all, all_to_all).transpose(0, 1))
    given = whole.split([part.shape[3] * part.shape[4] for part in parts], dim=-1)
    return tuple(g.unflatten(2, part.shape[3:]) for g, part in zip(given, parts, strict=True))


def heads_from_ranks(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Undo `heads_to_ranks` for one tensor: a part of the sequence with all heads again."""
    blocks = _by_rank(whole, group.size()).movedim(1, 0)
    exchanged: torch.Tensor = _Sent.apply(blocks, group, all_to_all, all_to_all)
    return exchanged.movedim(0, 2).flatten(2, 3)


def places(local: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the place in the sequence of each token, in the order of `gather_keys`.

    Args:
        local: the length of the local sequence.
    """
    inorder = torch.arange(local * group.size(), device=device)
    return _by_rank(inorder.unsqueeze(0), group.size()).flatten()


def gather_positions(positions: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[batch, local sequence] -> [batch, sequence], in the order of the sequence."""
    with annotate(annotation(context_parallel=True)):
        whole = all_gather(positions.t().contiguous(), group)
    return _in_order(whole.t().unflatten(1, (group.size(), -1)))


def attention_mask(
    queries: torch.Tensor,
    keys: torch.Tensor,
    dtype: torch.dtype,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Make what is added to attention's scores: 0 where a query sees a key, else -inf.

    A query sees no later key and, where positions are given, none of another document.

    Args:
        queries, keys: their places in the sequence.
        positions: [batch, sequence], 0 where a document begins.

    Returns:
        [queries, keys], with positions [batch, 1, queries, keys].
    """
    hidden = queries.unsqueeze(1) < keys
    if positions is not None:
        document = (positions == 0).cumsum(1)
        apart = document[:, queries].unsqueeze(2) != document[:, keys].unsqueeze(1)
        hidden = (hidden | apart).unsqueeze(1)
    mask = torch.zeros(hidden.shape, device=keys.device, dtype=dtype)
    return mask.masked_fill(hidden, float("-inf"))


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """[batch, ranks, local sequence, ...] -> [batch, sequence, ...], chunk after chunk."""
    heads, tails = parts.unflatten(2, (2, -1)).unbind(2)
    return torch.cat([heads, tails.flip(1)], dim=1).flatten(1, 2)


def _by_rank(whole: torch.Tensor, ranks: int) -> torch.Tensor:
    """[batch, sequence, ...] -> [batch, ranks, local sequence, ...], head and tail of each rank."""
    heads, tails = whole.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.stack([heads, tails.flip(1)], dim=2).flatten(2, 3)
