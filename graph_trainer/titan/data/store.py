"""A corpus as token ids: tokenised once, kept on disk, mapped into memory by every rank."""

import array
import hashlib
import logging
import mmap
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from torchtitan.components.tokenizer import BaseTokenizer

from graph_trainer.titan.data.cache import SLOW_SECONDS, CorruptCacheError, cache_dir, load_or_build
from graph_trainer.titan.data.corpus import Corpus
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of the cache key: raise it when the file's layout or its tokens change."""

# magic, bytes per token, documents, tokens, digest of tokens, lengths and splits
_HEADER = struct.Struct("<8sQQQ32s")
_MAGIC = b"gt-toks\x01"

_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class TokenStore:
    """Every document of a corpus as token ids, first to last."""

    tokens: npt.NDArray[np.unsignedinteger]
    """[tokens] uint16 or uint32: all documents end to end, mapped from disk, read-only."""

    offsets: npt.NDArray[np.int64]
    """[documents + 1] int64: document i is tokens[offsets[i] : offsets[i + 1]]."""

    validation: npt.NDArray[np.bool_]
    """[documents] bool: is the document in the validation split?"""

    digest: str
    """64 hexadecimal digits of the content: equal digests give equal training data."""


def open_token_store(corpus: Corpus, tokenizer: BaseTokenizer) -> TokenStore:
    """The corpus in ids of the tokenizer, each document between its bos and eos.

    The first caller on a machine tokenises; everyone after that maps the
    cached file. With a tokenizer that cannot be told from another (neither
    ByteBPETokenizer nor one around a ``tokenizers.Tokenizer``) nothing is
    cached, and every caller tokenises.

    Raises:
        ConfigError: a file of the corpus cannot be used (see
            ``Corpus.documents``), or the cache folder cannot be written.
    """
    build = partial(_build, corpus, tokenizer)
    identity = _fingerprint(tokenizer)
    if identity is None:
        logger.warning(
            "tokens of %s are not cached: it has no fingerprint", type(tokenizer).__name__
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tokens")
            build(path)
            return _load(path)  # the mapping outlives the file's name
    key = f"v{FORMAT_VERSION}-{corpus.content_hash}-{identity}"
    return load_or_build(
        cache_dir() / "tokens" / f"{key}.bin",
        load=_load,
        build=build,
        what=f"the tokens of dataset {corpus.name!r}",
    )


def _fingerprint(tokenizer: BaseTokenizer) -> str | None:
    if isinstance(tokenizer, ByteBPETokenizer):
        return tokenizer.fingerprint
    inner = getattr(tokenizer, "tokenizer", None)  # torchtitan's HuggingFaceTokenizer
    if not isinstance(inner, tokenizers.Tokenizer):
        return None
    # What stands around a document is not in the inner tokenizer's file.
    frame = tokenizer.encode("a", add_bos=True, add_eos=True)
    identity = f"{type(tokenizer).__qualname__} {frame} {inner.to_str()}"
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _build(corpus: Corpus, tokenizer: BaseTokenizer, path: Path) -> None:
    dtype = np.dtype("<u2" if tokenizer.get_vocab_size() <= 1 << 16 else "<u4")
    offsets = array.array("q", [0])
    digest = hashlib.blake2b(digest_size=32)
    last_report = time.monotonic()
    with open(path, "wb") as out:
        out.write(bytes(_HEADER.size))
        for ids in _encode(corpus, tokenizer):
            data = np.asarray(ids, dtype=dtype).tobytes()
            digest.update(data)
            out.write(data)
            offsets.append(offsets[-1] + len(ids))
            if time.monotonic() - last_report > SLOW_SECONDS:
                last_report = time.monotonic()
                logger.info(
                    "tokenising dataset %r: %d documents, %.1f million tokens so far",
                    corpus.name,
                    len(offsets) - 1,
                    offsets[-1] / 1e6,
                )
        table = np.asarray(offsets, dtype="<i8").tobytes()
        table += np.asarray(corpus.validation, dtype=np.bool_).tobytes()
        digest.update(table)
        out.write(bytes(-out.tell() % 8))
        out.write(table)
        out.seek(0)
        header = (dtype.itemsize, len(offsets) - 1, offsets[-1], digest.digest())
        out.write(_HEADER.pack(_MAGIC, *header))


def _encode(corpus: Corpus, tokenizer: BaseTokenizer) -> Iterator[list[int]]:
    if not isinstance(tokenizer, ByteBPETokenizer):
        for text in corpus.documents():
            yield tokenizer.encode(text, add_bos=True, add_eos=True)
        return
    batch: list[str] = []
    size = 0
    for text in corpus.documents():
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield from tokenizer.encode_batch(batch, add_bos=True, add_eos=True)
            batch, size = [], 0
    yield from tokenizer.encode_batch(batch, add_bos=True, add_eos=True)


def _load(path: Path) -> TokenStore:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if size < _HEADER.size:
            raise CorruptCacheError(f"{size} bytes are less than a header")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, width, documents, count, digest = _HEADER.unpack_from(data)
    table = _HEADER.size + width * count
    table += -table % 8
    if magic != _MAGIC or width not in (2, 4):
        raise CorruptCacheError("not a token file")
    if size != table + 9 * documents + 8:
        raise CorruptCacheError(f"{size} bytes where {table + 9 * documents + 8} were announced")
    offsets = np.frombuffer(data, "<i8", documents + 1, table)
    validation = np.frombuffer(data, np.bool_, documents, table + offsets.nbytes)
    if offsets[0] != 0 or offsets[-1] != count or (np.diff(offsets) < 0).any():
        raise CorruptCacheError("its documents do not add up to its tokens")
    tokens = np.frombuffer(data, f"<u{width}", count, _HEADER.size)
    return TokenStore(tokens, offsets, validation, digest.hex())
