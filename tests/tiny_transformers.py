"""Tiny models of transformers, made from its config classes: folders for `[model] path`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_OF_ATTENTION = "intermediate_size", "num_attention_heads", "max_position_embeddings"
_NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED | {"pad_token_id": 3}),
    # tied; positions are learned; its weights on the hub leave the prefix "transformer." out
    "gpt2": ("GPT2Config", _SIZES | _NO_DROPOUT),
    # keys turn far: a shift of all keys changes no softmax, so that of keys that turn little the
    # gradient of the bias cancels, and what is left of it is rounding
    "qwen2": ("Qwen2Config", _GROUPED | {"tie_word_embeddings": True, "rope_theta": 4.0}),
    # a window shorter than the sequences of the tests, which needs a mask
    "mistral": ("MistralConfig", _GROUPED | {"sliding_window": 5}),
    "gpt_neox": ("GPTNeoXConfig", _SIZES),
    # capped scores, which scaled dot product attention does not have; every second layer a window
    "gemma2": ("Gemma2Config", _GROUPED | {"head_dim": 8, "sliding_window": 5}),
    # renamed, and each expert apart, in its folder
    "mixtral": ("MixtralConfig", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # its initialization copies plain tensors into parameters; takes no positions
    "mamba": (
        "MambaConfig",
        {n: v for n, v in _SIZES.items() if n not in _OF_ATTENTION} | {"state_size": 4},
    ),
}


def config_of(family: str) -> Any:
    """The config of a family, in transformers' own class."""
    import transformers

    name, values = FAMILIES[family]
    return getattr(transformers, name)(**values)


def folder_of(family: str, folder: Path, *, weights: bool = False) -> Path:
    """Write a family's config.json below a folder, and random weights in the hub's form where asked
    for."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    path = folder / family
    config = config_of(family)
    config.save_pretrained(path)
    if weights:
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():  # ones and zeros of norms and biases would hide a mix-up
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        # not by save_pretrained, which writes nothing where an earlier fake rank was not the first
        tied = model.all_tied_weights_keys
        state = {n: v.contiguous() for n, v in model.state_dict().items() if n not in tied}
        save_file(
            revert_weight_conversion(model, state),
            path / "model.safetensors",
            metadata={"format": "pt"},
        )
    return path


def flags_of(path: Path) -> dict[str, Any]:
    """The flags that train a folder's model."""
    return {"module": "graph_trainer.transformers", "config": "debugmodel", "model.path": path}
