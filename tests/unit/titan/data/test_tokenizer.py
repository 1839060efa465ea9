"""The trained tokenizer: exact, deterministic, trained once; and the tokens of a corpus."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data import tokenizer as tokenizer_module
from graph_trainer.titan.data.corpus import Corpus, open_corpus
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer, tokenize
from tests.examples import examples

REPOSITORY = Path(__file__).resolve().parents[4]


def make(folder: Path, vocab_size: int = 300) -> ByteBPETokenizer:
    config = ByteBPETokenizer.Config(
        vocab_size=vocab_size, dataset="text", dataset_path=str(folder)
    )
    return config.build(tokenizer_path="./not/there")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of text, with an empty cache."""
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(f"the cat number {i} sat on the mat; été, 猫 <|eos|>\n" * 5)
    return text


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The tokenizer that a run without options trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPH_TRAINER_CACHE", str(tmp_path_factory.mktemp("cache")))
        return ByteBPETokenizer.Config().build(tokenizer_path="./not/there")


special = st.sampled_from(["<|bos|>", "<|eos|>", "</s>", "\r\n", "\0", "\ufeff", "  def f():"])


@given(text=st.lists(st.text() | special).map("".join))
@examples(300)
def test_the_round_trip_is_exact_and_no_text_is_special(default, text):
    ids = default.encode(text)
    assert default.decode(ids) == text
    assert all(0 <= value < default.bos_id for value in ids)
    framed = default.encode(text, add_bos=True, add_eos=True)
    assert framed == [default.bos_id, *ids, default.eos_id]
    assert default.decode(framed) == text


def test_the_default_fits_the_debug_model_and_compresses(default):
    assert default.get_vocab_size() == 2048
    assert {default.bos_id, default.eos_id} == {2046, 2047}
    text = Path(json.__file__).read_text()
    assert len(default.encode(text)) < len(text) / 2.5


def test_a_small_corpus_has_less_tokens_than_asked_for(folder):
    tokenizer = make(folder, vocab_size=5000)
    assert 258 < tokenizer.get_vocab_size() < 5000
    assert tokenizer.eos_id == tokenizer.get_vocab_size() - 1


def test_every_byte_fits_the_smallest_vocabulary_and_no_smaller_one(folder):
    tokenizer = make(folder, vocab_size=258)
    assert tokenizer.get_vocab_size() == 258
    assert tokenizer.decode(tokenizer.encode("猫 and \U0001f408")) == "猫 and \U0001f408"
    with pytest.raises(ConfigError, match="vocab_size = 257 is too small.*258"):
        make(folder, vocab_size=257)


def test_decode_refuses_ids_that_are_none(folder):
    tokenizer = make(folder)
    for bad in (-1, tokenizer.get_vocab_size()):
        with pytest.raises(ValueError, match=f"token id {bad} "):
            tokenizer.decode([bad])


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Grows by a dataset's name with every table that is built from its documents."""
    counted: list[str] = []
    documents = Corpus.documents

    def count(corpus: Corpus):
        counted.append(corpus.name)
        return documents(corpus)

    monkeypatch.setattr(Corpus, "documents", count)
    return counted


def test_trained_once_and_again_for_another_corpus_or_size(folder, reads):
    first = make(folder)
    assert make(folder).tokenizer.to_str() == first.tokenizer.to_str()
    assert len(reads) == 1
    assert make(folder, vocab_size=290).tokenizer.to_str() != first.tokenizer.to_str()
    assert len(reads) == 2
    (folder / "new.txt").write_text("quite another text, quite another text")
    make(folder)
    assert len(reads) == 3


def test_validation_text_is_not_learnt_from(folder):
    before = make(folder).tokenizer.to_str()
    documents = open_corpus("text", str(folder)).documents()
    validation = {text for text, validates in documents if validates}
    changed = [file for file in folder.iterdir() if file.read_text() in validation]
    assert changed
    for file in changed:
        file.write_text("zyzzyva " * 500)
    assert make(folder).tokenizer.to_str() == before
    changed_train = next(file for file in folder.iterdir() if file not in changed)
    changed_train.write_text("zyzzyva " * 500)
    assert make(folder).tokenizer.to_str() != before


def test_a_sample_is_capped_and_the_same_every_time(folder, monkeypatch):
    corpus = open_corpus("text", str(folder))
    train = [text for text, validates in corpus.documents() if not validates]
    monkeypatch.setattr(tokenizer_module, "SAMPLE_CHARACTERS", 1000)
    sample = tokenizer_module._sample(corpus)
    assert 1000 <= sum(map(len, sample)) < 1000 + max(map(len, train))
    assert sample == tokenizer_module._sample(corpus)
    assert set(sample) < set(train)


PRINT_TOKENIZER = """
import sys
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer
tokenizer = ByteBPETokenizer.Config(dataset="text", dataset_path=sys.argv[1]).build()
print(tokenizer.tokenizer.to_str())
"""


def test_another_machine_trains_the_same_tokenizer(folder):
    """A process with another cache, hash seed and number of threads."""
    environment = {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_TOKENIZER, str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "GRAPH_TRAINER_CACHE": str(folder.parent / "other"), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip() == make(folder, vocab_size=2048).tokenizer.to_str(), done.stderr


TEXTS = [f"document {i} of a few words" for i in range(150)]


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A dataset of TEXTS, with an empty cache."""
    monkeypatch.setenv("GRAPH_TRAINER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def tokenized(path: Path, tokenizer: BaseTokenizer) -> pa.Table:
    return tokenize(open_corpus("text", str(path)), tokenizer)


def test_every_document_is_between_bos_and_eos(path):
    tokenizer = make(path)
    table = tokenized(path, tokenizer)
    expected = [tokenizer.encode(text, add_bos=True, add_eos=True) for text in TEXTS]
    assert table["tokens"].to_pylist() == expected
    assert table["tokens"].type.value_type == "uint16"
    documents = open_corpus("text", str(path)).documents()
    assert table["validation"].to_pylist() == [validates for _, validates in documents]


def test_tokenised_once_and_again_for_other_text_or_another_tokenizer(path, reads):
    tokenizer, other = make(path), make(path, vocab_size=280)
    reads.clear()
    first = tokenized(path, tokenizer)
    assert tokenized(path, tokenizer).equals(first)
    assert len(reads) == 1
    assert not tokenized(path, other).equals(first)
    assert len(reads) == 2
    path.write_text('{"text": "another"}\n')
    assert not tokenized(path, tokenizer).equals(first)
    assert len(reads) == 3


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


def test_torchtitans_tokenizer_works_and_is_told_from_another(path, reads):
    one = hugging_face(path.parent / "one", "</s>")
    other = hugging_face(path.parent / "other", "<end>")
    tokens = tokenized(path, one)["tokens"].to_pylist()
    assert tokens == [one.encode(text, add_bos=True, add_eos=True) for text in TEXTS]
    assert tokens[0][0] == one.bos_id and tokens[0][-1] == one.eos_id
    assert tokenized(path, other)["tokens"][0].as_py()[-1] == other.eos_id != one.eos_id
    tokenized(path, one)
    assert len(reads) == 2


class Wide(BaseTokenizer):
    """Ids beyond 16 bits, and nothing that tells it from another tokenizer."""

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [65_536 + ord(character) for character in text]

    def decode(self, ids) -> str:
        return "".join(chr(value - 65_536) for value in ids)

    def get_vocab_size(self) -> int:
        return 1 << 20


def test_an_unknown_tokenizer_with_wide_ids_works_uncached(path, reads, caplog):
    table = tokenized(path, Wide())
    assert table["tokens"][0].as_py() == Wide().encode(TEXTS[0])
    assert tokenized(path, Wide()).equals(table)
    assert len(reads) == 2 and "not cached" in caplog.text
    assert not Path(os.environ["GRAPH_TRAINER_CACHE"], "tokens").exists()
