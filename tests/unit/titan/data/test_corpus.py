"""Documents: what is read, how it is split, and what is refused."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_trainer.errors import ConfigError
from graph_trainer.titan.data.corpus import (
    CHUNK_CHARACTERS,
    DATASETS,
    _stable_hash,
    open_corpus,
)
from tests.examples import examples


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def split(corpus) -> tuple[list[str], list[str]]:
    return list(corpus.documents("train")), list(corpus.documents("validation"))


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
    assert len(train) + len(validation) == sum(1 for _ in corpus.documents())
    assert corpus.content_hash == open_corpus("stdlib").content_hash


@given(st.lists(st.text(max_size=30), min_size=2, max_size=40))
@examples(100)
def test_equal_records_are_in_the_same_split(texts):
    with tempfile.TemporaryDirectory() as folder:
        path = write_jsonl(Path(folder, "a.jsonl"), texts)
        documents = [text for text in texts if text.strip()]
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
    small = [text for text in map(str, range(2000)) if _stable_hash(text) < 2**64 // 100]
    train, validation = split(open_corpus("text", str(write_jsonl(tmp_path / "a.jsonl", small))))
    assert train == [max(small, key=_stable_hash)]
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
        chunks = list(open_corpus("text", str(path)).documents())
    assert "".join(chunks) == text
    for chunk, following in zip(chunks, chunks[1:], strict=False):
        assert len(chunk) >= CHUNK_CHARACTERS
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
    corpus = open_corpus("text", str(tmp_path))
    assert list(corpus.documents()) == ["zero", "one\n\ntwo", "three", "four\u2028five"]


def test_content_hash_follows_paths_bytes_and_how_a_file_is_read(tmp_path):
    def digest(files: dict[str, str], lone: str = "") -> str:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            return open_corpus("text", str(Path(folder, lone))).content_hash

    record = '{"text": "a"}'
    assert digest({"a.txt": "x", "b.txt": "y"}) == digest({"b.txt": "y", "a.txt": "x"})
    assert digest({"a.txt": "x"}, "a.txt") == digest({"b.txt": "x"}, "b.txt")
    different = [
        digest({"a.txt": "x", "b.txt": "y"}),
        digest({"a.txt": "xy"}),
        digest({"b.txt": "xy"}),
        digest({"a.txt": "x", "b.txt": "z"}),
        digest({"a.txt": "b.txtx"}),
        digest({"a.txt": "", "b.txt": "x"}),
        digest({"a.txt": record}),
        digest({"a.txt": record}, "a.txt"),
        digest({"a.jsonl": record}, "a.jsonl"),
    ]
    assert len(set(different)) == len(different)


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
        list(open_corpus("text", str(path)).documents())
    message = str(caught.value)
    assert what in message and f"{path}, line 3" in message and "correct or remove" in message


@pytest.mark.parametrize("lone", [True, False])
def test_text_in_another_encoding_is_refused_by_name(tmp_path, lone):
    path = tmp_path / "latin.txt"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.txt is not UTF-8.*iconv"):
        open_corpus("text", str(path if lone else tmp_path))


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
        ("text", str(tmp_path / "corpsu.txt")): ["does not exist", "corpus.txt'"],
        ("text", str(tmp_path / "no" / "where")): ["does not exist"],
        ("text", str(tmp_path / "a.csv")): ["'.csv'", ".jsonl"],
        ("text", str(tmp_path / "empty")): ["without a single .txt or .jsonl"],
        ("text", str(tmp_path / "blank.jsonl")): ["no documents", "(1)"],
    }
    for arguments, parts in cases.items():
        with pytest.raises(ConfigError) as caught:
            open_corpus(*arguments)
        for part in parts:
            assert part in str(caught.value), (arguments, part)


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="found no source files.*dataset = 'text'"):
        open_corpus("stdlib")


def test_a_library_source_in_another_encoding_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    (tmp_path / "b.py").write_text("pass")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(open_corpus("stdlib").documents()) == ["pass"]
