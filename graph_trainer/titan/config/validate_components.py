"""Check the components that a config names: optimizer, datasets, tokenizer."""

import os
import re
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import text_datasets

from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.messages import Origin, bad_value, did_you_mean, join_or, show
from graph_trainer.titan.config.run_config import GraphTrainerConfig
from graph_trainer.titan.data.corpus import open_corpus
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer

# torchtitan looks names up in a private function, when it builds the optimizer.
_OPTIMIZERS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "DistMuon": None}


def check_optimizer(groups: list[Any], where: Origin) -> None:
    """Refuse parameter groups that torchtitan could not make an optimizer of.

    Raises:
        ConfigError: no group, an unknown optimizer, a pattern that is no regular expression,
            or arguments that the optimizer does not take.
    """
    if not groups:
        raise bad_value(
            where,
            "optimizer.param_groups",
            groups,
            "no parameter would be trained",
            'Add a [[optimizer.param_groups]] with pattern = ".*", or leave the key out.',
        )
    for i, group in enumerate(groups):
        key = f"optimizer.param_groups[{i}]"
        if group.optimizer_name not in _OPTIMIZERS:
            raise bad_value(
                where,
                f"{key}.optimizer_name",
                group.optimizer_name,
                "not an optimizer of torchtitan's",
                f"{did_you_mean(group.optimizer_name, _OPTIMIZERS)}"
                f"Write {join_or(show(name) for name in _OPTIMIZERS)}.",
            )
        try:
            re.compile(group.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise bad_value(
                where,
                f"{key}.pattern",
                group.pattern,
                f"not a regular expression ({error})",
                'Write one that finds the names of the group\'s parameters, such as ".*".',
            ) from error
        _check_arguments(group, key, where)


def _check_arguments(group: Any, key: str, where: Origin) -> None:
    optimizer = _OPTIMIZERS[group.optimizer_name]
    if optimizer is None:  # DistMuon reads the shapes of real parameters
        return
    try:
        optimizer([torch.nn.Parameter(torch.empty(1))], **group.optimizer_kwargs)
    except Exception as error:  # whatever torch says about an argument
        raise ConfigError(
            f"{where.of('optimizer.param_groups')}: {key}.optimizer_kwargs = "
            f"{show(group.optimizer_kwargs)}: {group.optimizer_name} does not take them: {error}. "
            f"Write what torch.optim.{group.optimizer_name} takes, such as {{ lr = 1e-3 }}."
        ) from error


def check_data(config: GraphTrainerConfig, where: Origin) -> None:
    """Refuse datasets and tokenizers that are not there.

    Raises:
        ConfigError: with the section, the key, the value and a remedy.
    """
    for section in ("dataloader", "tokenizer"):
        _check_dataset(getattr(config, section), section, where)
    if config.validator.enable:
        _check_dataset(config.validator.dataloader, "validator.dataloader", where)
    if isinstance(config.tokenizer, HuggingFaceTokenizer.Config) and not os.path.isdir(
        config.hf_assets_path
    ):
        raise bad_value(
            where,
            "hf_assets_path",
            config.hf_assets_path,
            'there is no such folder, and tokenizer.type = "huggingface" reads the tokenizer there',
            'Name the folder that holds tokenizer.json, or set tokenizer.type = "byte_bpe".',
        )


def _check_dataset(component: Any, section: str, where: Origin) -> None:
    if isinstance(component, TextDataLoader.Config | ByteBPETokenizer.Config):
        try:
            open_corpus(component.dataset, component.dataset_path)
        except ConfigError as e:
            place = where.of(f"{section}.dataset", f"{section}.dataset_path")
            raise ConfigError(f"{place}: {section}: {e}") from e
    elif isinstance(component, text_datasets.HuggingFaceTextDataLoader.Config):
        known = text_datasets.DATASETS
        if component.dataset.lower() not in known:
            raise bad_value(
                where,
                f"{section}.dataset",
                component.dataset,
                "not a dataset of torchtitan's",
                f"{did_you_mean(component.dataset, known)}Write {' or '.join(known)}, or set "
                f'{section}.type = "text" for the embedded text or files of your own.',
            )
    elif is_dataclass(component):  # several sources in one loader
        for field in fields(component):
            value = getattr(component, field.name)
            for i, source in enumerate(value if isinstance(value, list) else []):
                if is_dataclass(source):
                    _check_dataset(source, f"{section}.{field.name}[{i}]", where)
