"""Documents to train on: the standard library's source, or the user's own text."""

import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from graph_trainer.core.suggest import nearest
from graph_trainer.errors import ConfigError

Split = Literal["train", "validation"]

DATASETS = {
    "stdlib": "the running Python's standard library, source files as documents (no path)",
    "text": "your own .txt or .jsonl file, or a folder of them, at dataset_path",
}
"""Dataset names and what they are."""

VALIDATION_PERCENT = 8
"""Of the documents, about this many in a hundred validate; the others train."""

CHUNK_CHARACTERS = 4096
"""A lone .txt file is cut at blank lines into documents of at least this size."""

RULES_VERSION = 1
"""Part of the content hash: raise it when the same files give other documents."""

# Tests, generated tables, and packages that some Python builds leave out: without them the corpus
# is mostly prose-like source, and nearly the same on every machine that has the same Python.
_SKIPPED_FOLDERS = (
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
    | {"encodings", "pydoc_data"}
    | {"idlelib", "lib2to3", "distutils", "ensurepip", "turtledemo"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, each in the training or the validation split.

    A ``.py`` or ``.txt`` file is one document, and its path decides its split. A ``.jsonl`` record
    is one document, and its text decides its split, so that equal records are in the same split.
    So does the text of each piece of a lone ``.txt`` file, which is cut at blank lines into
    documents of at least CHUNK_CHARACTERS characters; the pieces concatenated are the file.
    Documents of nothing but whitespace are left out. About VALIDATION_PERCENT of the documents
    validate; of two or more documents that differ, each split gets at least one, and a single
    document trains.
    """

    name: str
    """The dataset's name, as in DATASETS."""

    root: Path
    """The file itself, or the folder that the paths of ``files`` start from."""

    files: tuple[Path, ...]
    """Every file, in the order of the documents."""

    @cached_property
    def content_hash(self) -> str:
        """Hexadecimal digits that change with the path or the bytes of any file."""
        from datasets.fingerprint import Hasher

        hasher = Hasher()
        hasher.update((RULES_VERSION, self.name))
        for file in self.files:
            # The name of a lone file does not matter. Its suffix does, and that it is alone: both
            # decide how the file is cut into documents.
            path = f"*{file.suffix}" if self._is_lone_file else self._relative(file)
            with _naming(file):
                hasher.update((path, file.read_bytes()))
        return hasher.hexdigest()

    @cached_property
    def validation(self) -> tuple[bool, ...]:
        """For each document, in order: is it in the validation split?"""
        hashes = [_stable_hash(key) for key, _ in self._read()]
        different = sorted(set(hashes))
        if len(different) < 2:
            return (False,) * len(hashes)
        # The smallest hash validates and the largest trains, whatever their values.
        threshold = 2**64 * VALIDATION_PERCENT // 100
        threshold = min(max(threshold, different[0] + 1), different[-1])
        return tuple(value < threshold for value in hashes)

    def documents(self, split: Split | None = None) -> Iterator[str]:
        """Read the text of the documents, in order, one at a time.

        Args:
            split: only the documents of this split; None for all.

        Raises:
            ConfigError: a file cannot be read, is not UTF-8, or a line of a .jsonl file is not
                an object with a "text" string.
        """
        wanted: Iterable[bool] = itertools.repeat(True)
        if split is not None:
            wanted = (validates == (split == "validation") for validates in self.validation)
        yield from itertools.compress((text for _, text in self._read()), wanted)

    @property
    def _is_lone_file(self) -> bool:
        return self.files == (self.root,)

    def _relative(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    def _read(self) -> Iterator[tuple[str, str]]:
        """Generate what decides the split of each document, and its text."""
        for file in self.files:
            with _naming(file, skip_other_encodings=self.name == "stdlib"):
                documents: Iterable[tuple[str, str]]
                if file.suffix == ".jsonl":
                    documents = ((text, text) for text in _read_jsonl(file))
                elif self._is_lone_file:
                    documents = ((text, text) for text in _read_chunks(file))
                else:
                    text = file.read_bytes().decode("utf-8")
                    documents = [(self._relative(file), text)]
                yield from (document for document in documents if document[1].strip())


def open_corpus(name: str, path: str | None = None) -> Corpus:
    """Open the corpus of a dataset name and, for "text", of a path.

    Lists files and reads at most the first document: a bad line further on is found when the
    corpus is tokenised.

    Args:
        name: a key of DATASETS.
        path: for "text", a .txt or .jsonl file or a folder with such files at
            any depth (hidden ones are passed over); None for "stdlib".

    Raises:
        ConfigError: an unknown name, a path that is missing, not wanted or of the wrong kind, a
            folder without .txt and .jsonl files, or files without a single document.
    """
    if name == "stdlib":
        if path is not None:
            raise ConfigError(
                f"dataset_path = {path!r} is set, but dataset 'stdlib' takes no path. To train "
                "on the files at that path, set dataset = 'text'."
            )
        corpus = _open_stdlib()
    elif name == "text":
        corpus = _open_text(path)
    else:
        near = nearest(name, DATASETS, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        valid = "; ".join(f"{key!r}: {summary}" for key, summary in DATASETS.items())
        raise ConfigError(f"unknown dataset {name!r}.{hint} Datasets are {valid}.")
    if next(corpus.documents(), None) is None:
        raise ConfigError(
            f"dataset {name!r} has no documents: each of the files at {corpus.root} is empty "
            f"({len(corpus.files)}). Name a file or folder with text in it."
        )
    return corpus


def _open_stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(
        root,
        (".py",),
        lambda name: name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES),
    )
    if not files:
        raise ConfigError(
            f"dataset 'stdlib' found no source files at {root}: this Python comes without them. "
            "Install a Python that has them, or set dataset = 'text' and dataset_path."
        )
    return Corpus("stdlib", root, files)


def _open_text(path: str | None) -> Corpus:
    if not path:
        raise ConfigError(
            "dataset 'text' needs dataset_path: a .txt or .jsonl file, or a folder of them."
        )
    root = Path(path).expanduser()
    if not root.exists():
        near = _nearest_sibling(root)
        raise ConfigError(
            f"dataset_path {path!r} does not exist (looked at {root.absolute()}).{near} Name a "
            ".txt or .jsonl file, or a folder of them."
        )
    if root.is_dir():
        files = _walk(root, (".txt", ".jsonl"), lambda name: not name.startswith("."))
        if not files:
            raise ConfigError(
                f"dataset_path {path!r} is a folder without a single .txt or .jsonl file, at any "
                "depth. Put text there, or name another path."
            )
        return Corpus("text", root, files)
    if root.suffix not in (".txt", ".jsonl"):
        raise ConfigError(
            f"dataset_path {path!r} ends in {root.suffix!r}; a dataset is a .txt file, a .jsonl "
            'file (one {"text": ...} a line), or a folder of them. Rename or convert it.'
        )
    return Corpus("text", root, (root,))


def _walk(root: Path, suffixes: tuple[str, ...], wanted: Callable[[str], bool]) -> tuple[Path, ...]:
    """List files below ``root`` by suffix and name, in an order that is the same everywhere."""
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = filter(wanted, subfolders)
        paths += [Path(folder, name) for name in filter(wanted, names) if name.endswith(suffixes)]
    return tuple(sorted(paths, key=lambda file: file.relative_to(root).as_posix()))


@contextmanager
def _naming(file: Path, skip_other_encodings: bool = False) -> Iterator[None]:
    """Turn errors of reading a file into ConfigErrors that name the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        # Python may read its own sources in another encoding; a user's text must not be left
        # out without a message.
        if not skip_other_encodings:
            raise ConfigError(
                f"{file} is not UTF-8 text ({error}). Convert it (iconv -f <encoding> -t utf-8), "
                "or move it out of the dataset."
            ) from error
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error}. Correct its permissions or take it out of the "
            "dataset."
        ) from error


def _read_jsonl(file: Path) -> Iterator[str]:
    with open(file, encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = _text_of(line)
            except ValueError as error:
                raise ConfigError(
                    f'{file}, line {number}: the line {error}. A .jsonl dataset has one {{"text": '
                    '"..."} object a line: correct or remove the line.'
                ) from error
            yield text


def _text_of(line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"is a {type(record).__name__}, not an object")
    if "text" not in record:
        raise ValueError(f'has no "text" among its keys {sorted(record)[:8]}')
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f'has a "text" of type {type(text).__name__}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # "\ud800" is JSON but no Unicode text
        raise ValueError(f'has half a character in "text" ({error})') from error
    return text


def _read_chunks(file: Path) -> Iterator[str]:
    chunk: list[str] = []
    size = 0
    after_blank = False
    with open(file, encoding="utf-8", newline="") as lines:
        for line in lines:
            blank = not line.strip()
            if after_blank and not blank and size >= CHUNK_CHARACTERS:
                yield "".join(chunk)
                chunk, size = [], 0
            chunk.append(line)
            size += len(line)
            after_blank = blank
    yield "".join(chunk)


def _stable_hash(key: str) -> int:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _nearest_sibling(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [entry.name for entry in itertools.islice(path.parent.iterdir(), 10_000)]
    near = nearest(path.name, names, count=1)
    return f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""
