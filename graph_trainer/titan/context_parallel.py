"""Context parallelism: attention of a decoder whose batches are split along the sequence."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchtitan.models.common.attention import ScaledDotProductAttention

from graph_trainer.core.sharding.context_parallel import (
    causal_mask,
    gather_keys,
    heads_from_ranks,
    heads_to_ranks,
)

Method = Literal["all_gather", "ulysses"]

# torchtitan's list has no kernel beside cuDNN's that takes a mask and stores no scores.
_WITH_MASK = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


def apply_context_parallel(
    model: nn.Module, group: dist.ProcessGroup, method: Method, dtype: torch.dtype
) -> None:
    """Let the attention of a decoder see the whole sequence, in place.

    Call it before tensor parallelism, which gives attention the local tensors.

    Args:
        group: the ranks that share a sequence, split as torchtitan's "headtail" load balancer does.
        method: "all_gather" for all keys and values beside this rank's queries, "ulysses" for the
            whole sequence with a part of the heads.
        dtype: that attention computes in.
    """
    for module in model.modules():
        if isinstance(module, ScaledDotProductAttention):
            wrap = _with_gathered_keys if method == "all_gather" else _with_heads_of_rank
            module.forward = partial(wrap, module.forward, group)
    if method == "all_gather":
        # One mask for all layers: each keeps what it adds to its scores for backward.
        def with_mask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
            mask = causal_mask(args[0].shape[1], group, args[0].device, dtype)
            return args, kwargs | {"attention_masks": mask}

        model.register_forward_pre_hook(with_mask, with_kwargs=True)


def _with_gathered_keys(
    _: Any,
    group: dist.ProcessGroup,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    attention_masks: torch.Tensor,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    keys, values = gather_keys(k_BLNH, v_BLNH, group)
    with sdpa_kernel(_WITH_MASK, set_priority=True):
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q_BLNH, keys, values)),
            attn_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return out.transpose(1, 2)


def _with_heads_of_rank(
    attend: Any,
    group: dist.ProcessGroup,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    whole = heads_to_ranks((q_BLNH, k_BLNH, v_BLNH), group)
    return heads_from_ranks(attend(*whole, **options), group)
