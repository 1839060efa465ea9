"""The weights of a model of transformers: read from a folder, and named for an export.

Files have the names and shapes of the hub. Those of the model may be others: since version 5,
transformers renames weights and merges those of experts while it loads, and reverts it while it
saves. The rules are its own, from `conversion_mapping` and `core_model_loading`; here one
conversion at a time is in memory, and a rank keeps its part.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from graph_trainer.core.sharding.simple_fsdp import shard_of
from graph_trainer.errors import ConfigError

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def has_weights(folder: Path) -> bool:
    """Return whether training begins with weights of a folder."""
    return (folder / _WHOLE).is_file() or (folder / _INDEX).is_file()


def check_weights(folder: Path | None, lm: Any) -> None:
    """Refuse a folder whose weights are not all of a model's; reads no weight.

    Raises:
        ConfigError: they are pickles, quantized, unreadable, or some are missing or of another
            shape.
    """
    if folder is None:
        return
    if not has_weights(folder):
        if any(folder.glob("*.bin")):
            raise ConfigError(
                "the weights are pickles (*.bin), which are not read. Load the folder with "
                "from_pretrained and save it again with save_pretrained"
            )
        if others := sorted(file.name for file in folder.glob("*.safetensors")):
            raise ConfigError(
                f"it has {others[0]}, but neither {_WHOLE} nor {_INDEX}, which name the weights of "
                "a whole model. Copy what is missing; or load the folder with transformers, with "
                "its adapter if that is one, and save it again with save_pretrained"
            )
        return
    if getattr(lm.config, "quantization_config", None) is not None:
        raise ConfigError(
            "its weights are quantized, and training needs them as they were before. Load the "
            "folder with from_pretrained and dequantize=True of its quantization config, and save "
            "it again with save_pretrained"
        )
    state = lm.state_dict(keep_vars=True)
    try:
        with _files(folder) as files:
            shapes = dict(_converted(lm, files, lambda name: _shape_of(files[name], name)))
    except Exception as error:  # safetensors has one class of its own for all
        reason = " ".join(str(error).split())
        raise ConfigError(f"its safetensors cannot be read ({reason}). Copy them again") from error
    fitting = {id(state[name]) for name, read in shapes.items() if read.shape == state[name].shape}
    if missing := [name for name, tensor in state.items() if id(tensor) not in fitting]:
        raise ConfigError(
            f"the safetensors lack {len(missing)} of the model's weights, or have another shape: "
            f"{missing[0]} is to be {list(state[missing[0]].shape)}. Save the model, loaded by "
            "from_pretrained, with save_pretrained, or remove the safetensors"
        )


def read_weights(folder: Path, lm: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of a folder that `check_weights` accepted to this rank's part of each.

    Args:
        folder: has the safetensors.
        lm: the model, for its names, shapes and rules; may be on meta.
        state: the tensors to fill, by the model's names.
    """
    with _files(folder) as files:
        for name, weight in _converted(lm, files, lambda name: files[name].get_tensor(name)):
            if weight.shape == state[name].shape:
                local, part = local_and_part(state[name], weight)
                local.copy_(part)


def local_and_part(
    parameter: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a parameter, and of a whole tensor with as many rows."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach(), shard_of(weight, parameter)
    return parameter.detach(), weight


@contextlib.contextmanager
def _files(folder: Path) -> Iterator[dict[str, Any]]:
    """Open the safetensors that `from_pretrained` reads: the name of each weight, and its file."""
    from safetensors import safe_open

    names = [_WHOLE]
    if not (folder / _WHOLE).is_file():
        index = json.loads((folder / _INDEX).read_text("utf-8"))
        names = sorted(set(index["weight_map"].values()))
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(safe_open(folder / n, framework="pt")) for n in names]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _shape_of(file: Any, name: str) -> torch.Tensor:
    """Return a tensor on meta for one of a file."""
    return torch.empty(file.get_slice(name).get_shape(), device="meta")


def _converted(
    lm: Any, names: Any, read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of files by the model's names, converted as `from_pretrained` converts.

    Weights that the model does not have are left out. `read` returns one of a file, on meta where
    only shapes are wanted. Follows transformers' `convert_and_load_state_dict_in_model`, which
    reads all weights before it converts the first.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules, state, base = get_model_conversion_mapping(lm), lm.state_dict(), lm.base_model_prefix
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    conversions: dict[str, Any] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, base, state)
        if target not in state:  # it may be the model's name already, but for the prefix
            target, pattern = rename_source_key(name, [], [], base, state)
        if target not in state:
            continue
        if target not in conversions:
            rule = copy.deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(name, target)
            conversions[target] = rule
        conversions[target].add_tensor(target, name, pattern or name, partial(read, name))
    for target in list(conversions):
        results = conversions.pop(target).convert(target, model=lm, config=lm.config)
        for name, value in results.items():
            yield name, value[0] if isinstance(value, list) else value
