"""A causal language model of the library transformers, as torchtitan's trainer takes one."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from graph_trainer.core.shipped_configs import config_folders
from graph_trainer.errors import ConfigError
from graph_trainer.transformers.weights import (
    check_weights,
    has_weights,
    local_and_part,
    read_weights,
)

_PREFIX = "causal_lm."  # what the wrapper puts before the names of transformers
_EXPERTS = "graph_trainer"  # of transformers' ways to compute experts, ours


def read_config(path: str) -> Any:
    """Read the config that `[model] path` names, or raise a ConfigError, without the key."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"the library transformers cannot be imported ({error}). Install it: "
            "pip install 'graph_trainer[transformers]'"
        ) from error
    remedy = 'Name a folder with a config.json, "debugmodel", or a config that transformers has'
    folder = folder_of(path)
    if not path:
        raise ConfigError(f"it names no model. {remedy}")
    if folder is None and path.startswith((".", "/", "~")):
        home = "; ~ is not read as your home" if path.startswith("~") else ""
        raise ConfigError(f"there is no such folder{home}. {remedy}")
    if folder is not None and not (folder / "config.json").is_file():
        raise ConfigError(f"the folder {folder} has no config.json. {remedy}")
    try:
        if folder is None and path in transformers.CONFIG_MAPPING:
            config = transformers.CONFIG_MAPPING[path]()
        else:
            place = str(folder or path)  # code that comes with a config is never run
            config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # whatever the library says about what it cannot read
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers finds no config there ({reason}). {remedy}") from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"a {config.model_type} model is no AutoModelForCausalLM. {remedy}")
    return config


def folder_of(path: str) -> Path | None:
    """Return the local folder that `[model] path` names, None where it is another name."""
    shipped = [folder / path for folder in config_folders("transformers")]
    return next((folder for folder in (Path(path), *shipped) if folder.is_dir()), None)


def _experts(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute experts by torch's grouped product, which takes bfloat16 alone on fake tensors.

    Where it compiles, transformers has a kernel of its own for other dtypes.
    """
    from transformers.integrations import moe

    with patch.object(moe, "is_torchdynamo_compiling", lambda: True):
        result: torch.Tensor = moe.grouped_mm_experts_forward(module, *args, **kwargs)
    return result


def _attention_width(config: Any) -> int:
    """Return the number of heads times their size, 0 without attention."""
    heads = getattr(config, "num_attention_heads", None) or 0
    size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return int(heads * size)


class TransformersModel(BaseModel):
    """Wrap an `AutoModelForCausalLM`: token ids in, logits out.

    As in torchtitan's decoders with scaled dot product attention, positions start anew with each
    document of a row, and tokens see the documents before theirs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        path: str = ""
        """As in `[model] path`."""

        hf: Any = None
        """The config of transformers, once it has been read."""

        def read(self) -> Any:
            """Return the config of transformers, or raise a ConfigError."""
            self.hf = self.hf or read_config(self.path)
            return self.hf

        def check(self) -> None:
            """Refuse what cannot be made a model, or weights of another one. Names no key."""
            self.read()
            try:
                with torch.device("meta"):
                    model = TransformersModel(self)
            except ConfigError:
                raise
            except Exception as error:  # whatever the library says about a config
                reason = " ".join(str(error).split())
                raise ConfigError(
                    f"transformers cannot make its model ({reason}). Change config.json, or name "
                    "another model"
                ) from error
            check_weights(folder_of(self.path), model.causal_lm)

        @property
        def vocab_size(self) -> int | None:
            return getattr(self.hf and self.hf.get_text_config(), "vocab_size", None)

        @property
        def max_seq_len(self) -> int | None:
            return getattr(self.hf and self.hf.get_text_config(), "max_position_embeddings", None)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            self.read()

        def config_json(self) -> dict[str, Any]:
            """Return what the config.json of an export says beside the dtype."""
            from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

            named = [MODEL_FOR_CAUSAL_LM_MAPPING[type(self.read())].__name__]
            return {**json.loads(self.hf.to_json_string()), "architectures": named}

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Count parameters, and by torchtitan's formula operations for each token."""
            assert isinstance(model, TransformersModel)
            text, lm = self.read().get_text_config(), model.causal_lm
            total, embedding = lm.num_parameters(), lm.get_input_embeddings().weight
            tied = lm.get_output_embeddings().weight is embedding
            # gemma 4's layers have configs of their own
            layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
            attention = seq_len * sum(2 * _attention_width(layer) for layer in layers)
            return total, 6 * (total - (0 if tied else embedding.numel()) + attention)

    def __init__(self, config: Config) -> None:
        super().__init__()
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
        from transformers.integrations.moe import ExpertsInterface

        ExpertsInterface.register(_EXPERTS, _experts)
        hf = copy.deepcopy(config.read())  # from_config writes to it
        hf.use_cache, hf.return_dict = False, True
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)]
        capped = getattr(hf.get_text_config(), "attn_logit_softcapping", None)
        kernel = "sdpa" if cls._supports_sdpa and capped is None else "eager"
        of = {"dtype": torch.get_default_dtype(), "attn_implementation": kernel}
        of["experts_implementation"] = _EXPERTS
        self.path, self.causal_lm = config.path, AutoModelForCausalLM.from_config(hf, **of)
        if not all(getattr(module, "is_causal", True) for module in self.causal_lm.modules()):
            raise ConfigError(
                f"with this config {cls.__name__} sees the tokens that it is to predict. Set "
                "is_decoder in config.json, or name another model"
            )
        self.takes_positions = "position_ids" in signature(cls.forward).parameters

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer blocks, which torchtitan's activation checkpointing wraps in eager."""
        blocks = self.causal_lm.config.get_text_config().num_hidden_layers
        lists = [m for m in self.causal_lm.modules() if isinstance(m, nn.ModuleList)]
        return next(blocks_of for blocks_of in lists if len(blocks_of) == blocks)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """Compute logits [batch, sequence, vocabulary] of token ids [batch, sequence]."""
        from transformers import masking_utils

        more = {"position_ids": positions} if self.takes_positions else {}
        # It reads the positions' values and drops the mask where they allow it: another kernel for
        # another batch, and a question that a fake tensor cannot answer.
        with patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: None):
            return self.causal_lm(input_ids=tokens, **more).logits

    def verify_module_protocol(self) -> None:
        """Accept the modules of transformers, which are not torchtitan's."""

    def parallelize(self, parallel_dims: Any) -> None:
        """Refuse: torchtitan's sharding of its modules does not know those of transformers."""
        raise ConfigError("models of transformers are sharded by data parallelism alone")

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Read the weights that the folder has, else initialize as transformers does."""
        lm, folder = self.causal_lm, folder_of(self.path)
        lm.tie_weights()  # again: to_empty unties what is not sharded
        if folder is not None and has_weights(folder):
            state = lm.state_dict(keep_vars=True)
            read = {id(tensor) for tensor in state.values()}
            for module in lm.modules():
                # transformers' own mark of modules that it does not initialize: all but those with
                # what no file has, tables of rotary positions
                module._is_hf_initialized = all(id(b) in read for b in module.buffers(False))
            lm.init_weights()
            read_weights(folder, lm, state)
            return
        try:
            lm.init_weights()
        except RuntimeError as error:  # rwkv's computes with parameters, which are shards
            reason = " ".join(str(error).split())
            raise ConfigError(
                f'model.path = "{self.path}": transformers cannot draw the random weights of '
                f"{type(lm).__name__} in shards ({reason}). Save the model with save_pretrained, "
                "and name its folder"
            ) from error
        for module in lm.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                # of a sharded weight, transformers has zeroed a copy of this row
                rows = torch.arange(module.num_embeddings, device=module.weight.device)
                is_padding = rows[:, None] == module.padding_idx
                local, padding = local_and_part(module.weight, is_padding)
                local.masked_fill_(padding, 0)


class TransformersStateDictAdapter(StateDictAdapter):
    """Convert between checkpoints and the folders that `save_pretrained` writes.

    The names of `to_hf` are those of the model in transformers, where a file may have others and
    merged or split weights. The checkpointer converts whole weights, when it has joined the ranks'
    parts.
    """

    def __init__(self, model_config: TransformersModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, None)  # one file, whatever files the folder has
        self.hf_assets_path = hf_assets_path
        with torch.device("meta"):
            self._lm = model_config.build().causal_lm
        self._tied: dict[str, str] = self._lm.all_tied_weights_keys

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the weights by the model's names in transformers, tied ones once."""
        theirs = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        return {name: value for name, value in theirs.items() if name not in self._tied}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the weights by the names of the model, tied ones by each of their names."""
        tied = {name: hf_state_dict[source] for name, source in self._tied.items()}
        return {_PREFIX + name: value for name, value in (tied | hf_state_dict).items()}

    def whole_to_hf(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert whole weights of a block, by the names of `to_hf`, as `save_pretrained` does."""
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._lm, weights))

    def read_hf(self, folder: Path, state_dict: dict[str, Any]) -> None:
        """Copy the weights of a folder to this rank's parts, as `[model] path` reads them."""
        check_weights(folder, self._lm)
        ours = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        read_weights(folder, self._lm, ours)
