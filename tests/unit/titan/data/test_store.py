"""Tokens on disk: what is kept, for which tokenizer, and when it is made again."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data import store as store_module
from graph_trainer.titan.data.corpus import open_corpus
from graph_trainer.titan.data.store import open_token_store
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer

TEXTS = [f"document {i} of a few words" for i in range(50)]


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A dataset of TEXTS, with a cache of its own beside it."""
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def builds(monkeypatch) -> list[int]:
    """Grows by one with every corpus that is tokenised."""
    counted: list[int] = []
    build = store_module._build

    def count(*args) -> None:
        counted.append(1)
        build(*args)

    monkeypatch.setattr(store_module, "_build", count)
    return counted


def bpe(path: Path, vocab_size: int = 300) -> ByteBPETokenizer:
    return ByteBPETokenizer.Config(
        vocab_size=vocab_size, dataset="text", dataset_path=str(path)
    ).build()


def opened(path: Path, tokenizer: BaseTokenizer):
    return open_token_store(open_corpus("text", str(path)), tokenizer)


def documents(store) -> list[list[int]]:
    bounds = store.offsets.tolist()
    return [store.tokens[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


def test_every_document_stands_between_bos_and_eos(path):
    tokenizer = bpe(path)
    store = opened(path, tokenizer)
    assert documents(store) == [tokenizer.encode(t, add_bos=True, add_eos=True) for t in TEXTS]
    assert store.tokens.dtype == "uint16"
    assert not store.tokens.flags.writeable
    validation = [text for text, is_in in zip(TEXTS, store.validation, strict=True) if is_in]
    assert validation == list(open_corpus("text", str(path)).documents("validation"))


def test_many_batches_are_as_good_as_one(path, monkeypatch):
    tokenizer = bpe(path)
    expected = opened(path, tokenizer).digest
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", str(path.parent / "another"))
    monkeypatch.setattr(store_module, "_BATCH_CHARACTERS", 60)
    assert opened(path, tokenizer).digest == expected


def test_tokenised_once_and_again_for_other_text_or_another_tokenizer(path, builds):
    tokenizer = bpe(path)
    first = opened(path, tokenizer)
    assert opened(path, tokenizer).digest == first.digest
    assert len(builds) == 1
    assert opened(path, bpe(path, vocab_size=280)).digest != first.digest
    assert len(builds) == 2
    path.write_text('{"text": "another"}\n')
    assert opened(path, tokenizer).digest != first.digest
    assert len(builds) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:10],
        lambda data: b"",
        lambda data: bytes(len(data)),
        lambda data: b"x" + data[1:],
        lambda data: data[:-100] + bytes(100),
    ],
)
def test_a_damaged_file_is_made_again_with_a_log_line(path, damage, caplog):
    tokenizer = bpe(path)
    expected = documents(opened(path, tokenizer))
    (file,) = Path(os.environ["GRAPH_TRAINER_CACHE"], "tokens").glob("*.bin")
    file.write_bytes(damage(file.read_bytes()))
    assert documents(opened(path, tokenizer)) == expected
    assert "corrupt" in caplog.text


def test_a_bad_line_leaves_no_file_behind(path):
    tokenizer = bpe(path)
    path.write_text('{"text": "a"}\n{"text": "b"}\noops\n')
    with pytest.raises(ConfigError, match="line 3"):
        opened(path, tokenizer)
    assert not list(Path(os.environ["GRAPH_TRAINER_CACHE"], "tokens").glob("*.bin*tmp"))
    assert not list(Path(os.environ["GRAPH_TRAINER_CACHE"], "tokens").glob("*.bin"))


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
    found = documents(opened(path, one))
    assert found == [one.encode(text, add_bos=True, add_eos=True) for text in TEXTS]
    assert found[0][0] == one.bos_id and found[0][-1] == one.eos_id
    assert documents(opened(path, other))[0][-1] == other.eos_id != one.eos_id
    opened(path, one)
    assert len(builds) == 2


class Wide(BaseTokenizer):
    """Ids beyond 16 bits, and nothing that tells it from another tokenizer."""

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [65_536 + ord(character) for character in text]

    def decode(self, ids) -> str:
        return "".join(chr(value - 65_536) for value in ids)

    def get_vocab_size(self) -> int:
        return 1 << 20


def test_the_digest_is_of_the_tokens_not_only_of_their_number(path):
    before = opened(path, Wide()).digest
    assert opened(path, Wide()).digest == before
    path.write_text(path.read_text().replace("document 7 ", "document 8 "))
    assert opened(path, Wide()).digest != before


def test_an_unknown_tokenizer_with_wide_ids_works_uncached(path, builds, caplog):
    store = opened(path, Wide())
    assert documents(store)[0] == Wide().encode(TEXTS[0])
    opened(path, Wide())
    assert len(builds) == 2 and "not cached" in caplog.text
    assert not Path(os.environ["GRAPH_TRAINER_CACHE"], "tokens").exists()
