"""Checks of the texts of a run: that they are there, and large enough."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.hf_datasets import text_datasets

from graph_trainer.core.suggest import GUESS, did_you_mean, show
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.run_config import GraphTrainerConfig, with_text_of_training
from graph_trainer.titan.config.sources import Problem, unreadable
from graph_trainer.titan.data.corpus import VALIDATING_PERCENT, open_corpus
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer

_ENOUGH = 128
"""Bytes of text a token, with which a split surely has the tokens: some 8 of 100 documents
validate, and a token is about four bytes."""
_READ_AT_MOST = 2**26
"""Bytes of a text in few files that is read to see what of it validates."""


def check_text_fills_a_batch(config: GraphTrainerConfig, world_size: int) -> None:
    """Refuse a text that is too small for one global batch; one that may be is tokenised here.

    Raises:
        ConfigError: as `TextDataLoader` and `ByteBPETokenizer`; a tokenizer that cannot be read.
    """
    if not isinstance(config.tokenizer, ByteBPETokenizer.Config | HuggingFaceTokenizer.Config):
        return  # of the user's own: the ranks run it
    training, ranks = config.training, _data_ranks(config, world_size)
    resolved, tokenizer = with_text_of_training(config), None
    for loader in _loaders(resolved).values():
        if not isinstance(loader, TextDataLoader.Config):
            continue
        corpus = open_corpus(loader.dataset, loader.dataset_path)
        size = sum(file.stat().st_size for file in corpus.files)
        tokens = ranks * training.local_batch_size * training.seq_len
        of_few_files = len(corpus.files) < 100 and size < _READ_AT_MOST
        if of_few_files and loader.split == "validation":
            validating = (text for text, validates in corpus.documents() if validates)
            size = int(sum(map(len, validating)) * 100 / VALIDATING_PERCENT)
        if size < _ENOUGH * tokens:
            tokenizer = tokenizer or _built(resolved.tokenizer, config.hf_assets_path)
            loader.build(
                dp_world_size=ranks,
                dp_rank=0,
                tokenizer=tokenizer,
                seq_len=training.seq_len,
                local_batch_size=training.local_batch_size,
            )


def check_every_rank_has_a_document(config: GraphTrainerConfig, world_size: int) -> None:
    """Refuse a dataset of torchtitan's on this machine with fewer documents than data ranks.

    Its loader gives each rank documents of its own, and one without any would wait forever. A
    dataset of the hub is left to the ranks.

    Raises:
        ConfigError: there are fewer documents, or the dataset cannot be read.
    """
    ranks = _data_ranks(config, world_size)
    for section, loader in _loaders(config).items():
        for source in getattr(loader, "sources", [loader]):
            if not isinstance(source, text_datasets.HuggingFaceTextDataLoader.Config):
                continue
            dataset = text_datasets.DATASETS[source.dataset.lower()]
            path = source.dataset_path or dataset.path
            if not os.path.exists(path):
                continue
            place = f"{section}: the dataset {source.dataset} in {path}"
            try:
                documents = sum(1 for _ in itertools.islice(dataset.loader(path), ranks))
            except Exception as error:  # files of the wrong kind raise anything
                raise ConfigError(f"{place} cannot be read: {error}. Name another path.") from error
            if documents < ranks:
                raise ConfigError(
                    f"{place} has {documents} documents for {ranks} data-parallel ranks, and each "
                    "rank reads documents of its own. Add documents, start fewer ranks, or set "
                    f'{section}.type = "text", which cuts documents into rows.'
                )


def _data_ranks(config: GraphTrainerConfig, world_size: int) -> int:
    parallelism = config.parallelism
    return world_size // parallelism.tensor_parallel_degree // parallelism.context_parallel_degree


def _loaders(config: GraphTrainerConfig) -> dict[str, Any]:
    """Return the configs of the data loaders that a run builds, by section."""
    loaders = {"dataloader": config.dataloader}
    if config.validator.enable:
        loaders["validator.dataloader"] = config.validator.dataloader
    return loaders


def _built(tokenizer: Any, assets: str) -> BaseTokenizer:
    try:
        built: BaseTokenizer = tokenizer.build(tokenizer_path=assets)
        return built
    except ConfigError:
        raise
    except Exception as error:  # damaged files raise anything
        raise ConfigError(
            f"hf_assets_path = {show(assets)}: the tokenizer there cannot be read: {error}. Name "
            'another folder, or set tokenizer.type = "byte_bpe".'
        ) from error


def text_problems(config: GraphTrainerConfig) -> Iterator[Problem]:
    """Check the texts of training, tokenizer and validation, and the folder of a tokenizer."""
    resolved = with_text_of_training(config)
    training, validating = config.dataloader, resolved.validator.dataloader
    yield from _dataset_problems(training, "dataloader")
    tokenizer, is_text = config.tokenizer, isinstance(training, TextDataLoader.Config)
    if resolved.tokenizer == tokenizer:  # with a text of its own
        yield from _dataset_problems(tokenizer, "tokenizer")
        takes_text = isinstance(tokenizer, ByteBPETokenizer.Config)
        if takes_text and not (tokenizer.dataset or tokenizer.dataset_path or is_text):
            yield Problem(
                "tokenizer.dataset",
                "the training data is no text that a tokenizer could be trained on",
                'Set tokenizer.type = "huggingface", or say dataset = "stdlib" or a dataset_path.',
                ("dataloader.type",),
            )
    if config.validator.enable and validating == config.validator.dataloader:
        named = getattr(validating, "dataset", "") or getattr(validating, "dataset_path", "")
        if named or not isinstance(validating, TextDataLoader.Config):
            yield from _dataset_problems(validating, "validator.dataloader")
        elif not is_text:
            yield Problem(
                "validator.dataloader.dataset",
                "the training data is no text that validation could take a part of",
                'Set validator.dataloader.type too, such as "huggingface" with dataset = '
                '"c4_validation", or dataset = "stdlib" here.',
                ("validator.enable",),
            )
    assets = config.hf_assets_path
    if isinstance(config.tokenizer, HuggingFaceTokenizer.Config) and not os.path.isdir(assets):
        yield Problem(
            "hf_assets_path",
            'there is no such folder, and tokenizer.type = "huggingface" reads the tokenizer there',
            'Name the folder that holds tokenizer.json, or set tokenizer.type = "byte_bpe".',
            ("tokenizer.type",),
        )


def _dataset_problems(component: Any, section: str) -> Iterator[Problem]:
    """Check that a data loader's or a tokenizer's text is there."""
    if isinstance(component, TextDataLoader.Config | ByteBPETokenizer.Config):
        if component.dataset in text_datasets.DATASETS:
            with_tokenizer = 'tokenizer.type = "huggingface" with the folder hf_assets_path'
            remedy = f'Set {section}.type = "huggingface", which reads it'
            remedy += f", and {with_tokenizer}." if section == "dataloader" else "."
            yield Problem(f"{section}.dataset", "a dataset of torchtitan's", remedy)
            return
        try:
            open_corpus(component.dataset, component.dataset_path)
        except ConfigError as error:
            keys = [f"{section}.dataset", f"{section}.dataset_path"]
            if component.dataset is None:
                yield unreadable(keys[1], component.dataset_path, error)
            else:
                yield unreadable(keys[0], component.dataset, error, keys[1])
    elif isinstance(component, text_datasets.HuggingFaceTextDataLoader.Config):
        known = text_datasets.DATASETS
        if component.dataset.lower() not in known:
            yield Problem(
                f"{section}.dataset",
                "not a dataset of torchtitan's",
                f"{did_you_mean(component.dataset, known, GUESS)}Write {' or '.join(known)}, or "
                f'set {section}.type = "text" for the embedded text or files of your own.',
            )
    elif is_dataclass(component):  # several sources in one loader
        for field in fields(component):
            sources = getattr(component, field.name)
            for i, source in enumerate(sources if isinstance(sources, list) else []):
                yield from _dataset_problems(source, f"{section}.{field.name}[{i}]")
