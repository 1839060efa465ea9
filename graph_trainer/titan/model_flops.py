"""Count a model's FLOPs per token, as torchtitan does and with the attention's mask."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class FlopsPerToken(NamedTuple):
    """FLOPs per token of forward and backward, without recomputation."""

    torchtitan: int
    """As torchtitan counts: every token attends to all tokens of its sequence."""
    causal: int
    """With a causal mask: a token attends to half of its sequence on average."""


def flops_per_token(config: Any, model: nn.Module, seq_len: int) -> FlopsPerToken:
    """Return the FLOPs per token of a model, further tokens that it predicts included.

    The FLOPs of attention alone are proportional to the sequence in torchtitan's count.

    Args:
        config, model, seq_len: as `flops_beyond_torchtitans`.
    """
    counted, without_attention = (
        config.get_nparams_and_flops(model, length)[1]
        + flops_beyond_torchtitans(config, model, length)
        for length in (seq_len, 0)
    )
    return FlopsPerToken(int(counted), int(counted + without_attention) // 2)


def flops_beyond_torchtitans(config: Any, model: nn.Module, seq_len: int) -> int:
    """Return the FLOPs per token that torchtitan 0.3.0 does not count of a model with mtp_layers.

    torchtitan counts 6 FLOPs for each weight that a token meets, the head's once, and the attention
    of `layers`. Each of `mtp_layers`, which predict further tokens, attends as well and its result
    passes through the head once more.

    Args:
        config: of the model, which counts for torchtitan (`get_nparams_and_flops`).
        model: with weights of their global shapes; on any device, sharded or not.
        seq_len: tokens of a sequence.
    """
    further = len(getattr(config, "mtp_layers", None) or ())
    if not further:
        return 0
    (_, counted), (_, without_attention) = (
        config.get_nparams_and_flops(model, length) for length in (seq_len, 0)
    )
    attention = (counted - without_attention) // len(config.layers)
    # `get_parameter` would read the attribute, which gathers where the model is sharded
    head = dict(model.named_parameters())["lm_head.weight"]
    return further * (6 * head.numel() + attention)
