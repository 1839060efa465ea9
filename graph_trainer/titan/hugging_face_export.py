"""A model in Hugging Face's layout: weights, config.json, tokenizer, and the digests of all."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.tools.logging import logger

from graph_trainer.errors import CheckpointError, ConfigError
from graph_trainer.titan.checkpoint_files import HF_INDEX
from graph_trainer.titan.checkpoint_reader import DataReader
from graph_trainer.titan.checkpointer import CheckedCheckpointManager
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.console import is_news
from graph_trainer.titan.data.tokenizer import TOKENIZER, ByteBPETokenizer

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")


def described(config: GraphTrainerConfig) -> dict[str, Any] | None:
    """Return what config.json is to say of a run's model, or None: from its sizes for a dense Llama
    3 or Qwen 3, else from its config's method `config_json`, else from that in `hf_assets_path`.
    Call it before a trainer shortens the config's rotations to the sequences of the run."""
    model: Any = config.model_spec and config.model_spec.model
    block: Any = next(iter(getattr(model, "layers", ())), None)
    if type(model) not in (Llama3Model.Config, Qwen3Model.Config) or block.feed_forward is None:
        path = Path(config.hf_assets_path) / "config.json"
        architecture: Any = model.config_json() if hasattr(model, "config_json") else None
        return architecture or (json.loads(path.read_text("utf-8")) if path.is_file() else None)
    attention, rope = block.attention, block.attention.rope
    name = "Llama" if isinstance(model, Llama3Model.Config) else "Qwen3"
    architecture = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": block.feed_forward.w1.out_features,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": rope.dim,
        "rms_norm_eps": model.norm.eps,
        "max_position_embeddings": rope.max_seq_len,
        "rope_theta": rope.theta,
        "tie_word_embeddings": model.enable_weight_tying,
    }
    if rope.scaling == "llama":
        names = "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        scaling = {"rope_type": "llama3", "factor": rope.scaling_factor}
        architecture["rope_scaling"] = scaling | {name: getattr(rope, name) for name in names}
    return architecture


def write_beside_weights(
    architecture: dict[str, Any] | None,
    config: GraphTrainerConfig,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Write config.json, with what `described` returned, and the tokenizer of a run."""
    ids: dict[str, Any] = {}
    learned = isinstance(config.tokenizer, ByteBPETokenizer.Config)
    tokenizer = Path(config.dump_folder, TOKENIZER) if learned else Path(config.hf_assets_path)
    if (tokenizer / "tokenizer.json").is_file():
        for file in itertools.chain(*map(tokenizer.glob, _TOKENIZER_FILES)):
            shutil.copy(file, folder)
        read = HuggingFaceTokenizer(tokenizer_path=str(tokenizer))
        ids = {"bos_token_id": read.bos_id, "eos_token_id": read.eos_id}
    if missing := ["tokenizer.json"] * (not ids) + ["config.json"] * (architecture is None):
        logger.warning(f"Put {' and '.join(missing)} into {folder.parent}: none is known here")
    if architecture is not None:
        text = json.dumps(
            architecture | ids | {"dtype": str(dtype).removeprefix("torch.")}, indent=2
        )
        (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")


def _not_exported(checkpoint: Path, wanted: Mapping[str, Any]) -> str:
    """Return a name of the checkpoint's model that is none of these, such as one of further layers,
    or ""."""
    held = DataReader(str(checkpoint)).read_metadata().state_dict_metadata
    children = {name.partition(".")[0] for name in wanted}
    # what is no tensor, a module's extra state, is held in parts
    parts = tuple(f"{n}." for n, value in wanted.items() if not isinstance(value, torch.Tensor))
    more = set(held).difference(wanted)
    of_model = (n for n in more if n.partition(".")[0] in children and not n.startswith(parts))
    return min(of_model, default="")


def export(checkpoint: Path, folder: Path, config: GraphTrainerConfig) -> None:
    """Write the model in a checkpoint of any number of ranks to a new folder, in this process.

    Raises:
        ConfigError: a model that cannot be written for Hugging Face.
        CheckpointError: the checkpoint is damaged, or of another model; or the disk is full.
    """
    spec, assets = config.model_spec, Path(config.hf_assets_path)
    if spec is None or spec.state_dict_adapter is None:
        raise ConfigError(
            f"{checkpoint}: its model has no names for Hugging Face's weights. Give its ModelSpec "
            'a state_dict_adapter, as the page "Bring your own model" says.'
        )
    with torch.device("meta"):
        wanted = spec.model.build().state_dict(keep_vars=True)
    of_assets = str(assets) if (assets / HF_INDEX).is_file() else None  # as many files as there
    logger.addFilter(is_news)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        section: Any = copy.copy(config.checkpoint)
        if not isinstance(section, CheckedCheckpointManager.Config):
            # torchtitan's, and what a user makes of it, write weights alone
            section = CheckedCheckpointManager.Config(export_dtype=section.export_dtype)
        section.enable, section.keep_latest_k, section.last_save_in_hf = True, 0, False
        adapter = spec.state_dict_adapter(spec.model, of_assets)
        none = dict.fromkeys(("dataloader", "optimizers", "lr_schedulers"))
        manager = section.build(model_parts=[], states={}, sd_adapter=adapter, **none)
        manager.beside_weights = partial(write_beside_weights, described(config), config)
        manager.remedy_for_folder = "name another one with --to"
        manager.initial_load_path = str(checkpoint)  # the only one that could be read
        manager.remedy = (
            "It is of another model than --config names: give --module and --config of its run."
        )
        tensors = {k: v for k, v in wanted.items() if isinstance(v, torch.Tensor)}
        state = dict(wanted)  # what is no tensor is refused by name, unless to_hf drops it
        for name, value in tensors.items():
            dtype = manager.export_dtype if value.is_floating_point() else value.dtype
            state[name] = torch.empty(value.shape, dtype=dtype)
        manager.dcp_load(state, str(checkpoint), from_hf=False, from_quantized=False)
        if more := _not_exported(checkpoint, wanted):
            raise CheckpointError(f"the checkpoint {checkpoint} has {more} too. {manager.remedy}")
        firsts: dict[int, str] = {}
        for name, value in tensors.items():
            first = firsts.setdefault(id(value), name)
            if first != name and torch.equal(state[first], state[name]):  # a run may have untied it
                state[name] = state[first]
        for name, value in state.items():  # torchtitan chooses experts by it; Qwen 3 has none
            if "expert_bias" in name and value.any() and not adapter.to_hf({name: value}):
                logger.warning(f"Hugging Face's model has no {name}: its logits will differ")
        manager.dcp_save(state, str(folder), AsyncMode.DISABLED, to_hf=True)
    finally:
        dist.destroy_process_group()
        logger.removeFilter(is_news)
