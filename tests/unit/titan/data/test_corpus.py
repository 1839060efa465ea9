"""Documents: what is read, how it is split, and what is refused."""

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.corpus import DATASETS, open_corpus
from tests.examples import examples


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def split(corpus) -> tuple[list[str], list[str]]:
    train = [text for text, validates in corpus.documents() if not validates]
    return train, [text for text, validates in corpus.documents() if validates]


def texts(path: Path) -> list[str]:
    return [text for text, _ in open_corpus("text", str(path)).documents()]


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def test_stdlib_is_real_text_split_by_file():
    corpus = open_corpus("stdlib")
    train, validation = split(corpus)
    names = {file.relative_to(corpus.root).as_posix() for file in corpus.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not {name for name in names if {"test", "site-packages"} & set(name.split("/"))}
    assert sum(map(len, train)) > 4_000_000
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.15
    by_text = {file.read_text("utf-8") for file in corpus.files}
    assert set(train) | set(validation) <= by_text  # whole files
    assert len(train) + len(validation) == sum(1 for _ in corpus.read())


@given(st.lists(st.text(max_size=30), min_size=2, max_size=40))
@examples(100)
def test_equal_records_are_in_the_same_split(records):
    with tempfile.TemporaryDirectory() as folder:
        path = write_jsonl(Path(folder, "a.jsonl"), records)
        documents = [text for text in records if text.strip()]
        if not documents:
            with pytest.raises(ConfigError, match="no documents"):
                open_corpus("text", str(path))
            return
        train, validation = split(open_corpus("text", str(path)))
    assert sorted(train + validation) == sorted(documents)
    assert not set(train) & set(validation)
    assert train
    assert bool(validation) == (len(set(documents)) > 1)


def test_documents_that_would_all_validate_leave_one_to_train(tmp_path):
    small = [text for text in map(str, range(2000)) if hash_of(text) < 2**64 // 100]
    train, validation = split(open_corpus("text", str(write_jsonl(tmp_path / "a.jsonl", small))))
    assert train == [max(small, key=hash_of)]
    assert len(validation) == len(small) - 1 > 1


def test_a_files_split_depends_on_its_path_only(tmp_path):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    before = split(open_corpus("text", str(tmp_path)))[1]
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"document {i} grew")
    after = split(open_corpus("text", str(tmp_path)))[1]
    assert before and [text + " grew" for text in before] == after


line = st.sampled_from(["", " ", "word", "word " * 150, "é" * 2000])
ending = st.sampled_from(["\n", "\r\n"])


@given(st.lists(st.tuples(line, ending), max_size=80).map(lambda x: "".join(map("".join, x))))
@examples(100)
def test_a_lone_file_is_cut_at_blank_lines_and_nothing_is_lost(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.txt")
        path.write_bytes(text.encode())
        if not text.strip():
            with pytest.raises(ConfigError, match="no documents"):
                open_corpus("text", str(path))
            return
        chunks = texts(path)
    assert "".join(chunks) == text
    for chunk, following in zip(chunks, chunks[1:], strict=False):
        assert len(chunk) >= 4096
        assert not chunk.splitlines()[-1].strip()  # ends with a blank line
        assert following.splitlines()[0].strip()


def test_a_folder_has_files_and_records_in_path_order_without_hidden_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "z.txt").write_text("one\n\ntwo")
    write_jsonl(tmp_path / "c.jsonl", ["three", "  ", "four\u2028five"])
    (tmp_path / "a.txt").write_text("zero")
    for unread in (".hidden.txt", ".git/x.txt", "readme.md"):
        (tmp_path / unread).write_text("no")
    assert texts(tmp_path) == ["zero", "one\n\ntwo", "three", "four\u2028five"]


def test_identity_follows_files_and_how_they_are_read(tmp_path):
    def identity(path: Path = tmp_path):
        return open_corpus("text", str(path)).identity()

    file = tmp_path / "a.txt"
    file.write_text("x")
    seen = [identity(), identity(file)]
    file.write_text("y")  # of the same size
    os.utime(file, ns=(0, 0))
    seen.append(identity())
    time.sleep(0.05)  # what file systems count in
    file.write_text("z")
    os.utime(file, ns=(0, 0))  # and of the same time of modification
    seen.append(identity())
    (tmp_path / "b.txt").symlink_to("nowhere")
    assert identity() == seen[-1]
    assert len(set(map(repr, seen))) == 4
    with pytest.raises(ConfigError, match=r"b\.txt cannot be read.*No such file"):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ("{oops", "Invalid JSON: key must be a string at column 2"),
        ("[1]", "Input should be an object, found [1]"),
        ('{"body": "a"}', "\"text\": Field required, found {'body': 'a'}"),
        ('{"text": 3}', '"text": Input should be a valid string, found 3'),
        ('{"text": "\\ud800"}', "Invalid JSON: unexpected end of hex escape"),  # half a character
    ],
)
def test_a_bad_line_names_file_line_and_remedy(tmp_path, bad, what):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "good"}\n\n' + bad + "\n")
    open_corpus("text", str(path))  # cheap: it reads the first document only
    with pytest.raises(ConfigError) as caught:
        texts(path)
    message = str(caught.value)
    assert what in message and f"{path}, line 3" in message and "correct or remove" in message


@pytest.mark.parametrize("lone", [True, False])
def test_text_in_another_encoding_is_refused_by_name(tmp_path, lone):
    path = tmp_path / "latin.txt"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.txt cannot be read as UTF-8.*iconv") as caught:
        open_corpus("text", str(path if lone else tmp_path))
    assert "permissions" not in str(caught.value)


def test_bad_datasets_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "corpus.txt").write_text("text")
    (tmp_path / "a.csv").write_text("text")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "empty").mkdir()
    cases = {
        ("stdlibb", None): ["'stdlibb'", "Did you mean 'stdlib'", *DATASETS],
        ("c4", None): ["'c4'", *DATASETS],
        ("text", None): ["needs dataset_path"],
        ("stdlib", str(tmp_path)): ["takes no path", "dataset = 'text'"],
        ("text", str(tmp_path / "corpsu.txt")): ["does not exist", str(tmp_path), "Name a .txt or"],
        ("text", str(tmp_path / "no" / "where")): ["does not exist"],
        ("text", str(tmp_path / "a.csv")): ["'.csv'", ".jsonl"],
        ("text", str(tmp_path / "empty")): ["of 0 .txt and .jsonl files", "folder with text."],
        ("text", str(tmp_path / "blank.jsonl")): ["no documents", "of 1 "],
    }
    for arguments, parts in cases.items():
        with pytest.raises(ConfigError) as caught:
            open_corpus(*arguments)
        for part in parts:
            assert part in str(caught.value), (arguments, part)


def test_a_library_source_in_another_encoding_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    (tmp_path / "b.py").write_text("pass")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [text for _, text in open_corpus("stdlib").read()] == ["pass"]
