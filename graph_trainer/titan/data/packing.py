"""A corpus as rows of token ids: tokenised once, shuffled, packed, and shared out by number."""

from __future__ import annotations

import hashlib
import itertools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tokenizers
from torchtitan.components.tokenizer import BaseTokenizer

from graph_trainer.titan.data.cache import load_or_build
from graph_trainer.titan.data.corpus import Corpus, Split
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of the cache key: raise it when the table's columns or its tokens change."""

_BATCH = 64
"""Documents to encode at once, on all cores."""


def tokenize(corpus: Corpus, tokenizer: BaseTokenizer) -> pa.Table:
    """Encode a corpus with a tokenizer, each document between its bos and eos.

    The first caller on a machine tokenises; later callers map the cached table. Nothing is cached
    for a tokenizer without a ``tokenizers.Tokenizer`` inside, which cannot be told from another:
    every caller tokenises.

    Returns:
        A row for each document, in the corpus's order: "tokens", a list of uint16 or uint32, and
        "validation", whether the document is in that split.

    Raises:
        ConfigError: a file of the corpus cannot be used (see ``Corpus.documents``), or the cache
            folder cannot be written.
    """
    from datasets import List, Value
    from datasets.fingerprint import Hasher

    def rows() -> Iterator[dict[str, Any]]:
        encoded = _encode(corpus, tokenizer)
        for tokens, validates in zip(encoded, corpus.validation, strict=True):
            yield {"tokens": tokens, "validation": validates}

    dtype = "uint16" if tokenizer.get_vocab_size() <= 1 << 16 else "uint32"
    columns = {"tokens": List(Value(dtype)), "validation": Value("bool")}
    name, inner = type(tokenizer).__qualname__, getattr(tokenizer, "tokenizer", None)
    if isinstance(inner, tokenizers.Tokenizer):
        # The tokens around a document are not in the inner tokenizer's file.
        frame = tokenizer.encode("a", add_bos=True, add_eos=True)
        key = FORMAT_VERSION, corpus.content_hash, name, frame, inner.to_str()
        return load_or_build("tokens", Hasher.hash(key), columns, rows)
    logger.warning("tokens of %s are not cached: it has no fingerprint", name)
    with tempfile.TemporaryDirectory() as private:  # the mapping outlives the file's name
        return load_or_build("tokens", "private", columns, rows, Path(private))


def _encode(corpus: Corpus, tokenizer: BaseTokenizer) -> Iterator[list[int]]:
    documents = corpus.documents()
    while batch := list(itertools.islice(documents, _BATCH)):
        if isinstance(tokenizer, ByteBPETokenizer):
            yield from tokenizer.encode_documents(batch)
        else:
            yield from (tokenizer.encode(text, add_bos=True, add_eos=True) for text in batch)


class PackedRows:
    """The endless, fixed sequence of rows that a split, a row length and a seed give.

    Within a document, every token but the last is an input, and the token after it is its label.
    An epoch is these pairs of all documents, end to end, in an order that the seed and the epoch
    fix, cut into rows of ``seq_len``; the pairs at its end that fill no row are left out of that
    epoch. The rows are then shuffled too: long documents fill many rows, and a batch from a single
    document would move the model towards that document alone. Row ``i`` belongs to epoch
    ``i // rows_per_epoch``. Any row can be computed without those before it, so a position in
    the data is one number, and rows can be assigned to ranks in any way.

    Args:
        table: the tokenised corpus, from `tokenize`.
        split: the documents to use.
        seq_len: tokens a row, at least 1.
        seed: fixes the order of documents and of rows; not negative.
    """

    def __init__(self, table: pa.Table, split: Split, *, seq_len: int, seed: int):
        import pyarrow.compute as pc

        self._tokens = table["tokens"]
        lengths = pc.list_value_length(self._tokens).to_numpy().astype(np.int64)
        validation = table["validation"].to_numpy().astype(np.bool_)
        self._chosen = np.flatnonzero(validation == (split == "validation"))
        # A document of one token has no pair; one of none must not count -1.
        self._pairs = np.maximum(lengths[self._chosen] - 1, 0)
        self._seq_len = seq_len
        self._seed = seed
        self._epoch = -1
        self._order = self._ends = self._row_order = np.empty(0, dtype=np.int64)
        self.documents = len(self._chosen)
        """Documents an epoch."""
        self.pairs_per_epoch = int(self._pairs.sum())
        """Tokens to predict an epoch, those that fill no row included."""
        self.rows_per_epoch = self.pairs_per_epoch // seq_len
        """Whole rows an epoch."""
        # Of the tokens, where documents begin, and which of them validate.
        digest = hashlib.blake2b(digest_size=32)
        for chunk in self._tokens.chunks:
            digest.update(chunk.flatten().to_numpy())
        digest.update(np.cumsum([0, *lengths], dtype="<i8").tobytes())
        digest.update(validation.tobytes())
        self.digest = digest.hexdigest()
        """64 hexadecimal digits: equal digests give equal rows, on any machine."""

    def fill(
        self,
        row: int,
        inputs: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
    ) -> None:
        """Write row ``row`` into three arrays, each [seq_len] int64.

        Positions count from 0 at the start of the row and of each document in it, so they stay
        below seq_len.
        """
        epoch, row = divmod(row, self.rows_per_epoch)
        if epoch != self._epoch:
            self._shuffle(epoch)
        first = int(self._row_order[row]) * self._seq_len
        place = int(np.searchsorted(self._ends, first, side="right"))
        done = 0
        while done < self._seq_len:
            document = self._order[place]
            pairs = self._pairs[document]
            begin = first + done - (self._ends[place] - pairs)
            size = int(min(pairs - begin, self._seq_len - done))
            tokens = self._tokens[int(self._chosen[document])].values.to_numpy()  # no copy
            here = slice(done, done + size)
            inputs[here] = tokens[begin : begin + size]
            labels[here] = tokens[begin + 1 : begin + 1 + size]
            positions[here] = np.arange(size)
            done += size
            place += 1

    def _shuffle(self, epoch: int) -> None:
        # numpy promises the raw output of a bit generator for all versions, and does not promise
        # that of Generator.permutation: a run resumed after an upgrade must read the same order.
        bits = np.random.PCG64(np.random.SeedSequence((self._seed, epoch)))
        self._order = np.argsort(bits.random_raw(self.documents), kind="stable")
        self._ends = np.cumsum(self._pairs[self._order])
        self._row_order = np.argsort(bits.random_raw(self.rows_per_epoch), kind="stable")
        self._epoch = epoch
