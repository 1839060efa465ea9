"""A sequence that the ranks of a group share: collectives with autograd, its order and its mask.

The sequence is cut into twice as many chunks as the group has ranks. Rank r has two chunks: its
head, chunk r, and its tail, the r-th chunk from the end. So causal attention costs every rank the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.traceback import annotate

from graph_trainer.core.graph.annotations import annotation
from graph_trainer.core.sharding.functional_collectives import (
    all_gather,
    all_to_all,
    reduce_scatter,
)

Collective = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


class _Communicate(torch.autograd.Function):
    """Run one collective in forward, and another one on the gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        collective: Collective,
        backward_collective: Collective,
    ) -> torch.Tensor:
        ctx.group = group
        ctx.backward_collective = backward_collective
        with annotate(annotation(context_parallel=True)):
            return collective(tensor.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        with annotate(annotation(context_parallel=True)):
            return ctx.backward_collective(grad.contiguous(), ctx.group), None, None, None


def gather_keys(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of the whole sequence in one all-gather.

    Args:
        key, value: [batch, local sequence, heads, head size]; the head sizes may differ.

    Returns:
        Keys and values of the whole sequence, with the chunks in the order of the ranks that have
        them.
    """
    # An all-gather concatenates along the first dimension, so the sequence comes first.
    both = torch.cat([key.transpose(0, 1), value.transpose(0, 1)], dim=-1)
    gathered = _Communicate.apply(both, group, all_gather, reduce_scatter).transpose(0, 1)
    keys, values = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
    return keys, values


def heads_to_ranks(
    tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Exchange a part of the sequence with all heads for all of it with a part of the heads.

    Args:
        tensors: each [batch, local sequence, heads, head size]. The group size must divide the
            number of heads.

    Returns:
        Each [batch, sequence, heads / group size, head size], in the order of the sequence.
    """
    # [batch, local sequence, ranks, heads / ranks, head size]
    parts = [tensor.unflatten(2, (group.size(), -1)) for tensor in tensors]
    blocks = torch.cat([part.flatten(3) for part in parts], dim=-1).movedim(2, 0)
    received = _Communicate.apply(blocks, group, all_to_all, all_to_all)
    sequence = _in_order(received.transpose(0, 1))
    pieces = sequence.split([part.shape[3] * part.shape[4] for part in parts], dim=-1)
    return tuple(
        piece.unflatten(2, part.shape[3:]) for piece, part in zip(pieces, parts, strict=True)
    )


def heads_from_ranks(sequence: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Undo `heads_to_ranks` for one tensor: return the local sequence with all heads."""
    blocks = _by_rank(sequence, group.size()).movedim(1, 0)
    exchanged: torch.Tensor = _Communicate.apply(blocks, group, all_to_all, all_to_all)
    return exchanged.movedim(0, 2).flatten(2, 3)


def places(local: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the place in the sequence of each token, in the order of `gather_keys`.

    Args:
        local: the length of the local sequence.
    """
    in_order = torch.arange(local * group.size(), device=device)
    return _by_rank(in_order.unsqueeze(0), group.size()).flatten()


def gather_positions(positions: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [batch, local sequence] into [batch, sequence], in the order of the sequence."""
    with annotate(annotation(context_parallel=True)):
        gathered = all_gather(positions.t().contiguous(), group)
    return _in_order(gathered.t().unflatten(1, (group.size(), -1)))


def attention_mask(
    queries: torch.Tensor,
    keys: torch.Tensor,
    dtype: torch.dtype,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mask to add to attention's scores: 0 where a query attends to a key, else -inf.

    A query attends to no later key and, with positions, to no key of another document.

    Args:
        queries, keys: their places in the sequence.
        positions: [batch, sequence], 0 where a document begins.

    Returns:
        [queries, keys], or [batch, 1, queries, keys] with positions.
    """
    hidden = queries.unsqueeze(1) < keys
    if positions is not None:
        document = (positions == 0).cumsum(1)
        other_document = document[:, queries].unsqueeze(2) != document[:, keys].unsqueeze(1)
        hidden = (hidden | other_document).unsqueeze(1)
    mask = torch.zeros(hidden.shape, device=keys.device, dtype=dtype)
    return mask.masked_fill(hidden, float("-inf"))


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Reorder [batch, ranks, local sequence, ...] into [batch, sequence, ...]: chunk by chunk."""
    heads, tails = parts.unflatten(2, (2, -1)).unbind(2)
    return torch.cat([heads, tails.flip(1)], dim=1).flatten(1, 2)


def _by_rank(sequence: torch.Tensor, ranks: int) -> torch.Tensor:
    """Reorder [batch, sequence, ...] into [batch, ranks, local sequence, ...]: heads and tails."""
    heads, tails = sequence.unflatten(1, (2, ranks, -1)).unbind(1)
    return torch.stack([heads, tails.flip(1)], dim=2).flatten(2, 3)
