"""Context parallelism: attention of a decoder whose batches are split along the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtitan.models.common.attention import ScaledDotProductAttention

from graph_trainer.core.sharding.context_parallel import (
    attention_mask,
    gather_keys,
    gather_positions,
    heads_from_ranks,
    heads_to_ranks,
    places,
)

Applied = Literal["all_gather", "ulysses"]
Method = Literal["auto", "all_gather", "ulysses"]

_BLOCKS = ("layers.", "mtp_layers.")
"""Where a decoder has its blocks. A vision encoder, say, has attention of another kind."""

# torchtitan's list has no kernel beside cuDNN's that takes a mask and stores no scores.
_WITH_MASK = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


def heads_that_do_not_divide(layers: Sequence[Any], degree: int, tensor: int) -> str:
    """Describe the first heads that so many context- and tensor-parallel ranks cannot split evenly;
    "" where there are none.

    Args:
        layers: configs of a decoder's layers.
    """
    for index, layer in enumerate(layers):
        attention = getattr(layer, "attention", None)
        for name in ("n_heads", "n_kv_heads"):
            heads = getattr(attention, name, None)
            if heads is not None and heads % (degree * tensor):
                return f"{name} = {heads} of layers.{index}"
    return ""


def applied_method(method: Method, layers: Sequence[Any], degree: int, tensor: int) -> Applied:
    """Return the method that "auto" stands for: "ulysses" where heads divide. Arguments are those
    of `heads_that_do_not_divide`."""
    if method != "auto":
        return method
    return "all_gather" if heads_that_do_not_divide(layers, degree, tensor) else "ulysses"


def apply_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    method: Applied,
    dtype: torch.dtype,
    *,
    document_mask: bool = False,
) -> None:
    """Change a decoder in place so that its attention sees the whole sequence.

    Call it before tensor parallelism, which gives attention the local tensors.

    Args:
        group: the ranks that share a sequence, split as torchtitan's "headtail" load balancer does;
            None where each rank has its own.
        method: "all_gather" for all keys and values beside this rank's queries, "ulysses" for the
            whole sequence with a part of the heads.
        dtype: that attention computes in.
        document_mask: whether a token sees only tokens of its document.
    """
    gathers = group is not None and method == "all_gather"
    masks = gathers or document_mask
    for name, module in model.named_modules():
        if isinstance(module, ScaledDotProductAttention) and name.startswith(_BLOCKS):
            attend = _masked if masks else module.forward
            module.forward = attend if group is None else _on_ranks(attend, group, gathers)
    if not masks:
        return

    # All layers share one mask: autograd saves the mask of every layer for backward.
    def with_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        positions = kwargs["positions"]
        local, device = positions.shape[1], positions.device
        if group is not None and document_mask:
            positions = gather_positions(positions, group)
        if group is not None and gathers:
            keys = places(local, group, device)
            queries = keys.narrow(0, group.rank() * local, local)
        else:
            queries = keys = torch.arange(positions.shape[1], device=device)
        mask = attention_mask(queries, keys, dtype, positions if document_mask else None)
        return args, kwargs | {"attention_masks": mask}

    model.register_forward_pre_hook(with_mask, with_kwargs=True)


# torchtitan's sharding finds attention's arguments by their names.


def _masked(
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    attention_masks: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    query, key, value = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
    with sdpa_kernel(_WITH_MASK, set_priority=True):
        out = F.scaled_dot_product_attention(query, key, value, attention_masks, **options)
    return out.transpose(1, 2)


def _on_ranks(attend: Any, group: dist.ProcessGroup, gathers: bool) -> Any:
    def forward(
        q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        if gathers:
            return attend(q_BLNH, *gather_keys(k_BLNH, v_BLNH, group), **options)
        sequences = heads_to_ranks((q_BLNH, k_BLNH, v_BLNH), group)
        return heads_from_ranks(attend(*sequences, **options), group)

    return forward
