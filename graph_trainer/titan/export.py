"""A model in Hugging Face's layout: weights, config.json, tokenizer, and the digests of all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.tools.logging import logger

from graph_trainer.errors import CheckpointError
from graph_trainer.titan.checkpoint_files import HF_INDEX, UNFINISHED, damage, publish
from graph_trainer.titan.checkpoint_reader import DataLoadPlanner, DataReader
from graph_trainer.titan.config.run_config import GraphTrainerConfig

_FILE_BYTES = 5 << 30  # of a file of weights; one at a time is in memory
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")


def described(config: GraphTrainerConfig) -> dict[str, Any] | None:
    """Return what config.json is to say of a run's model; None where that is not known.

    A Llama 3 or Qwen 3 is described by its sizes, another model by a method `config_json` of its
    config or by the config.json in `hf_assets_path`. Call it before a trainer is made of the
    config, which shortens the rotations to the sequences of the run.
    """
    model: Any = config.model_spec and config.model_spec.model
    if type(model) not in (Llama3Model.Config, Qwen3Model.Config):
        path = Path(config.hf_assets_path) / "config.json"
        said = model.config_json() if hasattr(model, "config_json") else None
        return said or (dict(json.loads(path.read_text("utf-8"))) if path.is_file() else None)
    block = model.layers[0]
    attention, rope, moe = block.attention, block.attention.rope, getattr(block, "moe", None)
    family = "Llama" if isinstance(model, Llama3Model.Config) else "Qwen3Moe" if moe else "Qwen3"
    values = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": {"Llama": "llama", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe"}[family],
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": rope.dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm.eps,
        "max_position_embeddings": rope.max_seq_len,
        "rope_theta": rope.theta,
        "tie_word_embeddings": model.enable_weight_tying,
    }
    if rope.scaling == "llama":
        names = "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        scaling = {"rope_type": "llama3", "factor": rope.scaling_factor}
        values["rope_scaling"] = scaling | {name: getattr(rope, name) for name in names}
    if moe is None:
        return values | {"intermediate_size": block.feed_forward.w1.out_features}
    return values | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.route_norm,
        "moe_intermediate_size": moe.routed_experts.inner_experts.hidden_dim,
    }


def write_beside_weights(
    said: dict[str, Any] | None, tokenizer: Path, dtype: torch.dtype, folder: Path
) -> None:
    """Write config.json, with what `described` returned, and copy the tokenizer of a folder."""
    ids: dict[str, Any] = {}
    if (tokenizer / "tokenizer.json").is_file():
        for pattern in _TOKENIZER_FILES:
            for file in tokenizer.glob(pattern):
                shutil.copy(file, folder)
        read = HuggingFaceTokenizer(tokenizer_path=str(tokenizer))
        ids = {"bos_token_id": read.bos_id, "eos_token_id": read.eos_id}
    if missing := ["tokenizer.json"] * (not ids) + ["config.json"] * (said is None):
        logger.warning(f"Put {' and '.join(missing)} into {folder.parent}: none is known here")
    if said is not None:
        text = json.dumps(said | ids | {"dtype": str(dtype).removeprefix("torch.")}, indent=2)
        (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")


def export(checkpoint: Path, folder: Path, config: GraphTrainerConfig, tokenizer: Path) -> None:
    """Write the model in a checkpoint of any number of ranks to a new folder, in one process.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds another model.
    """
    if lines := damage(checkpoint):
        raise CheckpointError(f"the checkpoint {checkpoint} is damaged: {', '.join(lines[:5])}.")
    spec, dtype = config.model_spec, TORCH_DTYPE_MAP[config.checkpoint.export_dtype]
    assert spec is not None and spec.state_dict_adapter is not None
    adapter = spec.state_dict_adapter(spec.model, None)
    with torch.device("meta"):
        wanted = spec.model.build().state_dict()
    stored: dict[str, Any] = DataReader(str(checkpoint)).read_metadata().state_dict_metadata
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in wanted.items():
        if getattr(stored.get(name), "size", None) != tensor.shape:
            raise CheckpointError(
                f"the checkpoint {checkpoint} is of another model than the config: it has no "
                f"{name} of {list(tensor.shape)}. Give the --config and flags of its run."
            )
        size += tensor.numel() * dtype.itemsize
        if size > _FILE_BYTES * len(files):
            files.append([])
        files[-1].append(name)
    staging = folder / UNFINISHED
    staging.mkdir(parents=True)
    try:
        where: dict[str, str] = {}
        for number, names in enumerate(files, 1):
            state = {name: torch.empty(wanted[name].shape, dtype=dtype) for name in names}
            reader, planner = DataReader(str(checkpoint)), DataLoadPlanner()
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
            theirs = {name: value.contiguous() for name, value in adapter.to_hf(state).items()}
            for name in names:  # by which torchtitan chooses experts; Qwen 3 has no such weight
                if "expert_bias" in name and state[name].any() and not adapter.to_hf({name: 0}):
                    logger.warning(f"Hugging Face's model has no {name}: logits will differ")
            file = f"model-{number:05}-of-{len(files):05}.safetensors"
            save_file(theirs, staging / file, metadata={"format": "pt"})
            where |= dict.fromkeys(theirs, file)
        index = {"metadata": {}, "weight_map": where}
        (staging / HF_INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        write_beside_weights(described(config), tokenizer, dtype, staging)
        publish(staging, {})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
