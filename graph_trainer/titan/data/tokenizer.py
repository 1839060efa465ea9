"""A byte-level BPE tokenizer that the library trains once on a corpus, and the corpus's tokens."""

import hashlib
import heapq
import itertools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import tokenizers
from datasets import List, Value
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torchtitan.components.tokenizer import BaseTokenizer

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.corpus import Corpus, open_corpus

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""Part of the cache's keys: raise it when the same corpus gives another tokenizer or tokens."""

SAMPLE_CHARACTERS = 4_000_000
"""Training reads about this much of the training split: a second's work."""


TOKENIZER = "tokenizer"
"""The folder of a run's dump folder with its tokenizer, which `AutoTokenizer` reads."""

_BOS, _EOS = "<|begin_of_text|>", "<|end_of_text|>"  # in files for Hugging Face


class ByteBPETokenizer(BaseTokenizer):
    """Text to token ids and back, exactly, for any Unicode text.

    Ids below ``bos_id`` are byte sequences. The two last ids, ``bos_id`` and ``eos_id``, are no
    text: nothing that a document contains can encode to them.

    Raises:
        ConfigError: a vocabulary too small for every byte, a dataset that cannot be read, a cache
            folder that cannot be written.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        vocab_size: int = 2048
        """Most token ids there may be, the two special ones included; at least 258. The model's
        vocabulary must be as large or larger."""

        dataset: str | None = None
        """Corpus to learn from: "stdlib", or "text" for files of your own at dataset_path. Unset:
        the training data, where that is text; else "stdlib"."""

        dataset_path: str | None = None
        """Your own text: a .txt or .jsonl file, or a folder of them."""

    eos_id: int
    bos_id: int

    def __init__(self, config: Config, *, tokenizer_path: str | None = None):
        super().__init__()
        if config.vocab_size < 258:
            raise ConfigError(
                f"tokenizer vocab_size = {config.vocab_size} is too small: 256 bytes and two "
                "special tokens need at least 258."
            )
        corpus = open_corpus(config.dataset, config.dataset_path)
        key = tokenizers.__version__, config.vocab_size, corpus.identity()
        train = partial(_train, corpus, config.vocab_size - 2)
        table = load_or_build("tokenizers", key, {"json": Value("string")}, train)
        # The library's tokenizer, which knows no special tokens.
        self.tokenizer = Tokenizer.from_str(table["json"][0].as_py())
        self.bos_id = self.tokenizer.get_vocab_size()
        self.eos_id = self.bos_id + 1

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Encode ``text``, on request between ``bos_id`` and ``eos_id``."""
        return [self.bos_id] * add_bos + self.tokenizer.encode(text).ids + [self.eos_id] * add_eos

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids; ``bos_id`` and ``eos_id`` give no text, a part of a character U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        ids = list(map(int, ids))
        for value in ids:
            if not 0 <= value <= self.eos_id:
                raise ValueError(f"token id {value} is not in 0..{self.eos_id}")
        return self.tokenizer.decode([i for i in ids if i < self.bos_id], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the files of which `AutoTokenizer` makes this tokenizer, with bos before a text.
        Where a text has the names of the two special tokens, they are those tokens there."""
        inner = Tokenizer.from_str(self.tokenizer.to_str())
        inner.add_special_tokens([_BOS, _EOS])
        inner.post_processor = processors.TemplateProcessing(
            single=f"{_BOS} $A", special_tokens=[(_BOS, self.bos_id)]
        )
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        folder.mkdir(parents=True, exist_ok=True)
        inner.save(str(folder / "tokenizer.json"))
        settings = json.dumps(kind | {"bos_token": _BOS, "eos_token": _EOS}, indent=2)
        (folder / "tokenizer_config.json").write_text(settings)

    def get_vocab_size(self) -> int:
        """Return the number of token ids: fewer than configured if the corpus is small."""
        return self.eos_id + 1


def _train(corpus: Corpus, vocab_size: int) -> Iterator[dict[str, str]]:
    """Train a tokenizer without special tokens, which would match in documents; yield its JSON."""
    logger.info("training a tokenizer of %d tokens on dataset %r", vocab_size, corpus.name)
    tokenizer = Tokenizer(models.BPE())
    # Without a prefix space: decode would keep it, and the text would change.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_sample(corpus), trainer)
    yield {"json": tokenizer.to_str()}


def _sample(corpus: Corpus) -> list[str]:
    """Choose training documents of about SAMPLE_CHARACTERS in all: those of the smallest hashes."""
    heap: list[tuple[int, str]] = []  # the largest hash, negated, on top; no more is in memory
    size = 0
    for text, validates in corpus.documents():
        if not validates:
            text = text[:SAMPLE_CHARACTERS]
            digest = hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
            heapq.heappush(heap, (-int.from_bytes(digest, "big"), text))
            size += len(text)
            while size - len(heap[0][1]) >= SAMPLE_CHARACTERS:
                size -= len(heapq.heappop(heap)[1])
    return [text for _, text in sorted(heap, reverse=True)]


def tokenize(corpus: Corpus, tokenizer: BaseTokenizer) -> pa.Table:
    """Encode a corpus with a tokenizer, each document between its bos and eos.

    The first caller on a machine tokenises; later callers map the cached table. Nothing is cached
    for a tokenizer without a ``tokenizers.Tokenizer`` inside, since two of those cannot be told
    apart: every caller tokenises.

    Returns:
        A row for each document, in the corpus's order: "tokens", a list of uint16 or uint32, and
        "validation", whether the document is in that split.

    Raises:
        ConfigError: a file of the corpus cannot be used (see ``Corpus.documents``), or the cache
            folder cannot be written.
    """

    def rows() -> Iterator[dict[str, Any]]:
        logger.info("tokenising dataset %r", corpus.name)
        documents = corpus.documents()
        while batch := list(itertools.islice(documents, 64)):
            texts = [text for text, _ in batch]
            if isinstance(tokenizer, ByteBPETokenizer):  # on all cores
                encodings = tokenizer.tokenizer.encode_batch_fast(texts)
                tokens = [[tokenizer.bos_id, *e.ids, tokenizer.eos_id] for e in encodings]
            else:
                tokens = [tokenizer.encode(text, add_bos=True, add_eos=True) for text in texts]
            for ids, (_, validates) in zip(tokens, batch, strict=True):
                yield {"tokens": ids, "validation": validates}

    dtype = "uint16" if tokenizer.get_vocab_size() <= 1 << 16 else "uint32"
    columns = {"tokens": List(Value(dtype)), "validation": Value("bool")}
    name, inner = type(tokenizer).__qualname__, getattr(tokenizer, "tokenizer", None)
    if isinstance(inner, Tokenizer):
        # The tokens around a document are not in the inner tokenizer's file.
        frame = tokenizer.encode("a", add_bos=True, add_eos=True)
        key = name, frame, inner.to_str(), corpus.identity()
        return load_or_build("tokens", key, columns, rows)
    logger.warning("tokens of %s are not cached: it has no fingerprint", name)
    with tempfile.TemporaryDirectory() as private:  # the mapping outlives the file's name
        return load_or_build("tokens", name, columns, rows, private)


def load_or_build(
    name: str,
    key: Any,
    columns: dict[str, Any],
    rows: Callable[[], Iterator[dict[str, Any]]],
    folder: str | None = None,
) -> pa.Table:
    """Map a table from the cache of Hugging Face `datasets`, which builds it if it is not there.

    Several processes may ask for the same table at once: `datasets` lets one build, and the others
    wait. A table appears in the cache by one rename, complete.

    Args:
        name: what the table holds, for its folder and for errors.
        key: what the table's content depends on, for the fingerprint of `datasets`.
        columns: column name -> ``datasets`` feature.
        rows: generates the rows.
        folder: where to keep it; None for ``$GRAPH_TRAINER_CACHE``, else where `datasets` caches.
    """
    folder = folder or os.environ.get("GRAPH_TRAINER_CACHE") or datasets.config.HF_DATASETS_CACHE
    path = Path(folder).expanduser()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # a line for each change, where no line is replaced
    try:
        dataset = datasets.Dataset.from_generator(
            rows,
            features=datasets.Features(columns),
            cache_dir=str(path),
            fingerprint=Hasher.hash((FORMAT_VERSION, key)),
            split=datasets.NamedSplit(name),
            dataset_name=name,
            writer_batch_size=100,  # documents in memory
        )
        return dataset.with_format("arrow")[:]
    except Exception as error:  # damaged files raise anything
        cause = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            cause = error.__cause__ or error
            if not isinstance(cause, OSError):  # raised by the rows
                raise cause from cause.__cause__
        raise ConfigError(
            f"cannot keep the {name} of a dataset in the cache folder {path}: "
            f"{type(cause).__name__}: {cause}. Make the folder writable, free some space, remove "
            f"{path / name} if a file in it is damaged, or name another folder with "
            "GRAPH_TRAINER_CACHE=<folder>."
        ) from cause
