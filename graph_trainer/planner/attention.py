"""Attention as a GPU runs it, while the step is captured on meta."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

_flash = torch.ops.aten._scaled_dot_product_flash_attention


@contextlib.contextmanager
def flash_attention_as_on_gpu() -> Iterator[None]:
    """While entered: `F.scaled_dot_product_attention` in half precision is the flash kernel.

    CUDA builds of torch choose it (or cuDNN's, which needs the same memory) for float16 and
    bfloat16 without a mask; meta, which is no GPU, decomposes into matmuls that hold all
    scores. The op has a meta kernel, a backward and DTensor's sharding rule.
    """
    # Not a TorchFunctionMode: while torch.autograd.grad runs under one, the mode is off, and a
    # checkpointed block that is computed again there would get the other attention.
    original = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return (_run_flash if _is_flash(*args, **kwargs) else original)(*args, **kwargs)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _is_flash(
    query: torch.Tensor, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any
) -> bool:
    # the kernel's limits: half precision, no mask, heads of at most 256
    half = query.dtype in (torch.float16, torch.bfloat16)
    return half and attn_mask is None and query.shape[-1] <= 256


def _run_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    # the kernel reads fewer keys than queries as they are: enable_gqa asks for nothing more
    return _flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
