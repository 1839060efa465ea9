"""Checks of the texts of a run: that they are there, with a document for each data rank."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import text_datasets

from graph_trainer.core.suggest import did_you_mean
from graph_trainer.errors import ConfigError
from graph_trainer.titan.config.remedies import GUESS
from graph_trainer.titan.config.run_config import GraphTrainerConfig, with_text_of_training
from graph_trainer.titan.config.sources import Problem, unreadable
from graph_trainer.titan.data.corpus import open_corpus
from graph_trainer.titan.data.loader import TextDataLoader
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer


def text_problems(config: GraphTrainerConfig, world_size: int | None) -> Iterator[Problem]:
    """Check the texts of training, tokenizer and validation, and the folder of a tokenizer."""
    resolved, parallelism = with_text_of_training(config), config.parallelism
    same_data = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    data_ranks = (world_size or 0) // same_data
    training, validating = config.dataloader, resolved.validator.dataloader
    yield from _dataset_problems(training, "dataloader", data_ranks)
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
            yield from _dataset_problems(validating, "validator.dataloader", data_ranks)
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


def _dataset_problems(component: Any, section: str, data_ranks: int = 0) -> Iterator[Problem]:
    """Check that a data loader's or a tokenizer's text is there; 0 ranks are an unknown number."""
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
        elif data_ranks:
            yield from _document_problems(component, section, data_ranks)
    elif is_dataclass(component):  # several sources in one loader
        for field in fields(component):
            sources = getattr(component, field.name)
            for i, source in enumerate(sources if isinstance(sources, list) else []):
                yield from _dataset_problems(source, f"{section}.{field.name}[{i}]", data_ranks)


def _document_problems(
    component: text_datasets.HuggingFaceTextDataLoader.Config, section: str, data_ranks: int
) -> Iterator[Problem]:
    """Check that a dataset of torchtitan's on this machine has a document for each data rank.

    Its loader gives each rank documents of its own, and one without any would wait forever. A
    dataset of the hub is not looked at.
    """
    dataset = text_datasets.DATASETS[component.dataset.lower()]
    path = component.dataset_path or dataset.path
    if not os.path.exists(path):
        return
    key, others = f"{section}.dataset_path", (f"{section}.dataset",)
    try:
        documents = sum(1 for _ in itertools.islice(dataset.loader(path), data_ranks))
    except Exception as error:  # files of the wrong kind raise anything
        yield Problem(key, f"it cannot be read: {error}", "Name another path.", others, path)
        return
    if documents < data_ranks:
        yield Problem(
            key,
            f"it has {documents} documents for {data_ranks} data-parallel ranks, and each rank "
            "reads documents of its own",
            f'Add documents, start fewer ranks, or set {section}.type = "text", which cuts '
            "documents into rows.",
            others,
            path,
        )
