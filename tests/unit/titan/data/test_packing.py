"""Tokenised corpora: what is cached, for which tokenizer, and how documents become rows."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from graph_trainer.titan.data import packing
from graph_trainer.titan.data.corpus import open_corpus
from graph_trainer.titan.data.packing import PackedRows, tokenize
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer

TEXTS = [f"document {i} of a few words" for i in range(50)]


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A dataset of TEXTS, with an empty cache."""
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def builds(monkeypatch) -> list[int]:
    """Grows by one with every corpus that is tokenised."""
    counted: list[int] = []
    encode = packing._encode

    def count(*args):
        counted.append(1)
        return encode(*args)

    monkeypatch.setattr(packing, "_encode", count)
    return counted


def bpe(path: Path, vocab_size: int = 300) -> ByteBPETokenizer:
    return ByteBPETokenizer.Config(
        vocab_size=vocab_size, dataset="text", dataset_path=str(path)
    ).build()


def tokenized(path: Path, tokenizer: BaseTokenizer) -> pa.Table:
    return tokenize(open_corpus("text", str(path)), tokenizer)


def digest(table: pa.Table) -> str:
    return PackedRows(table, "train", seq_len=1, seed=0).digest


def test_every_document_is_between_bos_and_eos(path, monkeypatch):
    tokenizer = bpe(path)
    monkeypatch.setattr(packing, "_BATCH", 3)
    table = tokenized(path, tokenizer)
    expected = [tokenizer.encode(text, add_bos=True, add_eos=True) for text in TEXTS]
    assert table["tokens"].to_pylist() == expected
    assert table["tokens"].type.value_type == "uint16"
    flags = table["validation"].to_pylist()
    validation = [text for text, is_in in zip(TEXTS, flags, strict=True) if is_in]
    assert validation == list(open_corpus("text", str(path)).documents("validation"))


def test_tokenised_once_and_again_for_other_text_or_another_tokenizer(path, builds):
    tokenizer = bpe(path)
    first = digest(tokenized(path, tokenizer))
    assert digest(tokenized(path, tokenizer)) == first
    assert len(builds) == 1
    assert digest(tokenized(path, bpe(path, vocab_size=280))) != first
    assert len(builds) == 2
    path.write_text('{"text": "another"}\n')
    assert digest(tokenized(path, tokenizer)) != first
    assert len(builds) == 3


def test_a_digest_is_of_tokens_borders_and_split_not_of_chunks():
    def of(*chunks: list[list[int]], validation: tuple[bool, ...] = (False, False)) -> str:
        tokens = pa.chunked_array(chunks, pa.list_(pa.uint16()))
        return digest(pa.table({"tokens": tokens, "validation": validation}))

    same = of([[1, 2], [3]])
    assert same == of([[1, 2]], [[3]])
    others = [of([[1, 2], [4]]), of([[1], [2, 3]]), of([[1, 2], [3]], validation=(False, True))]
    assert len({same, *others}) == 4


def hugging_face(folder: Path, eos: str) -> HuggingFaceTokenizer:
    words = {word: i for i, word in enumerate(sorted({w for t in TEXTS for w in t.split()}))}
    words |= {"<s>": len(words), "</s>": len(words) + 1, "<end>": len(words) + 2}
    inner = Tokenizer(models.WordLevel(words))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "</s>", "<end>"])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return HuggingFaceTokenizer(tokenizer_path=str(folder))


def test_torchtitans_tokenizer_works_and_is_told_from_another(path, builds):
    one = hugging_face(path.parent / "one", "</s>")
    other = hugging_face(path.parent / "other", "<end>")
    found = tokenized(path, one)["tokens"].to_pylist()
    assert found == [one.encode(text, add_bos=True, add_eos=True) for text in TEXTS]
    assert found[0][0] == one.bos_id and found[0][-1] == one.eos_id
    assert tokenized(path, other)["tokens"][0].as_py()[-1] == other.eos_id != one.eos_id
    tokenized(path, one)
    assert len(builds) == 2


class Wide(BaseTokenizer):
    """Ids beyond 16 bits, and nothing that tells it from another tokenizer."""

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [65_536 + ord(character) for character in text]

    def decode(self, ids) -> str:
        return "".join(chr(value - 65_536) for value in ids)

    def get_vocab_size(self) -> int:
        return 1 << 20


def test_an_unknown_tokenizer_with_wide_ids_works_uncached(path, builds, caplog):
    table = tokenized(path, Wide())
    assert table["tokens"][0].as_py() == Wide().encode(TEXTS[0])
    assert digest(tokenized(path, Wide())) == digest(table)
    assert len(builds) == 2 and "not cached" in caplog.text
    assert not Path(os.environ["GRAPH_TRAINER_CACHE"], "tokens").exists()


def test_documents_of_no_or_one_token_are_passed_over():
    """A tokenizer without bos and eos gives such, and there is nothing to predict in them."""
    documents = [[], [1], [2, 3, 4], [], [5], [6, 7]]
    tokens = pa.chunked_array([documents[:3], documents[3:]], pa.list_(pa.uint16()))
    table = pa.table({"tokens": tokens, "validation": [False] * len(documents)})
    packed = PackedRows(table, "train", seq_len=1, seed=0)
    assert packed.rows_per_epoch == packed.pairs_per_epoch == 3
    for epoch in range(20):
        pairs = set()
        for row in range(3 * epoch, 3 * epoch + 3):
            inputs, positions, labels = np.empty((3, 1), dtype=np.int64)
            packed.fill(row, inputs, positions, labels)
            pairs.add((int(inputs[0]), int(labels[0])))
        assert pairs == {(2, 3), (3, 4), (6, 7)}
