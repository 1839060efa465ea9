"""The trained tokenizer: exact, deterministic, trained once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data import tokenizer as tokenizer_module
from graph_trainer.titan.data.corpus import open_corpus
from graph_trainer.titan.data.tokenizer import ByteBPETokenizer
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
    assert next(default.encode_documents([text, "x"])) == framed


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


def test_trained_once_and_again_for_another_corpus_or_size(folder, monkeypatch):
    builds = []
    train = tokenizer_module._train

    def count(corpus, vocab_size):
        builds.append(vocab_size)
        return train(corpus, vocab_size)

    monkeypatch.setattr(tokenizer_module, "_train", count)
    first = make(folder)
    assert make(folder).tokenizer.to_str() == first.tokenizer.to_str()
    assert builds == [298]
    assert make(folder, vocab_size=290).tokenizer.to_str() != first.tokenizer.to_str()
    assert builds == [298, 288]
    (folder / "new.txt").write_text("quite another text, quite another text")
    make(folder)
    assert builds == [298, 288, 298]


def test_validation_text_is_not_learnt_from(folder):
    before = make(folder).tokenizer.to_str()
    validation = set(open_corpus("text", str(folder)).documents("validation"))
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
    longest = max(map(len, corpus.documents("train")))
    monkeypatch.setattr(tokenizer_module, "SAMPLE_CHARACTERS", 1000)
    sample = tokenizer_module._sample(corpus)
    assert 1000 <= sum(map(len, sample)) < 1000 + longest
    assert sample == tokenizer_module._sample(corpus)
    assert set(sample) < set(corpus.documents("train"))


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
