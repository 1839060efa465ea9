"""A byte-level BPE tokenizer, trained once on a corpus and cached."""

import hashlib
import heapq
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.tokenizer import BaseTokenizer

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.cache import load_or_build
from graph_trainer.titan.data.corpus import Corpus, open_corpus

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of the cache key: raise it when the same corpus gives another tokenizer."""

SAMPLE_CHARACTERS = 4_000_000
"""Training reads about this much of the training split: a second's work."""

MIN_VOCAB_SIZE = 256 + 2
"""Every byte, the beginning and the end of a document."""


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

        dataset: str = "stdlib"
        """Corpus to learn from: "stdlib", or "text" for files of your own at dataset_path."""

        dataset_path: str | None = None
        """For dataset "text": a .txt or .jsonl file, or a folder of them."""

    eos_id: int
    bos_id: int

    def __init__(self, config: Config, *, tokenizer_path: str | None = None):
        super().__init__()
        if config.vocab_size < MIN_VOCAB_SIZE:
            raise ConfigError(
                f"tokenizer vocab_size = {config.vocab_size} is too small: 256 bytes and two "
                f"special tokens need at least {MIN_VOCAB_SIZE}."
            )
        from datasets import Value
        from datasets.fingerprint import Hasher

        corpus = open_corpus(config.dataset, config.dataset_path)
        identity = FORMAT_VERSION, tokenizers.__version__, config.vocab_size, corpus.content_hash
        table = load_or_build(
            "tokenizers",
            Hasher.hash(identity),
            {"json": Value("string")},
            lambda: iter([{"json": _train(corpus, config.vocab_size - 2)}]),
        )
        self.tokenizer = Tokenizer.from_str(table["json"][0].as_py())
        """The library's tokenizer, which knows no special tokens."""
        self.bos_id = self.tokenizer.get_vocab_size()
        self.eos_id = self.bos_id + 1

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Encode ``text``, on request between ``bos_id`` and ``eos_id``."""
        return [self.bos_id] * add_bos + self.tokenizer.encode(text).ids + [self.eos_id] * add_eos

    def encode_documents(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Encode each text between ``bos_id`` and ``eos_id``, on all cores."""
        for encoding in self.tokenizer.encode_batch_fast(texts):
            yield [self.bos_id, *encoding.ids, self.eos_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids; ``bos_id`` and ``eos_id`` give no text.

        A character of which ``ids`` contain a part of the bytes gives U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        text_ids = []
        for value in map(int, ids):
            if not 0 <= value < self.get_vocab_size():
                raise ValueError(f"token id {value} is not in 0..{self.get_vocab_size() - 1}")
            if value < self.bos_id:
                text_ids.append(value)
        return self.tokenizer.decode(text_ids, skip_special_tokens=False)

    def get_vocab_size(self) -> int:
        """Return the number of token ids: fewer than configured where the corpus is small."""
        return self.eos_id + 1


def _train(corpus: Corpus, vocab_size: int) -> str:
    """Train a tokenizer without special tokens, which would be found in documents; as JSON."""
    tokenizer = Tokenizer(models.BPE())
    # Without a prefix space: decode would keep it, and the text would change.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sample = _sample(corpus)
    logger.info("training a tokenizer of %d tokens on dataset %r", vocab_size, corpus.name)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer.to_str()


def _sample(corpus: Corpus) -> list[str]:
    """Choose training documents of about SAMPLE_CHARACTERS in all: the smallest hashes."""
    heap: list[tuple[int, str]] = []  # the largest hash, negated, on top
    size = 0
    for text in corpus.documents("train"):
        text = text[:SAMPLE_CHARACTERS]
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
        heapq.heappush(heap, (-int.from_bytes(digest, "big"), text))
        size += len(text)
        while size - len(heap[0][1]) >= SAMPLE_CHARACTERS:
            size -= len(heapq.heappop(heap)[1])
    return [text for _, text in sorted(heap, reverse=True)]
